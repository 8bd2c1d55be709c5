"""Keeps the ranks of a tensor-parallel engine in step.

Ranks that the first rank starts: it decides each step and publishes it; every STEPS_PER_COMPARISON steps the ranks compare their results.
Under torchrun: every rank makes the same calls of submit(), cancel() and step() in the same order, each rank in one thread; before every
step the ranks compare their requests and results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from stepgraph.graphs.row_layout import ResultRecord
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.parallel.ranks import STEPS_PER_COMPARISON, Ranks
from stepgraph.runtime.record import SUBMIT_FIELDS
from stepgraph.runtime.request import ActiveRequest, Job, StepEvent
from stepgraph.runtime.request_queue import QueuedRequest, RequestQueue
from stepgraph.runtime.scheduler import Scheduler


class StepDecision(NamedTuple):
    """The contents of the next step, which the first rank publishes."""

    submitted: list[tuple[int, Sequence[int], dict[str, Any], int]]  # id, prompt, options, and the turn of its tenant
    cancelled: list[int]
    admissible: list[tuple[int, bool]]  # jobs whose grammar is compiled, and whether that failed


class LockstepQueue(RequestQueue):
    """admissible: the ids of the waiting jobs that may have a row. published_turn: of the next request, as the first rank decided it."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self.ranks, self.admissible = ranks, set[int]()
        self.published_turn: int | None = None

    def enqueue(self, queued: QueuedRequest, require_open: Callable[[str], None]) -> None:
        job = queued.job
        if job.embeddings:
            raise ValueError("prompt_embeddings: got embeddings with tensor_parallel, expected None: ranks do not compare them")
        if self.ranks.rank0_decides:
            super().enqueue(queued, require_open)
            return
        if job.sampling.temperature and job.sampling.seed is None:
            raise ValueError("SamplingParams.seed: got None under torchrun, expected an integer, the same on every rank")
        if job.timeout_seconds is not None:
            raise ValueError(f"timeout_seconds: got {job.timeout_seconds:g} under torchrun, expected None: clocks of ranks differ")
        super().enqueue(queued, require_open)
        while not queued.ready:  # how long a compile takes differs between ranks, and a step must not depend on it
            self.wake.wait(0.01)
        options = _options(job) | {"sampling": job.sampling}  # without the seed of a greedy request, which is another on every rank
        self.ranks.note((job.prompt_ids, options, job.stop_ids, bool(queued.error)))
        self.admissible.add(job.id)

    @property
    def full(self) -> bool:
        return self.published_turn is None and super().full  # the first rank has accepted the request

    def _turn_of(self, job: Job) -> int:
        return super()._turn_of(job) if self.published_turn is None else self.published_turn

    def cancel(self, requested: Job | int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        found = super().cancel(requested, reason)
        if not self.ranks.rank0_decides:
            self.ranks.note(found)
        return found


class LockstepScheduler(Scheduler):
    """Publishes each step if this is the first rank and has started the others."""

    def __init__(self, ranks: Ranks, queue: LockstepQueue, *parts: Any) -> None:
        super().__init__(queue, *parts)
        self._ranks, self._decided, self._published, self._steps = ranks, queue.admissible, set[int](), 0

    @property
    def runnable(self) -> bool:
        """Also with requests to publish, so that all ranks compile their grammars at the same time."""
        with self._queue.lock:
            is_new = any(queued.job.id not in self._published for queued in self._queue.waiting)
        return (self._ranks.writer is not None and is_new) or super().runnable

    def begin_step(self) -> list[tuple[Job, ActiveRequest | None, FinishReason]]:
        cancelled = super().begin_step()
        if self._ranks.writer:
            self._publish([job.id for job, *_ in cancelled])
        self._steps += 1
        if not self._ranks.rank0_decides or self._steps % STEPS_PER_COMPARISON == 0:
            self._ranks.require_same_notes()
        return cancelled

    def record(self, request: ActiveRequest, result: ResultRecord) -> StepEvent:
        event = super().record(request, result)
        self._ranks.note((event.tokens, event.finish_reason))
        return event

    def finish(self, job: Job, request: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        self._decided.discard(job.id)
        self._published.discard(job.id)
        return super().finish(job, request, reason, error)

    def finish_all(self, reason: FinishReason, error: str) -> None:
        if reason == FinishReason.ERROR:
            self._ranks.abort()  # a sum that waits for a lost rank fails at once
        super().finish_all(reason, error)

    def _admissible(self) -> Iterator[QueuedRequest]:
        return (queued for queued in self._queue.waiting if queued.job.id in self._decided)

    def _publish(self, cancelled: list[int]) -> None:
        with self._queue.lock:
            waiting = list(self._queue.waiting)
        submitted = [queued for queued in waiting if queued.job.id not in self._published]
        known = [job_id for job_id in cancelled if job_id in self._published]
        decided, requested = self._decided, self._queue.cancelled  # by other threads; `cancel` comes before `ready`
        ready = [queued for queued in waiting if queued.ready and queued.job.id not in decided and queued.job.id not in requested]
        self._published.update(queued.job.id for queued in submitted)
        decided.update(queued.job.id for queued in ready)
        self._ranks.publish(
            StepDecision(
                [(queued.job.id, queued.job.prompt_ids, _options(queued.job), queued.order[1]) for queued in submitted],
                known,
                [(queued.job.id, bool(queued.error)) for queued in ready],
            )
        )


def _options(job: Job) -> dict[str, Any]:
    """The options of submit() for the same job on another rank."""
    options = {name: getattr(job, name) for name in ("constraint", *SUBMIT_FIELDS)}
    return options | {"sampling": replace(job.sampling, seed=job.seed), "draft_ids": job.draft_ids or None}
