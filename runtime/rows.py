"""Rows: who sits where.

A request keeps one row, its pages and its matcher from admission to finish.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.pages import PagePool
from stepgraph.runtime.request import Job
from stepgraph.sampling.grammar.host_link import MatcherRow


@dataclass(eq=False)
class Seat:
    """A job in its row."""

    job: Job
    row: int
    pages: tuple[int, ...]
    matcher: MatcherRow | None
    prefilled: int = 0  # prompt tokens whose cache entries are on their way
    joined: bool = False  # takes part in rounds

    @property
    def to_prefill(self) -> int:
        """All but the last prompt token, which the first round takes."""
        return len(self.job.prompt_ids) - 1 - self.prefilled


class RowTable:
    """Free rows and pages, and the seats taken. The lowest free row is given first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pages = PagePool(limits.num_pages)
        self._free_rows = list(range(limits.max_rows))
        self._seats: dict[int, Seat] = {}

    def __iter__(self) -> Iterator[Seat]:
        return iter(tuple(self._seats.values()))

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def free_pages(self) -> int:
        return self._pages.free

    def take(self, job: Job, matcher: MatcherRow | None) -> Seat | None:
        """A seat with pages for the job's longest end, or None where a row or pages are missing."""
        length = len(job.prompt_ids) + job.max_new_tokens
        pages = self._pages.take(-(-length // self._limits.page_size)) if self._free_rows else None
        if pages is None:
            return None
        seat = Seat(job, heapq.heappop(self._free_rows), pages, matcher)
        self._seats[seat.row] = seat
        return seat

    def release(self, seat: Seat) -> None:
        """Free the seat at once: whatever writes to its row or pages next is launched after the rounds that still hold them."""
        assert self._seats.pop(seat.row) is seat
        heapq.heappush(self._free_rows, seat.row)
        self._pages.give_back(seat.pages)
