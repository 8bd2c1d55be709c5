"""Keeps the ranks of a tensor-parallel engine in step: before every step they compare their requests and the results so far.

Every rank makes the same calls of submit(), cancel() and step() in the same order, each rank in one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepgraph.graphs.row_layout import ResultRecord
from stepgraph.runtime.parallel.ranks import Ranks
from stepgraph.runtime.request import ActiveRequest, FinishReason, Job, StepEvent
from stepgraph.runtime.request_queue import QueuedRequest, RequestQueue
from stepgraph.runtime.scheduler import Scheduler


class LockstepQueue(RequestQueue):
    """Waits for each grammar: how long a compile takes differs between ranks, and a step must not depend on it."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self._ranks = ranks

    def enqueue(self, queued: QueuedRequest, require_open: Callable[[str], None]) -> None:
        job = queued.job
        if job.sampling.temperature and job.sampling.seed is None:
            raise ValueError("SamplingParams.seed: got None with tensor_parallel, expected an integer, the same on every rank")
        if job.embeddings:
            raise ValueError("prompt_embeddings: got embeddings with tensor_parallel, expected None: ranks do not compare them")
        super().enqueue(queued, require_open)
        while not queued.ready:
            self.wake.wait(0.01)
        request = (job.prompt_ids, job.constraint, job.sampling, job.max_new_tokens, job.num_speculative_tokens, job.stop_ids)
        self._ranks.note((*request, job.draft_ids, job.cache_salt, bool(queued.error)))

    def cancel(self, requested: Job | int) -> bool:
        found = super().cancel(requested)
        self._ranks.note(found)
        return found


class LockstepScheduler(Scheduler):
    """Compares what the ranks noted, and notes every result."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self._ranks = ranks

    def pop_cancelled(self) -> list[tuple[Job, ActiveRequest | None]]:
        self._ranks.require_same_notes()
        return super().pop_cancelled()

    def record(self, request: ActiveRequest, result: ResultRecord) -> StepEvent:
        event = super().record(request, result)
        self._ranks.note((event.tokens, event.finish_reason))
        return event

    def finish(self, job: Job, request: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        self._ranks.note(reason)
        return super().finish(job, request, reason, error)
