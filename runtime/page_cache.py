"""Prefixes: which full pages hold which tokens, so that a request that begins as another did need not compute them again.

A page is known by its tokens and the page in front of it, compared as they are and not by a hash: no two texts ever meet in
one. Knows numbers only. Who holds a page holds all pages in front of it, and a page that somebody holds is never given out.
A draft may keep at a position what depends on the tokens behind it: a page is then known by `lookahead` more of them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.runtime.pages import PagePool

Key = tuple[int | str, tuple[int, ...]]  # the serial of the page in front, or the salt of the text; the page's own tokens


@dataclass(eq=False)
class CachedPage:
    """A full page whose entries are on their way, and will not change as long as it is known."""

    page: int
    serial: int  # never used twice
    key: Key
    holders: int = 0


class PrefixCache:
    """The pages of a pool by what they hold. Those that nobody holds are kept until pages are wanted, least recently used first."""

    def __init__(self, pool: PagePool, page_size: int, lookahead: int = 0, most_idle: int | None = None) -> None:
        self._pool, self._page_size, self._lookahead, self._most_idle = pool, page_size, lookahead, most_idle
        self._known: dict[Key, CachedPage] = {}
        # In the order in which they were let go; of one text the last page first, so that none goes before those behind it.
        self._idle: collections.OrderedDict[CachedPage, None] = collections.OrderedDict()
        self._serials = itertools.count()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def free(self) -> int:
        """Pages that can be had: nobody's, whether they are known or not."""
        return self._pool.free + len(self._idle)

    def find(self, salt: str, ids: Sequence[int], most: int) -> list[CachedPage]:
        """The known pages that `ids` begin with, as far as position `most`."""
        found: list[CachedPage] = []
        while (len(found) + 1) * self._page_size <= most:
            page = self._known.get(self._key(salt, found, ids))
            if page is None:
                break
            found.append(page)
        return found

    def hold(self, pages: Sequence[CachedPage]) -> None:
        for page in pages:
            page.holders += 1
            self._idle.pop(page, None)

    def let_go(self, pages: Sequence[CachedPage]) -> None:
        """`pages` from the front of a text on, as they were found or added."""
        for page in reversed(pages):
            page.holders -= 1
            assert page.holders >= 0, f"page {page.page} is let go by more than hold it"
            if page.holders == 0 and self._known.get(page.key) is page:
                self._idle[page] = None
            elif page.holders == 0:
                self._pool.give_back([page.page])
        if self._most_idle is not None:
            self._evict(len(self._idle) - self._most_idle)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` pages for somebody's own, or None where there are not enough: nothing is evicted then."""
        if count > self.free:
            return None
        self._evict(count - self._pool.free)
        return self._pool.take(count)

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages that were taken and never added."""
        self._pool.give_back(pages)

    def add(self, salt: str, held: list[CachedPage], ids: Sequence[int], page: int) -> None:
        """Make the taken page behind `held` known, and hold it; where its text is known in another page already, hold that one as well."""
        key = self._key(salt, held, ids)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = CachedPage(page, next(self._serials), key)
        self.hold([known])
        held.append(known)

    def forget(self, pages: Sequence[CachedPage]) -> None:
        """Nobody finds these any more; who holds them goes on."""
        for page in pages:
            assert page.holders > 0, f"page {page.page} is forgotten by who does not hold it"
            if self._known.get(page.key) is page:
                del self._known[page.key]

    def _key(self, salt: str, before: Sequence[CachedPage], ids: Sequence[int]) -> Key:
        start = len(before) * self._page_size
        tokens = tuple(ids[start : start + self._page_size + self._lookahead])
        assert len(tokens) == self._page_size + self._lookahead, f"{len(ids)} tokens do not tell page {len(before)}"
        return before[-1].serial if before else salt, tokens

    def _evict(self, count: int) -> None:
        for _ in range(count):
            page, _ = self._idle.popitem(last=False)
            del self._known[page.key]
            self._pool.give_back([page.page])
            self.evicted += 1
