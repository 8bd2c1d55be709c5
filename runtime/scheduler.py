"""Bookkeeping of unfinished jobs: queue, cancellation, active requests. The only part of the engine that other threads change."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from stepgraph.graphs.limits import Limits
from stepgraph.runtime.in_flight import RowResult
from stepgraph.runtime.request import (
    FINISH_REASONS,
    DraftCounts,
    FinishReason,
    Job,
    QueuedRequest,
    QueueFullError,
    StepEvent,
    origins_of,
)
from stepgraph.runtime.slots import ActiveRequest, PrefixSharing, RowTable
from stepgraph.runtime.stats import Counters
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.compile.compiler import Claim
from stepgraph.sampling.grammar.compile.limits import named
from stepgraph.sampling.lifetimes import FORKED, call_after_fork


class RequestObserver(Protocol):
    """Receives the events of all requests, in order, on the thread that causes them. Its methods must not raise."""

    def submitted(self, job: Job) -> None:
        """Before the job is queued, since another thread may step it at once."""

    def refused(self, job: Job) -> None:
        """The job was not queued after all."""

    def cancel_requested(self, job_id: int) -> None: ...

    def step_begins(self) -> None: ...

    def emitted(self, job: Job, tokens: Sequence[int]) -> None: ...

    def finished(self, job: Job) -> None: ...

    def closed(self, why: str) -> None:
        """Before the remaining jobs are ended."""


class Scheduler:
    """`enqueue`, `withdraw` and `request_cancel` may be called from any thread; everything else from the stepping thread."""

    def __init__(
        self,
        limits: Limits,
        sharing: PrefixSharing,
        ended: Callable[[Job], None] | None = None,
        only_looks_up: bool = False,
        observer: RequestObserver | None = None,
    ) -> None:
        """ended: called for each finished job. only_looks_up: every draft that is not forced comes from a look-up."""
        self.lock, self._ended, self._only_looks_up, self._observer = threading.Lock(), ended, only_looks_up, observer
        self._waiting: collections.deque[QueuedRequest] = collections.deque()
        self._claims: dict[int, Claim] = {}
        self._cancelled: dict[int, Job] = {}
        self._active: dict[int, ActiveRequest] = {}
        self.jobs: dict[int, Job] = {}  # unfinished, by id
        self.rows = RowTable(limits, sharing)
        self.counters = Counters(limits.num_speculative_tokens)
        call_after_fork(self._detach)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> Collection[ActiveRequest]:
        """The requests that hold rows, in order of admission."""
        return tuple(self._active.values())

    @property
    def runnable(self) -> bool:
        """Whether a request is active, could be admitted or is cancelled. False while all wait for their grammars."""
        with self.lock:
            return bool(self._active or self._cancelled or any(queued.ready for queued in self._waiting))

    def enqueue(self, queued: QueuedRequest, max_queued: int, require_open: Callable[[str], None]) -> None:
        """QueueFullError if `max_queued` requests are waiting; whatever `require_open` raises for a closed engine."""
        if self._observer:
            self._observer.submitted(queued.job)
        with self.lock:
            require_open("submit")
            if len(self._waiting) >= max_queued:
                raise QueueFullError(f"Engine.submit(): {max_queued} requests are waiting already (EngineConfig.max_queued)")
            most = max(self.counters.most_waiting, len(self._waiting) + 1)
            # An interrupt is raised on return from a call. From here on only the last statement calls one, so nothing or all is done.
            self.jobs[queued.job.id] = queued.job
            if queued.claim is not None:
                self._claims[queued.job.id] = queued.claim
            self.counters.submitted += 1
            self.counters.most_waiting = most
            self._waiting.append(queued)

    def withdraw(self, queued: QueuedRequest) -> None:
        """Undo an interrupted submit, whether or not the request entered the queue."""
        if queued.job.id in self.jobs:
            self.request_cancel(queued.job.id)
            return
        if self._observer:
            self._observer.refused(queued.job)
        if queued.claim is not None:
            queued.claim.release()

    def request_cancel(self, requested: Job | int) -> bool:
        """Cancel a job at the next step. False if it has finished or is unknown."""
        if self._observer:
            self._observer.cancel_requested(id_of(requested))
        with self.lock:
            job = self.jobs.get(id_of(requested))
            # A job of another engine may have the id of one of this engine.
            if job is None or job.finished or (isinstance(requested, Job) and requested is not job):
                return False
            self._cancelled[job.id] = job
            claim = self._claims.get(job.id)
        if claim and not claim.done:
            claim.release()  # at once: this ends a compile that no other request needs
        return True

    def pop_cancelled(self) -> list[tuple[Job, ActiveRequest | None]]:
        """The first call of every step: remove the cancelled jobs from the queue, and return them."""
        if self._observer:
            self._observer.step_begins()
        with self.lock:
            cancelled, self._cancelled = self._cancelled, {}
            if cancelled:
                self._waiting = collections.deque(queued for queued in self._waiting if queued.job.id not in cancelled)
        return [(job, self._active.get(job.id)) for job in cancelled.values() if not job.finished]

    def admit(self) -> list[QueuedRequest]:
        """Give rows to queued requests in order of arrival. The first one without a free row or pages holds back those after it; one whose
        grammar is still being compiled does not. Returns the requests whose grammar could not be compiled."""
        failed, not_ready = list[QueuedRequest](), list[QueuedRequest]()
        with self.lock:
            while self._waiting:
                first = self._waiting[0]
                if not first.ready or first.job.id in self._cancelled:
                    not_ready.append(first)
                elif first.error:
                    failed.append(first)
                elif request := self.rows.allocate(first.job, first.matcher):
                    self._active[request.job.id] = request
                    request.job.queue_seconds = time.perf_counter() - request.job.submitted_at
                    self.counters.queue_seconds.add(request.job.queue_seconds)
                else:
                    break
                self._waiting.popleft()
            self._waiting.extendleft(reversed(not_ready))
        return failed

    def start_prefill(self, request: ActiveRequest) -> None:
        with self.lock:
            self.rows.start_prefill(request)

    def prefilled(self, request: ActiveRequest, tokens: int) -> None:
        """Record that the next `tokens` prompt tokens of a request are launched."""
        with self.lock:
            self.rows.publish_prompt(request)
            self.counters.prompt_tokens += tokens

    def record(self, result: RowResult) -> StepEvent:
        """Add a round's result to its job, and finish the job if the round ended it."""
        request, tokens, accepted, code = result.request, result.tokens, result.accepted, result.code
        forced, held = result.forced, ~(-1 << accepted)
        looked_up = (~(-1 << result.offered) if self._only_looks_up else result.looked_up) & ~forced
        drafts = DraftCounts(
            accepted, forced.bit_count(), (forced & held).bit_count(), looked_up.bit_count(), (looked_up & held).bit_count()
        )
        job, counters = request.job, self.counters
        if tokens and self._observer:
            self._observer.emitted(job, tokens)
        with self.lock:
            if tokens and not job.tokens:
                job.first_token_seconds = time.perf_counter() - job.submitted_at
                counters.first_token_seconds.add(job.first_token_seconds)
            counters.tokens += len(tokens)
            counters.drafts = counters.drafts.plus(drafts)
            if result.offered or (job.rounds and job.num_speculative_tokens):
                counters.add_drafting_round(len(tokens), result.offered, accepted, result.lost)
        origins = origins_of(len(tokens), accepted, forced, looked_up)
        job.tokens.extend(tokens)
        job.origins.extend(origins)
        job.logprobs.extend(result.logprobs)
        job.num_accepted_drafts += accepted
        job.rounds += 1
        if code != FinishCode.RUNNING:
            self.finish(job, request, FINISH_REASONS[code], _error(code, request))
        return StepEvent(job.id, tuple(tokens), drafts, job.finish_reason, job.error, tuple(result.logprobs), origins)

    def finish(self, job: Job, request: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        """End a job and free what it holds. Returns an event without tokens."""
        with self.lock:
            job.error, job.finish_reason = error, reason
            del self.jobs[job.id]
            self.counters.finished[reason] += 1
            claim = self._claims.pop(job.id, None)
            if request is not None:
                del self._active[job.id]
                self.rows.release(request)
                request.matcher = None  # rounds in flight hold their own references
        if claim:
            claim.release()
        if self._ended:
            self._ended(job)
        if self._observer:
            self._observer.finished(job)
        return StepEvent(job.id, finish_reason=reason, error=error)

    def finish_all(self, reason: FinishReason, error: str) -> None:
        """End every job. A submit before this is among them; a later one is refused."""
        if self._observer:
            self._observer.closed(error)
        with self.lock:
            jobs = tuple(self.jobs.values())
            self._waiting.clear()
        for job in jobs:
            self.finish(job, self._active.get(job.id), reason, error=error)

    def _detach(self) -> None:
        """In a fork: all jobs end with an error."""
        self.lock = threading.Lock()
        for job in self.jobs.values():
            job.error, job.finish_reason = FORKED, FinishReason.ERROR
        self.jobs = {}


def id_of(job: Job | int) -> int:
    return job.id if isinstance(job, Job) else job


def _error(code: FinishCode, request: ActiveRequest) -> str:
    """The error message of a job that a round ended."""
    if code == FinishCode.MASK_FAULT:
        fault = named(request.matcher.fault) if request.matcher else ""
        return f"no valid grammar mask: {fault or 'its tag names another request, history or position'}"
    return "the target's best legal logit is not finite" if code == FinishCode.LOGITS_FAULT else ""
