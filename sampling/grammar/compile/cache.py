"""Compiled grammars by constraint: those that requests claim, those on their way, and those kept for the next request.

The cache knows nothing of threads; its owner holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepgraph.sampling.grammar.constraints.constraint import Constraint

if TYPE_CHECKING:
    from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint, GrammarCompiler


@dataclass(eq=False)
class CacheEntry:
    constraint: Constraint
    claims: set[Claim] = field(default_factory=set)
    compiled: bool = False
    nbytes: int = 0
    result: Future[CompiledConstraint] = field(default_factory=Future)

    def settle(self, compiled: CompiledConstraint) -> None:
        """It is compiled. A Future keeps whom it called back, and with them their matchers: the grammar lives on with one of its own."""
        done: Future[CompiledConstraint] = Future()
        done.set_result(compiled)
        waited, self.result = self.result, done
        waited.set_result(compiled)


class Claim:
    """A request's hold on one grammar, compiled or on its way. What is claimed stays in the cache; what nobody claims any more is
    not compiled to its end. It is there before it holds anything, so that whoever is interrupted in `take` has what to release."""

    def __init__(self, compiler: GrammarCompiler, constraint: Constraint) -> None:
        self._compiler, self.constraint = compiler, constraint
        self.entry: CacheEntry | None = None

    def take(self) -> None:
        """Hold the grammar, whose compile begins where nobody has asked for it before; ValueError as by `GrammarCompiler.check`."""
        self._compiler.take(self)

    @property
    def done(self) -> bool:
        """Whether `result` will not wait."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> CompiledConstraint:
        """The grammar; ValueError naming the constraint's kind and the reason where there is none."""
        return self._future.result(timeout)

    def then(self, call: Callable[[Claim], object]) -> None:
        """Call back once it is done, from the thread that compiled it, or at once."""
        self._future.add_done_callback(lambda _: call(self))

    @property
    def _future(self) -> Future[CompiledConstraint]:
        assert self.entry is not None, "nothing was taken"
        return self.entry.result

    def release(self) -> None:
        """Let go of it; a second time does nothing."""
        self._compiler.release(self)


class GrammarCache:
    """At most `max_bytes` of grammars, by the libraries' own figures; the one that was let go of longest ago is dropped first.

    A grammar that is claimed is never dropped, so that those in use may be more than `max_bytes` together. An interrupt may come out of
    any call here: by then a claim is either among those of its entry, so that it can be released, or has changed nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[Constraint, CacheEntry] = {}
        self._idle: OrderedDict[CacheEntry, None] = OrderedDict()  # compiled and claimed by nobody
        self.grammars = self.nbytes = self.hits = self.misses = self.dropped = 0

    def find(self, constraint: Constraint) -> CacheEntry | None:
        """An entry, compiled or on its way; None where there is none."""
        return self._entries.get(constraint)

    def hold(self, entry: CacheEntry, claim: Claim) -> None:
        """One claim more, of an entry that was found."""
        self.hits += 1
        entry.claims.add(claim)
        self._idle.pop(entry, None)

    def add(self, entry: CacheEntry, claim: Claim) -> None:
        """An entry that is to be compiled, and who claims it."""
        assert entry.constraint not in self._entries
        self.misses += 1
        entry.claims.add(claim)
        self._entries[entry.constraint] = entry

    def keep(self, entry: CacheEntry, nbytes: int) -> None:
        """An entry was compiled."""
        if self._entries.get(entry.constraint) is not entry:
            return  # forgotten meanwhile
        entry.compiled, entry.nbytes = True, nbytes
        self.grammars += 1
        self.nbytes += nbytes
        if not entry.claims:
            self._idle[entry] = None
        self._shrink()

    def forget(self, entry: CacheEntry) -> bool:
        """An entry that is not compiled, and will not be; False where it was forgotten already."""
        known = self._entries.get(entry.constraint) is entry
        if known:
            del self._entries[entry.constraint]
        return known

    def release(self, entry: CacheEntry, claim: Claim) -> bool:
        """One claim less; True where nobody waits any more for what is still to be compiled."""
        entry.claims.remove(claim)
        if entry.claims or self._entries.get(entry.constraint) is not entry:
            return False
        if not entry.compiled:
            return True
        self._idle[entry] = None
        self._shrink()
        return False

    def clear(self) -> None:
        """Forget everything; claims may still be released."""
        self._entries.clear()
        self._idle.clear()
        self.grammars = self.nbytes = 0

    def _shrink(self) -> None:
        while self.nbytes > self._max_bytes and self._idle:
            entry, _ = self._idle.popitem(last=False)
            del self._entries[entry.constraint]
            self.grammars -= 1
            self.nbytes -= entry.nbytes
            self.dropped += 1
