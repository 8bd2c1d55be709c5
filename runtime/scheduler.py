"""The desk: every job that has not ended, who waits, who sits where. The one place that other threads reach into."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.forks import LEFT, leave_in_forks
from stepgraph.runtime.grammar_queue import QueuedRequest
from stepgraph.runtime.request import FINISH_REASONS, DraftCounts, FinishReason, Job, QueueFullError, StepEvent, TokenLogprob, origins_of
from stepgraph.runtime.slots import ActiveRequest, RowTable, Sharing
from stepgraph.runtime.stats import Counters, Loss
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.compile.compiler import Claim
from stepgraph.sampling.grammar.compile.limits import named


def id_of(job: Job | int) -> int:
    return job.id if isinstance(job, Job) else job


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
    """Books for the engine. `submit` and `cancel` come from any thread; everything else from the stepping one."""

    def __init__(
        self,
        limits: Limits,
        sharing: Sharing,
        ended: Callable[[Job], None] | None = None,
        only_looks_up: bool = False,
        observer: RequestObserver | None = None,
    ) -> None:
        """only_looks_up: every draft that no grammar forces was found in a text."""
        self.lock, self._ended, self._only_looks_up, self._observer = threading.Lock(), ended, only_looks_up, observer
        self._waiting: collections.deque[QueuedRequest] = collections.deque()
        self._claims: dict[int, Claim] = {}
        self._cancelled: dict[int, Job] = {}
        self._seats: dict[int, ActiveRequest] = {}
        self.jobs: dict[int, Job] = {}
        self.rows = RowTable(limits, sharing)
        self.counters = Counters(limits.num_speculative_tokens)
        leave_in_forks(self._leave)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stirs(self) -> bool:
        """Whether somebody sits, could sit or wants to leave; not so while all wait for their grammars."""
        with self.lock:
            return bool(self._seats or self._cancelled or any(waiting.ready for waiting in self._waiting))

    def enqueue(self, waiting: QueuedRequest, max_queued: int, still_open: Callable[[str], None]) -> None:
        if self._observer:
            self._observer.submitted(waiting.job)
        with self.lock:
            still_open("submit")
            if len(self._waiting) >= max_queued:
                raise QueueFullError(f"Engine.submit(): {max_queued} requests are waiting already (EngineConfig.max_queued)")
            most = max(self.counters.most_waiting, len(self._waiting) + 1)
            # An interrupt comes out of a call. From here on there is but the last one, so that it finds nothing done, or all.
            self.jobs[waiting.job.id] = waiting.job
            if waiting.claim is not None:
                self._claims[waiting.job.id] = waiting.claim
            self.counters.submitted += 1
            self.counters.most_waiting = most
            self._waiting.append(waiting)

    def give_up(self, waiting: QueuedRequest) -> None:
        """Nobody will know of this job, whether it came into the queue or not."""
        if waiting.job.id in self.jobs:
            self.ask_cancel(waiting.job.id)
            return
        if self._observer:
            self._observer.refused(waiting.job)
        if waiting.claim is not None:
            waiting.claim.release()

    def ask_cancel(self, asked: Job | int) -> bool:
        if self._observer:
            self._observer.cancel_requested(id_of(asked))
        with self.lock:
            job = self.jobs.get(id_of(asked))
            if job is None or job.finished or (isinstance(asked, Job) and asked is not job):  # another engine's has an id of this one's
                return False
            self._cancelled[job.id] = job
            claim = self._claims.get(job.id)
        if claim and not claim.done:
            claim.release()  # at once: a compile that nobody else waits for ends here
        return True

    def take_cancelled(self) -> list[tuple[Job, ActiveRequest | None]]:
        """The first call of every step."""
        if self._observer:
            self._observer.step_begins()
        with self.lock:
            cancelled, self._cancelled = self._cancelled, {}
            if cancelled:
                self._waiting = collections.deque(waiting for waiting in self._waiting if waiting.job.id not in cancelled)
        return [(job, self._seats.get(job.id)) for job in cancelled.values() if not job.finished]

    def seat_waiting(self) -> list[QueuedRequest]:
        """Seat in order of arrival. The first one that finds no row or pages keeps the others waiting; one whose grammar is still being
        compiled does not. Returns those whose grammar is not to be had."""
        failed, not_yet = list[QueuedRequest](), list[QueuedRequest]()
        with self.lock:
            while self._waiting:
                first = self._waiting[0]
                if not first.ready or first.job.id in self._cancelled:
                    not_yet.append(first)
                elif first.error:
                    failed.append(first)
                elif seat := self.rows.take(first.job, first.matcher):
                    self._seats[seat.job.id] = seat
                    seat.job.queue_seconds = time.perf_counter() - seat.job.submitted_at
                    self.counters.queue_seconds.add(seat.job.queue_seconds)
                else:
                    break
                self._waiting.popleft()
            self._waiting.extendleft(reversed(not_yet))
        return failed

    def begin(self, seat: ActiveRequest) -> None:
        with self.lock:
            self.rows.begin(seat)

    def prefilled(self, seat: ActiveRequest, tokens: int) -> None:
        """So many more prompt tokens of a seat are on their way."""
        with self.lock:
            self.rows.share(seat)
            self.counters.prompt_tokens += tokens

    def record(
        self,
        seat: ActiveRequest,
        tokens: Sequence[int],
        accepted: int,
        code: FinishCode,
        logprobs: Sequence[TokenLogprob],
        forced: int = 0,
        looked_up: int = 0,
        offered: int = 0,
        lost: Loss | None = None,
    ) -> StepEvent:
        """Book what a round emitted for a seat. `forced`, `looked_up`: a bit per draft: whether a grammar forced or a look-up found it."""
        looked_up, held = (~(-1 << offered) if self._only_looks_up else looked_up) & ~forced, ~(-1 << accepted)
        drafts = DraftCounts(
            accepted, forced.bit_count(), (forced & held).bit_count(), looked_up.bit_count(), (looked_up & held).bit_count()
        )
        job, counters = seat.job, self.counters
        if tokens and self._observer:
            self._observer.emitted(job, tokens)
        with self.lock:
            if tokens and not job.tokens:
                job.first_token_seconds = time.perf_counter() - job.submitted_at
                counters.first_token_seconds.add(job.first_token_seconds)
            counters.tokens += len(tokens)
            counters.drafts = counters.drafts.plus(drafts)
            if offered or (job.rounds and job.num_speculative_tokens):
                counters.add_drafting_round(len(tokens), offered, accepted, lost)
        origins = origins_of(len(tokens), accepted, forced, looked_up)
        job.tokens.extend(tokens)
        job.origins.extend(origins)
        job.logprobs.extend(logprobs)
        job.num_accepted_drafts += accepted
        job.rounds += 1
        event = StepEvent(job.id, tuple(tokens), drafts, logprobs=tuple(logprobs), origins=origins)
        if code == FinishCode.RUNNING:
            return event
        error = ""
        if code == FinishCode.MASK_FAULT:
            fault = named(seat.matcher.fault) if seat.matcher else ""
            error = f"no valid grammar mask: {fault or 'its tag names another request, history or position'}"
        elif code == FinishCode.LOGITS_FAULT:
            error = "the target's best legal logit is not finite"
        self.finish(job, seat, FINISH_REASONS[code], error)
        return replace(event, finish_reason=job.finish_reason, error=error)

    def finish(self, job: Job, seat: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        """End a job and free what it held. Returns the event of an end without tokens."""
        with self.lock:
            job.error, job.finish_reason = error, reason
            del self.jobs[job.id]
            self.counters.finished[reason] += 1
            claim = self._claims.pop(job.id, None)
            if seat is not None:
                del self._seats[job.id]
                self.rows.release(seat)
                seat.matcher = None  # rounds on their way hold what they still need
        if claim:
            claim.release()
        if self._ended:
            self._ended(job)
        if self._observer:
            self._observer.finished(job)
        return StepEvent(job.id, (), finish_reason=reason, error=error)

    def finish_all(self, reason: FinishReason, error: str) -> None:
        if self._observer:
            self._observer.closed(error)
        with self.lock:  # a submit that came in time is among the jobs; a later one is refused
            jobs = tuple(self.jobs.values())
            self._waiting.clear()
        for job in jobs:
            self.finish(job, self._seats.get(job.id), reason, error=error)

    def _leave(self) -> None:
        self.lock = threading.Lock()
        for job in self.jobs.values():
            job.error, job.finish_reason = LEFT, FinishReason.ERROR
        self.jobs = {}
