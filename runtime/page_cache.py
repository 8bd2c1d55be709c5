"""The page pool and the prefix cache: which pages are free, and which full pages hold which tokens.

A published page is identified by its tokens and its preceding page, compared exactly and not by a hash, so two texts never collide.
A request that holds a page holds all pages before it, and a held page is never handed out. A draft model may keep entries that depend on
later tokens: then a page is identified by `lookahead` more tokens. Page 0 is the scratch page and never handed out. Host data only.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Salt = tuple[str, int]  # of a text: cache salt, and serial of the adapter
PageKey = tuple[int | Salt, tuple[int, ...]]  # the serial of the preceding page, or the salt of the text; the page's own tokens


@dataclass(eq=False)
class CachedPage:
    """A full page whose entries are launched, and do not change while it is published."""

    page: int
    serial: int  # never used twice
    key: PageKey
    ref_count: int = 0  # requests that hold it


class PageCache:
    """Hands out pages, and finds published ones by their tokens. Published pages without holders are evicted least recently used first."""

    def __init__(self, num_pages: int, page_size: int, lookahead: int = 0, max_idle_pages: int | None = None) -> None:
        """max_idle_pages: published pages kept without holders; None: no limit."""
        self._page_size, self._lookahead, self._max_idle_pages = page_size, lookahead, max_idle_pages
        self._free = list(range(num_pages, 0, -1))
        self._used: set[int] = set()
        self._published: dict[PageKey, CachedPage] = {}
        # In the order of their release, the last page of a text first, so that no page is evicted before those that follow it.
        self._idle: collections.OrderedDict[CachedPage, None] = collections.OrderedDict()
        self._serials = itertools.count()
        self.evicted = 0

    def __len__(self) -> int:
        """The number of published pages."""
        return len(self._published)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, including published ones without holders."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` private pages, at most `num_free`."""
        assert count <= self.num_free, f"{count} pages, {self.num_free} are free"
        self._evict(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Return allocated pages that are not published."""
        assert self._used.issuperset(pages) and len(set(pages)) == len(pages), f"pages {pages} are not all in use"
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))

    def find(self, salt: Salt, ids: Sequence[int], limit: int) -> list[CachedPage]:
        """The published pages at the start of `ids`, up to position `limit`."""
        found: list[CachedPage] = []
        while (len(found) + 1) * self._page_size <= limit:
            page = self._published.get(self._key(salt, found, ids))
            if page is None:
                break
            found.append(page)
        return found

    def acquire(self, pages: Sequence[CachedPage]) -> None:
        for page in pages:
            page.ref_count += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[CachedPage]) -> None:
        """pages: of a text, in order from its first page, as found or published."""
        for page in reversed(pages):
            page.ref_count -= 1
            assert page.ref_count >= 0, f"page {page.page} is released more often than acquired"
            if page.ref_count == 0 and self._published.get(page.key) is page:
                self._idle[page] = None
            elif page.ref_count == 0:
                self.free([page.page])
        if self._max_idle_pages is not None:
            self._evict(len(self._idle) - self._max_idle_pages)

    def publish(self, salt: Salt, held: list[CachedPage], ids: Sequence[int], page: int) -> None:
        """Publish the allocated page that follows `held`, acquire it and append it to `held`. If another page with this text is already
        published, that page is acquired and appended instead."""
        key = self._key(salt, held, ids)
        cached = self._published.get(key)
        if cached is None:
            cached = self._published[key] = CachedPage(page, next(self._serials), key)
        self.acquire([cached])
        held.append(cached)

    def unpublish(self, pages: Sequence[CachedPage]) -> None:
        """Hide these held pages from further requests. Their holders keep them."""
        for page in pages:
            assert page.ref_count > 0, f"page {page.page} is unpublished without being held"
            if self._published.get(page.key) is page:
                del self._published[page.key]

    def reset(self) -> None:
        """Unpublish all pages. Their holders keep them."""
        self._evict(len(self._idle))
        self._published.clear()

    def _key(self, salt: Salt, preceding: Sequence[CachedPage], ids: Sequence[int]) -> PageKey:
        start = len(preceding) * self._page_size
        tokens = tuple(ids[start : start + self._page_size + self._lookahead])
        assert len(tokens) == self._page_size + self._lookahead, f"{len(ids)} tokens do not determine page {len(preceding)}"
        return preceding[-1].serial if preceding else salt, tokens

    def _evict(self, count: int) -> None:
        for _ in range(count):
            page, _ = self._idle.popitem(last=False)
            del self._published[page.key]
            self.free([page.page])
            self.evicted += 1
