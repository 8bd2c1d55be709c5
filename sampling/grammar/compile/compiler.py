"""From a constraint to a grammar over one vocabulary, once per constraint, in threads of its own.

Compiling takes from microseconds to seconds, and some grammars take all there is. Whoever wants one claims it and is told when
it is there; xgrammar runs in a process that may be ended (`isolation` "process"), or in this one ("none").
"""

from __future__ import annotations

import collections
import threading
import time
from dataclasses import dataclass
from typing import Literal, get_args

from stepgraph.sampling.fields import is_int
from stepgraph.sampling.grammar.compile.backends import Backends, Grammar
from stepgraph.sampling.grammar.compile.cache import CacheEntry, Claim, GrammarCache
from stepgraph.sampling.grammar.compile.limits import MIB, GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice, Constraint, checked_backend
from stepgraph.sampling.grammar.matchers.checked import CheckedMatcher
from stepgraph.sampling.grammar.matchers.marker import Marker, MarkerMatcher, check_marker
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.matcher import Matcher
from stepgraph.sampling.lifetimes import end_at_exit

Isolation = Literal["process", "none"]

CACHE_BYTES = 256 * MIB


@dataclass(frozen=True, eq=False)
class CompiledConstraint:
    """Immutable and shared by any number of matchers, each of which keeps it alive whatever the cache does."""

    constraint: Constraint
    vocabulary: Vocabulary
    grammar: Grammar
    backend: str  # the library that enforces it
    reason: str  # why it is not the one that would have been preferred; empty where it is
    seconds: float
    marker: Marker | None = None
    check_masks: bool = False

    @property
    def nbytes(self) -> int:
        return self.grammar.nbytes + (self.marker.nbytes if self.marker else 0)

    def matcher(self) -> Matcher:
        """A matcher at the start of a text, for one request."""
        matcher = self.grammar.matcher()
        if self.marker:
            matcher = MarkerMatcher(matcher, self.marker, self.vocabulary)
        return CheckedMatcher(matcher, self.backend) if self.check_masks else matcher


@dataclass(frozen=True)
class CompileStats:
    hits: int = 0  # claims of a grammar that was compiled already, or on its way
    misses: int = 0
    failures: int = 0
    running: int = 0  # compiles in a thread
    waiting: int = 0  # compiles for a thread
    grammars: int = 0  # compiled, in the cache
    nbytes: int = 0  # of them
    dropped: int = 0  # from the cache, to make room
    workers_started: int = 0
    compiles: int = 0  # that ended with a grammar, whoever still wanted it
    compile_seconds: float = 0.0  # of these
    longest_compile_seconds: float = 0.0


