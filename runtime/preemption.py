"""Preemption: a request gives up its row and pages to one with a smaller priority number, and continues later with the same tokens."""

from __future__ import annotations

import torch

from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.scheduler import Scheduler


class PreemptingScheduler(Scheduler):
    """The engine suspends the victims, once it has read the results of all rounds in flight."""

    def victim(self) -> ActiveRequest | None:
        """The request to suspend: the last in order of those with larger priority numbers than the first waiting one, if that has no room
        and would have it without them."""
        with self._queue.lock:
            first = next((queued.job for queued in self._admissible() if not queued.error), None)
            if first is None or self.rows.has_room(first):
                return None
            candidates = [request for request in self._active.values() if request.job.priority > first.priority and _is_exact(request)]
            if not self.rows.has_room(first, without=candidates):
                return None
            return max(candidates, key=lambda request: self._queue.unfinished[request.job.id].order)

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


def _is_exact(request: ActiveRequest) -> bool:
    """Whether a request can continue with the tokens it would have had: with a negative seed, draws depend on the drafts. In its prompt it
    has drawn none."""
    job = request.job
    return not request.decoding or not (job.sampling.relaxed_top_n or (job.num_speculative_tokens and job.seed < 0))
