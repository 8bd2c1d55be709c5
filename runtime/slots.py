"""Rows: who sits where.

A request keeps one row, its pages and its matcher from admission to finish.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.page_cache import CachedPage, PrefixCache
from stepgraph.runtime.pages import PagePool
from stepgraph.runtime.request import FinishReason, Job
from stepgraph.sampling.grammar.link.protocol import MatcherRow


@dataclass(eq=False)
class ActiveRequest:
    """A job in its row."""

    job: Job
    row: int
    pages: list[int]  # its block table
    matcher: MatcherRow | None
    cached: list[CachedPage]  # of its first pages: what it found, then what others may find
    begun: bool = False  # its first chunk is on its way
    reused: int = 0  # prompt tokens whose cache entries somebody else computed
    prefilled: int = 0  # prompt tokens whose cache entries are on their way
    joined: bool = False  # takes part in rounds

    @property
    def to_prefill(self) -> int:
        """All but the last prompt token, which the first round takes."""
        return len(self.job.prompt_ids) - 1 - self.prefilled


@dataclass(frozen=True)
class Sharing:
    """How far requests share pages."""

    off: str = ""  # why they do not
    most_idle: int | None = None  # pages kept for nobody in particular; None: all that are free
    # What a draft keeps at a position follows from its token and the features of the position before: behind a found prefix
    # those are computed again. Or it follows from `lookahead` tokens behind it.
    again: int = 0
    lookahead: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """For the capture report."""
        return (f"prefixes: not shared, {self.off}",) if self.off else ()


class RowTable:
    """Free rows and pages, and the seats taken. The lowest free row is given first.

    Why pages may be shared, and given out again, at once: everything on the device is launched in one order, and
    - a page becomes known only after the launch of what fills it, so whoever finds it reads behind that;
    - of a text whose first n tokens are known here, launches from now on write entries at n - 1 or behind it (a draft with
      `lookahead` from n - lookahead on), or find the row inert, which writes to the scratch page. Pages are known up to there:
      those of a prompt while it is prefilled, those of an output when it ends. So no known page is ever written;
    - a page that was given back or evicted is written by launches behind all those that still read or write it.
    """

    def __init__(self, limits: Limits, sharing: Sharing) -> None:
        self._limits, self._sharing = limits, sharing
        pool = PagePool(limits.num_pages)
        self._prefixes = PrefixCache(pool, limits.page_size, self._sharing.lookahead, self._sharing.most_idle)
        self._free_rows = list(range(limits.max_rows))
        self._seats: dict[int, ActiveRequest] = {}
        self.reused_tokens = self.most_used_pages = 0

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(tuple(self._seats.values()))

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def pages(self) -> int:
        return self._limits.num_pages

    @property
    def free_pages(self) -> int:
        """Nobody's, those that are kept for their prefix included."""
        return self._prefixes.free

    @property
    def cached_pages(self) -> int:
        return len(self._prefixes)

    @property
    def evicted_pages(self) -> int:
        return self._prefixes.evicted

    def take(self, job: Job, matcher: MatcherRow | None) -> ActiveRequest | None:
        """A seat with pages for the job's longest end, or None where a row or pages are missing."""
        page_size, length = self._limits.page_size, len(job.prompt_ids) + job.max_new_tokens
        count = -(-length // page_size)
        if not self._free_rows or count - len(job.prompt_ids) // page_size > self.free_pages:
            return None
        cached = self._find(job)
        self._prefixes.hold(cached)
        own = self._prefixes.take(count - len(cached))
        if own is None:
            self._prefixes.let_go(cached)
            return None
        seat = ActiveRequest(job, heapq.heappop(self._free_rows), [*(page.page for page in cached), *own], matcher, cached)
        self._seats[seat.row] = seat
        self.most_used_pages = max(self.most_used_pages, self._limits.num_pages - self.free_pages)
        return seat

    def begin(self, seat: ActiveRequest) -> None:
        """Right before its first chunk: look once more, for neighbours may have begun alike since it was seated."""
        found, held = self._find(seat.job), len(seat.cached)
        if found[:held] == seat.cached:
            self._prefixes.hold(found[held:])
            self._prefixes.give_back(seat.pages[held : len(found)])
            seat.cached = found
            seat.pages[: len(found)] = [page.page for page in found]
        seat.begun = True
        seat.reused = len(seat.cached) * self._limits.page_size
        seat.prefilled = max(0, seat.reused - self._sharing.again)
        seat.job.num_cached_tokens = seat.reused
        self.reused_tokens += seat.reused

    def share(self, seat: ActiveRequest) -> None:
        """Let others find the full pages of what was launched of a prompt."""
        self._share(seat, seat.job.prompt_ids, seat.prefilled)

    def release(self, seat: ActiveRequest) -> None:
        """Free the seat at once. What it said may be found as well, unless it failed: then nothing of it is."""
        assert self._seats.pop(seat.row) is seat
        heapq.heappush(self._free_rows, seat.row)
        if seat.job.finish_reason == FinishReason.ERROR:
            self._prefixes.forget(seat.cached)
        elif seat.joined:
            history = (*seat.job.prompt_ids, *seat.job.tokens)
            self._share(seat, history, len(history) - 1)
        cached = [page.page for page in seat.cached]
        self._prefixes.give_back([page for place, page in enumerate(seat.pages) if cached[place : place + 1] != [page]])
        self._prefixes.let_go(seat.cached)

    def _find(self, job: Job) -> list[CachedPage]:
        """Full pages in front of the last prompt token, which the first round takes."""
        sharing, tokens = self._sharing, len(job.prompt_ids)
        most = tokens - max(1 + sharing.again, sharing.lookahead)
        return self._prefixes.find(job.cache_salt, job.prompt_ids, min(most, job.shareable)) if not sharing.off else []

    def _share(self, seat: ActiveRequest, ids: Sequence[int], written: int) -> None:
        """Make known the pages of a text of which the entries of the first `written` tokens are on their way, and token `written` known."""
        most = min(written + 1 - max(1, self._sharing.lookahead), seat.job.shareable)
        while not self._sharing.off and (len(seat.cached) + 1) * self._limits.page_size <= most:
            self._prefixes.add(seat.job.cache_salt, seat.cached, ids, seat.pages[len(seat.cached)])
