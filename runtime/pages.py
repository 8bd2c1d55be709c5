"""The page pool: which cache pages are free. Knows numbers only; page 0 is the scratch page and never given out."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Hands out pages whole and takes them back whole."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages, 0, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` pages, or None where there are not enough: nothing is taken then."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._used.update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        assert self._used.issuperset(pages) and len(set(pages)) == len(pages), f"pages {pages} are not all in use"
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))