class GrammarCompiler:
    """Claims, a cache in front of the compiler, and up to `max_compiles` compiles at a time; safe to use from any thread.

    A thread and, with `isolation` "process", its worker exist from the first compile that needs them: the thread until there is
    nothing more to compile, the worker until `close` or the compiler's end.
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
        for name, value in (("max_threads", max_threads), ("max_compiles", max_compiles), ("cache_bytes", cache_bytes)):
            if not is_int(value) or value < 1:
                raise ValueError(f"GrammarCompiler.{name}: got {value!r}, want an int >= 1")
        checked_backend("GrammarCompiler.backend", backend)
        checked_isolation("GrammarCompiler.isolation", isolation)
        self.limits, self._isolation = limits or GrammarLimits(), isolation
        self._vocabulary, self._check_masks = vocabulary, check_masks
        self._max_threads, self._max_compiles = max_threads, max_compiles
        self._backends = Backends(vocabulary, backend, self.limits, max_threads)
        self._lock = threading.Lock()
        self._cache = GrammarCache(cache_bytes)
        self._waiting: collections.deque[CacheEntry] = collections.deque()
        self._running: dict[CacheEntry, CompileWorker | None] = {}
        self._workers: list[CompileWorker] = []
        self._idle_workers: list[CompileWorker] = []
        self._threads = set[threading.Thread]()
        self._failures = self._compiles = 0
        self._seconds = self._longest = 0.0
        self._closed = False
        end_at_exit(self)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def told(self) -> str:
        """Where grammars are compiled, for a report."""
        limits = self.limits
        if self._isolation == "none":
            return "compiled in this process, whatever time and memory they take"
        return f"compiled in a worker process, in at most {limits.compile_seconds:g} s and {limits.compile_bytes // MIB} MiB"

    @property
    def stats(self) -> CompileStats:
        with self._lock:
            cache, started = self._cache, sum(worker.started for worker in self._workers)
            return CompileStats(
                hits=cache.hits,
                misses=cache.misses,
                failures=self._failures,
                running=len(self._running),
                waiting=len(self._waiting),
                grammars=cache.grammars,
                nbytes=cache.nbytes,
                dropped=cache.dropped,
                workers_started=started,
                compiles=self._compiles,
                compile_seconds=self._seconds,
                longest_compile_seconds=self._longest,
            )

    def check(self, constraint: Constraint) -> None:
        """ValueError for what is seen to be wrong without a library: sizes, keywords, patterns, markers. Takes no longer than reading."""
        if not isinstance(constraint, Constraint):
            raise ValueError(f"constraint: got {type(constraint).__name__}, want a Constraint")
        self._backends.check(constraint)
        if constraint.marker is not None:
            check_marker(constraint.marker, self._vocabulary)

    def claim(self, constraint: Constraint) -> Claim:
        """A hold on the grammar of a constraint, taken; ValueError as by `check`."""
        claim = Claim(self, constraint)
        try:
            claim.take()
        except BaseException:
            claim.release()
            raise
        return claim

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """The grammar of a constraint, waited for; ValueError naming its kind and the reason where it cannot be enforced."""
        claim = Claim(self, constraint)
        try:
            claim.take()
            return claim.result()
        finally:
            claim.release()

    def close(self, seconds: float = 0.0) -> None:
        """End what is being compiled, and the workers; who waits is told. What was compiled lives as long as it is used.

        What is compiled in this process cannot be ended; it is waited for so long at most.
        """
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, collections.deque()
            for busy in filter(None, self._running.values()):
                busy.kill()
            idle, self._idle_workers = self._idle_workers, []
            self._cache.clear()
        for entry in waiting:
            entry.result.set_exception(ValueError(f"constraint {entry.constraint.kind}: cannot be compiled: the compiler was closed"))
        for worker in idle:
            worker.close()
        for thread in tuple(self._threads) if seconds else ():
            thread.join(seconds)

    def take(self, claim: Claim) -> None:
        """`Claim.take`."""
        constraint, entry = claim.constraint, CacheEntry(claim.constraint)
        with self._lock:
            if isinstance(constraint, Constraint) and self._hold(claim):
                return
        self.check(constraint)
        with self._lock:
            if not self._hold(claim):  # somebody may have been quicker
                self._ensure_thread()
                claim.entry = entry
                self._waiting.append(entry)  # first: what is in the cache is sure to be compiled
                self._cache.add(entry, claim)

    def _hold(self, claim: Claim) -> bool:
        self._require_open()
        claim.entry = self._cache.find(claim.constraint)
        if claim.entry is not None:
            self._cache.hold(claim.entry, claim)
        return claim.entry is not None

    def _ensure_thread(self) -> None:
        if len(self._threads) >= self._max_compiles:
            return
        thread = threading.Thread(target=self._work, name="stepgraph-compile", daemon=True)
        try:
            self._threads.add(thread)
            thread.start()
        except BaseException:  # none is to be had; or it was an interrupt, and this one finds nothing to do
            self._threads.discard(thread)
            raise

    def release(self, claim: Claim) -> None:
        """`Claim.release`."""
        with self._lock:
            entry = claim.entry
            if entry is None or claim not in entry.claims or not self._cache.release(entry, claim):
                return
            self._cache.forget(entry)
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif worker := self._running.get(entry):
                worker.kill()

    def _work(self) -> None:
        """Compile until there is nothing more to compile."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                entry = self._waiting.popleft()
                worker = self._running[entry] = self._worker()
            compiled, error = self._compiled(entry.constraint, worker)
            with self._lock:
                del self._running[entry]
                if compiled is not None:
                    self._cache.keep(entry, compiled.nbytes)
                    self._compiles += 1
                    self._seconds += compiled.seconds
                    self._longest = max(self._longest, compiled.seconds)
                else:
                    self._failures += self._cache.forget(entry)
                if worker is not None and not self._closed:
                    self._idle_workers.append(worker)
            if worker is not None and self._closed:
                worker.close()
            if compiled is not None:
                entry.settle(compiled)
            else:
                entry.result.set_exception(error)

    def _worker(self) -> CompileWorker | None:
        if self._isolation == "none":
            return None
        if not self._idle_workers:
            self._workers.append(CompileWorker(self._vocabulary, self.limits, self._max_threads))
            self._idle_workers.append(self._workers[-1])
        worker = self._idle_workers.pop()
        worker.begin()
        return worker

    def _compiled(self, constraint: Constraint, worker: CompileWorker | None) -> tuple[CompiledConstraint | None, ValueError | None]:
        start = time.perf_counter()
        try:
            grammar, name, why = self._backends.build(constraint, worker)
            marker = None if constraint.marker is None else Marker(constraint.marker, self._vocabulary)
        except ValueError as error:
            return None, error
        except BaseException as error:  # whatever it is, it is this constraint's fault, and somebody waits to hear of it
            return None, ValueError(f"constraint {constraint.kind}: cannot be compiled: {type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        return CompiledConstraint(constraint, self._vocabulary, grammar, name, why, seconds, marker, self._check_masks), None

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("GrammarCompiler: it is closed")


def checked_isolation(name: str, value: object) -> None:
    if value not in get_args(Isolation):
        raise ValueError(f"{name}: got {value!r}, want one of {', '.join(get_args(Isolation))}")
