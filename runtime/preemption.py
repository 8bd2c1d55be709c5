"""Preemption: a request gives up its row and pages to one with a smaller priority number, or its pages to one that is earlier in order, and
continues later with the same tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from stepgraph.runtime.request import ActiveRequest, Job
from stepgraph.runtime.scheduler import Scheduler


class PreemptingScheduler(Scheduler):
    """The engine suspends the victims, once it has read the results of all rounds in flight."""

    def __init__(self, by_priority: bool, grows: bool, *parts: Any) -> None:
        """Whether requests are suspended for waiting ones with smaller priority numbers, and for earlier ones that grow."""
        super().__init__(*parts)
        self._by_priority, self.grows = by_priority, grows

    @property
    def needs_pages(self) -> bool:
        """Whether a request needs further pages for the next round."""
        return bool(self._short())

    def victim(self) -> ActiveRequest | None:
        """The request to suspend. If too few pages are free for those that grow: the last in order, so that the first one always proceeds.
        Else the last in order of those with larger priority numbers than the first waiting one, if that has no room and would have it
        without them."""
        with self._queue.lock:
            short = self._short()
            if not self.rows.can_grow(short):
                candidates = self._candidates(-math.inf)
            else:
                first = self._first_waiting() if self._by_priority else None
                if first is None or self.rows.has_room(first, short):
                    return None
                candidates = self._candidates(first.priority)
                if not self.rows.has_room(first, short, without=candidates):
                    return None
            return max(candidates, key=lambda request: self._queue.unfinished[request.job.id].order)

    def _short(self) -> list[ActiveRequest]:
        return self.rows.short(self._active.values()) if self.grows else []

    def _first_waiting(self) -> Job | None:
        return next((queued.job for queued in self._admissible() if not queued.error), None)

    def _candidates(self, above: float) -> list[ActiveRequest]:
        """Requests with a priority number above this one that can continue exactly. In its prompt a request has drawn no token."""
        found = (request for request in self._active.values() if request.job.priority > above)
        return [request for request in found if not request.decoding or request.job.continues_exactly]

    def grow(self) -> list[tuple[int, int, int]]:
        """RowTable.grow of the requests with rows: not ahead if the first waiting one has room."""
        with self._queue.lock:
            first = self._first_waiting()
            return self.rows.grow(self._active.values(), ahead=first is None or not self.rows.has_room(first, self._short()))

    def suspend(self, request: ActiveRequest, pinned: bool) -> None:
        """Free what a request holds and queue it again, in its order. Its results must be recorded, and its row inert."""
        job = request.job
        with self._queue.lock:
            self._free(request)
            job.count_preemption()
            self.counters.preemptions += 1
            ids = torch.tensor(job.prior_output, dtype=torch.int64)  # also if empty
            job.prior_output_host = ids.pin_memory() if pinned else ids
            queued = self._queue.unfinished[job.id]
            if queued.claim:
                self._queue.prepare(queued, queued.claim)
            self._queue.enqueue_again(queued)
