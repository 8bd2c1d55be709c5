"""Compiled grammars by constraint: those that requests use, those on their way, and those kept for the next request.

Knows nothing of threads; its owner holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepgraph.sampling.grammar.constraint import Constraint

if TYPE_CHECKING:
    from stepgraph.sampling.grammar.compiler import CompiledConstraint


@dataclass(eq=False)
class CacheEntry:
    constraint: Constraint
    claims: int = 0
    compiled: bool = False
    nbytes: int = 0
    result: Future[CompiledConstraint] = field(default_factory=Future)


class GrammarCache:
    """At most `max_bytes` of grammars, by the libraries' own figures; the one that was let go of longest ago is dropped first.

    A grammar that is claimed is never dropped, so that those in use may be more than `max_bytes` together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[Constraint, CacheEntry] = {}
        self._idle: OrderedDict[CacheEntry, None] = OrderedDict()  # compiled and claimed by nobody
        self.grammars = self.nbytes = self.hits = self.misses = self.dropped = 0

    def find(self, constraint: Constraint) -> CacheEntry | None:
        """A claimed entry, compiled or on its way; None where there is none."""
        entry = self._entries.get(constraint)
        if entry is not None:
            self.hits += 1
            entry.claims += 1
            self._idle.pop(entry, None)
        return entry

    def add(self, constraint: Constraint) -> CacheEntry:
        """A claimed entry that is to be compiled."""
        assert constraint not in self._entries
        self.misses += 1
        entry = self._entries[constraint] = CacheEntry(constraint, claims=1)
        return entry

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

    def release(self, entry: CacheEntry) -> bool:
        """One claim less; True where nobody waits any more for what is still to be compiled."""
        assert entry.claims > 0
        entry.claims -= 1
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
