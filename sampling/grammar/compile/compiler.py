"""Compiles constraints over one vocabulary in background threads, and caches the compiled grammars."""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, get_args

from stepgraph.sampling.fields import check_value, instance_of, one_of, optional, whole
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.automaton.library import Image
from stepgraph.sampling.grammar.compile.backends import Backends, Grammar
from stepgraph.sampling.grammar.compile.limits import MIB, GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice, Constraint
from stepgraph.sampling.grammar.matchers.checked import CheckedMatcher
from stepgraph.sampling.grammar.matchers.marker import Marker, MarkerMatcher, check_marker
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.lifetimes import BoundToProcess, call_after_fork, close_at_exit

Isolation = Literal["process", "none"]

CACHE_BYTES = 256 * MIB
RECENT_CHECKS = 64  # constraints without errors that are not checked again
MAX_COMPILES = 256  # at a time; also the maximum number of threads of one compile


@dataclass(frozen=True, eq=False)
class CompiledConstraint(BoundToProcess):
    """A constraint, compiled over a vocabulary. Immutable, shared by any number of matchers, which keep it alive beyond the cache."""

    constraint: Constraint
    vocabulary: Vocabulary
    grammar: Grammar = field(repr=False)
    backend: str  # the library that enforces it
    reason: str  # why the preferred library rejected the constraint; empty if it did not
    seconds: float
    marker: Marker | None = None  # None also if the marker is part of the grammar
    check_masks: bool = False

    @property
    def nbytes(self) -> int:
        return self.grammar.nbytes + (self.marker.nbytes if self.marker else 0)

    @property
    def image(self) -> Image | None:
        """The tables with which a device can follow the constraint; None if they do not cover all of it."""
        return self.grammar.image if isinstance(self.grammar, AutomatonGrammar) and self.marker is None else None

    def matcher(self) -> Matcher:
        """A matcher at the start of a text, for one request."""
        matcher = self.grammar.matcher()
        if self.marker:
            matcher = MarkerMatcher(matcher, self.marker)
        return CheckedMatcher(matcher, self.backend) if self.check_masks else matcher


@dataclass(frozen=True)
class CompileStats:
    """The metadata describe the fields as metrics: kind and text, and the name if it is another one."""

    hits: int = field(default=0, metadata={"counter": "Grammars found compiled or being compiled.", "name": "grammar_cache_hits"})
    misses: int = field(default=0, metadata={"counter": "Grammars that had to be compiled.", "name": "grammar_cache_misses"})
    failures: int = field(default=0, metadata={"counter": "Failed compiles.", "name": "compile_failures"})
    running: int = field(default=0, metadata={"gauge": "Compiles in progress.", "name": "compiles_running"})
    waiting: int = field(default=0, metadata={"gauge": "Compiles waiting for a thread.", "name": "compiles_waiting"})
    grammars: int = field(default=0, metadata={"gauge": "Cached grammars."})
    nbytes: int = field(default=0, metadata={"gauge": "Bytes of the cached grammars.", "name": "grammar_cache_bytes"})
    dropped: int = field(default=0, metadata={"counter": "Grammars evicted.", "name": "grammar_cache_evictions"})
    workers_started: int = field(default=0, metadata={"counter": "Worker processes started.", "name": "compile_workers_started"})
    compiles: int = field(default=0, metadata={"counter": "Successful compiles."})  # still claimed or not
    compile_seconds: float = field(default=0.0, metadata={"counter": "Total compile time."})  # of the successful compiles
    longest_compile_seconds: float = field(default=0.0, metadata={"gauge": "Duration of the longest compile."})


