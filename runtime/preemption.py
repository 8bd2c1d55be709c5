"""Preemption: a request gives up its row and pages to one with a smaller priority number, or its pages to one that is earlier in order, and
continues later with the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stepgraph.runtime.in_flight import InFlight
from stepgraph.runtime.request import ActiveRequest, Job, StepEvent
from stepgraph.runtime.row_table import continues_exactly
from stepgraph.runtime.scheduler import Scheduler
from stepgraph.runtime.upload import Uploader


class PreemptingScheduler(Scheduler):
    """Suspends requests whose row or pages another one needs, and gives requests that grow their pages."""

    def __init__(self, by_priority: bool, loops: bool, *parts: Any) -> None:
        """by_priority: also for waiting requests. loops: launches may run many rounds."""
        super().__init__(*parts)
        self._by_priority, self._loops = by_priority, loops

    def make_room(self, in_flight: InFlight, uploader: Uploader, collect: Callable[[int], list[StepEvent]]) -> list[StepEvent]:
        """Requeue requests that hold a row or pages for which an earlier one waits, once `collect` has read all rounds in flight; and give
        requests that grow the pages for their next rounds."""
        events, victim = list[StepEvent](), self._victim()
        if not (victim or self.rows.num_missing(self._active.values())):
            return events
        if victim or self._loops:  # how long a loop may run follows from the pages at its launch
            in_flight.interrupt()
            events = collect(1)
        while victim := self._victim():
            uploader.retire(victim.row)
            self.suspend(victim)
        with self._queue.lock:
            first, active = self._first_waiting(), self._active.values()
            entries = self.rows.grow(active, ahead=first is None or not self.rows.has_room(first, active))
        uploader.add_pages(entries)
        return events

    def _victim(self) -> ActiveRequest | None:
        """The request to suspend. If too few pages are free for those that grow: the last in order, so that the first one always proceeds.
        Else the last in order of those with larger priority numbers than the first waiting one, if that has no room and would have it
        without them."""
        with self._queue.lock:
            active = self._active.values()
            if self.rows.num_missing(active) > self.rows.page_cache.num_free:
                candidates = self._candidates(-math.inf)
            else:
                first = self._first_waiting() if self._by_priority else None
                if first is None or self.rows.has_room(first, active):
                    return None
                candidates = self._candidates(first.priority)
                if not self.rows.has_room(first, active, without=candidates):
                    return None
            return max(candidates, key=lambda request: self._queue.unfinished[request.job.id].order)

    def _first_waiting(self) -> Job | None:
        return next((queued.job for queued in self._admissible() if not queued.error), None)

    def _candidates(self, above: float) -> list[ActiveRequest]:
        """Requests with a priority number above this one that can continue exactly. In its prompt a request has drawn no token."""
        found = (request for request in self._active.values() if request.job.priority > above)
        return [request for request in found if not request.decoding or continues_exactly(request.job)]

    def suspend(self, request: ActiveRequest) -> None:
        """Free what a request holds and queue it again, in its order. Its results must be recorded, and its row inert."""
        job = request.job
        with self._queue.lock:
            self._free(request)
            job.num_preemptions += 1
            job.num_tokens_at_preemption = len(job.tokens)
            job.__dict__.pop("context_ids", None)  # the cached value
            self.counters.preemptions += 1
            queued = self._queue.unfinished[job.id]
            if queued.claim:
                self._queue.prepare(queued, queued.claim)
            self._queue.enqueue_again(queued)
