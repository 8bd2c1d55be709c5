"""Preemption: a request gives its row up to one of smaller priority number, and continues later with the tokens it would have had."""

from __future__ import annotations

import torch

from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.scheduler import Scheduler


class PreemptingScheduler(Scheduler):
    """A scheduler whose requests may give their rows up, between two rounds."""

    def victim(self) -> ActiveRequest | None:
        """The request that gives its row up: the last in order, if the first waiting one has no room and a smaller priority number."""
        with self._queue.lock:
            waiting = (queued.job for queued in self._queue.waiting if not self._held_back(queued) and not queued.error)
            first = next(waiting, None)
            if first is None or self.rows.has_room(first):
                return None
            candidates = [request for request in self._active.values() if request.job.priority > first.priority and _is_exact(request)]
            return max(candidates, key=lambda request: self._queue.unfinished[request.job.id].place, default=None)

    def suspend(self, request: ActiveRequest, pinned: bool) -> None:
        """Free what a request holds, whose results are all recorded and whose row is inert, and queue it again, at its place."""
        job = request.job
        with self._queue.lock:
            del self._active[job.id]
            self.rows.release(request)
            self._grammars.release(request)
            request.matcher = None
            job.num_preemptions, job.num_suspended = job.num_preemptions + 1, len(job.tokens)
            for name in ("given_output", "given_ids"):
                job.__dict__.pop(name, None)
            ids = torch.tensor(job.given_output, dtype=torch.int64)  # of none as well
            job.resumed_host = ids.pin_memory() if pinned else ids
            queued = self._queue.unfinished[job.id]
            queued.matcher = self._grammars.prepare(job, queued.claim.result()) if queued.claim else None
            self._queue.waiting.insert(self._queue.index_of(queued.place), queued)


def _is_exact(request: ActiveRequest) -> bool:
    """Whether a request can continue with the tokens it would have had: sampled draws with drafts depend on where rounds begin."""
    sampling = request.job.sampling
    drafted = request.job.num_speculative_tokens and not sampling.greedy
    return request.decoding and not request.job.finished and not drafted and not sampling.relaxed_top_n