@dataclass(eq=False)
class CacheEntry:
    """One constraint in the cache, compiled or being compiled."""

    constraint: Constraint
    claims: set[Claim] = field(default_factory=set)
    compiled: bool = False
    nbytes: int = 0
    result: Future[CompiledConstraint] = field(default_factory=Future)

    def resolve(self, compiled: CompiledConstraint | ValueError) -> None:
        """Set the result. A Future keeps its callbacks and thereby their matchers alive, so the entry then gets a new Future."""
        if isinstance(compiled, ValueError):
            self.result.set_exception(compiled)
            return
        done: Future[CompiledConstraint] = Future()
        done.set_result(compiled)
        pending, self.result = self.result, done
        pending.set_result(compiled)


class Claim:
    """A request's reference to one grammar. A claimed grammar stays in the cache; a compile that is no longer claimed is cancelled.

    Creating a claim does not claim anything yet, so that after an interrupt in `take` there is an object to release."""

    def __init__(self, compiler: GrammarCompiler, constraint: Constraint) -> None:
        self._compiler, self.constraint = compiler, constraint
        self.entry: CacheEntry | None = None

    def take(self) -> None:
        self._compiler.take(self)

    def result(self, timeout: float | None = None) -> CompiledConstraint:
        """Wait for the grammar; ValueError with the constraint's kind and the reason if it cannot be compiled."""
        return self._future.result(timeout)

    def then(self, call: Callable[[Claim], object]) -> None:
        """Call `call` once the compile is done: from the compiling thread, or at once."""
        self._future.add_done_callback(lambda _: call(self))

    @property
    def _future(self) -> Future[CompiledConstraint]:
        assert self.entry is not None, "the claim was not taken"
        return self.entry.result

    def release(self) -> None:
        """Drop the reference; a second call does nothing."""
        self._compiler.release(self)


class GrammarCache:
    """At most `max_bytes` of grammars, as the libraries report them; the least recently released one is dropped first.

    A claimed grammar is never dropped, so the grammars in use may exceed `max_bytes`. The caller holds a lock. An interrupt may end any
    method early: the claim is then either in its entry's `claims`, so that it can be released, or nothing has changed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Constraint, CacheEntry] = OrderedDict()  # least recently released first
        self.counts = dict.fromkeys(("hits", "misses", "grammars", "nbytes", "dropped"), 0)  # as in CompileStats

    def claim_existing(self, claim: Claim) -> bool:
        """Claim the entry of a constraint, if there is one."""
        entry = claim.entry = self._entries.get(claim.constraint)
        if entry is not None:
            self.counts["hits"] += 1
            entry.claims.add(claim)
        return entry is not None

    def add(self, entry: CacheEntry, claim: Claim) -> None:
        """Add an entry that is to be compiled, with its first claim."""
        assert entry.constraint not in self._entries
        self.counts["misses"] += 1
        entry.claims.add(claim)
        self._entries[entry.constraint] = entry

    def record_compiled(self, entry: CacheEntry, nbytes: int) -> None:
        if self._entries.get(entry.constraint) is not entry:
            return  # removed in the meantime
        entry.compiled, entry.nbytes = True, nbytes
        self.counts["grammars"] += 1
        self.counts["nbytes"] += nbytes
        self._shrink()

    def remove_entry(self, entry: CacheEntry) -> bool:
        """Remove an entry that will not be compiled; False if it was removed before."""
        present = self._entries.get(entry.constraint) is entry
        if present:
            del self._entries[entry.constraint]
        return present

    def release(self, entry: CacheEntry, claim: Claim) -> bool:
        """Remove a claim; True if that removes an entry that is not compiled yet."""
        entry.claims.remove(claim)
        if entry.claims or self._entries.get(entry.constraint) is not entry:
            return False
        if not entry.compiled:
            return self.remove_entry(entry)
        self._entries.move_to_end(entry.constraint)
        self._shrink()
        return False

    def clear(self) -> None:
        """Remove all entries; their claims may still be released."""
        self._entries.clear()
        self.counts |= {"grammars": 0, "nbytes": 0}

    def _shrink(self) -> None:
        idle = (entry for entry in tuple(self._entries.values()) if entry.compiled and not entry.claims)
        while self.counts["nbytes"] > self._max_bytes and (entry := next(idle, None)):
            del self._entries[entry.constraint]
            self.counts["grammars"] -= 1
            self.counts["nbytes"] -= entry.nbytes
            self.counts["dropped"] += 1


class GrammarCompiler:
    """A cache of compiled grammars, and up to `max_compiles` compiles at a time; safe to call from any thread.

    Threads and, with `isolation` "process", worker processes are started when a compile needs them. A thread ends when no compile is
    waiting; a worker process ends with `close` or when the compiler is freed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_threads: int = 4,
        backend: BackendChoice = "auto",
        check_masks: bool = False,
        *,
        limits: GrammarLimits | None = None,
        isolation: Isolation = "none",
        max_compiles: int = 2,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        check_value("GrammarCompiler.vocabulary", vocabulary, instance_of(Vocabulary, "a Vocabulary"))
        check_value("GrammarCompiler.limits", limits, optional(instance_of(GrammarLimits, "GrammarLimits")))
        for name, value in (("max_threads", max_threads), ("max_compiles", max_compiles), ("cache_bytes", cache_bytes)):
            check_value(f"GrammarCompiler.{name}", value, whole(1, None if name == "cache_bytes" else MAX_COMPILES))
        check_value("GrammarCompiler.backend", backend, one_of(get_args(BackendChoice)))
        check_value("GrammarCompiler.isolation", isolation, one_of(get_args(Isolation)))
        self.limits, self._isolation = limits or GrammarLimits(), isolation
        self.vocabulary, self._check_masks = vocabulary, check_masks
        self._max_compiles = max_compiles
        self._backends = Backends(vocabulary, backend, self.limits, max_threads)
        self._check_with_backends = functools.lru_cache(RECENT_CHECKS)(self._backends.check)
        self._lock = threading.RLock()  # reentrant: a signal handler may call Engine.stats()
        self._cache = GrammarCache(cache_bytes)
        self._waiting: deque[CacheEntry] = deque()
        self._running: dict[CacheEntry, CompileWorker | None] = {}
        self._workers = [
            CompileWorker(vocabulary, self.limits, max_threads) if isolation == "process" else None for _ in range(max_compiles)
        ]
        self._idle_workers = list(self._workers)
        self._threads = set[threading.Thread]()
        self._counts = {"failures": 0, "compiles": 0, "compile_seconds": 0.0, "longest_compile_seconds": 0.0}  # as in CompileStats
        self._closed = False
        close_at_exit(self)
        call_after_fork(self._detach)

    def _detach(self) -> None:
        self._lock = threading.RLock()  # for `stats` in a fork

    @property
    def note(self) -> str:
        """How grammars are compiled, for the capture report."""
        limits = self.limits
        if self._isolation == "none":
            return "compiled in this process, without limits on time and memory"
        return f"compiled in a worker process, in at most {limits.compile_seconds:g} s and {limits.compile_bytes // MIB} MiB"

    @property
    def stats(self) -> CompileStats:
        with self._lock:
            return CompileStats(
                running=len(self._running),
                waiting=len(self._waiting),
                workers_started=sum(worker.processes_started for worker in self._workers if worker),
                **self._cache.counts,
                **self._counts,  # type: ignore[arg-type]
            )

    def check(self, constraint: Constraint) -> None:
        """ValueError for errors that are found in milliseconds: sizes, keywords, types, references, patterns, markers, and the syntax
        of short EBNF grammars. Contradictions between schemas, and what a library rejects, are found by the compile."""
        if not isinstance(constraint, Constraint):
            raise ValueError(f"constraint: got {type(constraint).__name__}, expected a Constraint")
        self._check_with_backends(constraint)
        if constraint.marker is not None:
            check_marker(constraint.marker, self.vocabulary)

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compile a constraint and wait for it; ValueError with its kind and the reason if it cannot be compiled."""
        claim = Claim(self, constraint)
        try:
            claim.take()
            return claim.result()
        finally:
            claim.release()

    def close(self, seconds: float = 0.0) -> None:
        """Cancel all compiles, with an error for their claims, and end the workers. Compiled grammars remain usable. A compile in this
        process cannot be cancelled; wait for it at most `seconds`."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            for busy in filter(None, self._running.values()):
                busy.kill()
            idle, self._idle_workers = self._idle_workers, []
            self._cache.clear()
        for entry in waiting:
            entry.resolve(ValueError(f"constraint {entry.constraint.kind}: cannot be compiled: the compiler was closed"))
        for worker in filter(None, idle):
            worker.close()
        for thread in tuple(self._threads) if seconds else ():
            thread.join(seconds)

    def take(self, claim: Claim) -> None:
        constraint, entry = claim.constraint, CacheEntry(claim.constraint)
        with self._lock:
            if isinstance(constraint, Constraint) and self._cache.claim_existing(claim):
                return
        self.check(constraint)
        with self._lock:
            if self._closed:
                raise RuntimeError("GrammarCompiler: it is closed")
            if not self._cache.claim_existing(claim):  # another thread may have added it meanwhile
                self._ensure_thread()
                claim.entry = entry
                self._waiting.append(entry)  # before adding to the cache: each entry of the cache must be queued
                self._cache.add(entry, claim)

    def _ensure_thread(self) -> None:
        if len(self._threads) >= self._max_compiles:
            return
        thread = threading.Thread(target=self._work, name="stepgraph-compile", daemon=True)
        try:
            self._threads.add(thread)
            thread.start()
        except BaseException:  # no thread can be started, or an interrupt: a thread that did start finds no work and ends
            self._threads.discard(thread)
            raise

    def release(self, claim: Claim) -> None:
        with self._lock:
            entry = claim.entry
            if entry is None or claim not in entry.claims or not self._cache.release(entry, claim):
                return
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif worker := self._running.get(entry):
                worker.kill()

    def _work(self) -> None:
        """Compile until no entry is waiting."""
        while True:
            with self._lock:
                if not self._waiting or not self._idle_workers:
                    self._threads.discard(threading.current_thread())
                    return
                entry = self._waiting.popleft()
                worker = self._running[entry] = self._idle_workers.pop()
                if worker:
                    worker.begin_compile()
            result = self._compile_entry(entry.constraint, worker)
            with self._lock:
                del self._running[entry]
                if isinstance(result, ValueError):
                    self._counts["failures"] += self._cache.remove_entry(entry)
                else:
                    self._cache.record_compiled(entry, result.nbytes)
                    self._counts["compiles"] += 1
                    self._counts["compile_seconds"] += result.seconds
                    self._counts["longest_compile_seconds"] = max(self._counts["longest_compile_seconds"], result.seconds)
                closed = self._closed
                if not closed:
                    self._idle_workers.append(worker)
            if worker is not None and closed:
                worker.close()
            entry.resolve(result)

    def _compile_entry(self, constraint: Constraint, worker: CompileWorker | None) -> CompiledConstraint | ValueError:
        start = time.perf_counter()
        try:
            grammar, name, why = self._backends.build(constraint, worker)
            marker = None if constraint.marker is None else Marker(constraint.marker, self.vocabulary, constraint.marker_limit)
            if marker and marker.text and isinstance(grammar, AutomatonGrammar):
                after = grammar.after(marker)
                if after.nbytes <= self.limits.automaton_bytes:
                    grammar, marker = after, None
        except ValueError as error:
            return error
        except BaseException as error:  # the claims need a result after any failure
            return ValueError(f"constraint {constraint.kind}: cannot be compiled: {type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        return CompiledConstraint(constraint, self.vocabulary, grammar, name, why, seconds, marker, self._check_masks)
