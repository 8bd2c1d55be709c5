"""The desk: every job that has not ended, who waits, who sits where. The one place that other threads reach into."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.forks import LEFT, leave_in_forks
from stepgraph.runtime.grammar_queue import QueuedRequest
from stepgraph.runtime.ledger import Counters
from stepgraph.runtime.request import FINISH_REASONS, FinishReason, Job, QueueFullError, StepEvent, TokenLogprob, origins_of
from stepgraph.runtime.slots import ActiveRequest, RowTable, Sharing
from stepgraph.runtime.stats import Loss
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.compile.compiler import Claim
from stepgraph.sampling.grammar.compile.limits import named


def id_of(job: Job | int) -> int:
    return job.id if isinstance(job, Job) else job


class Scheduler:
    """Books for the engine. `submit` and `cancel` come from any thread; everything else from the stepping one."""

    def __init__(self, limits: Limits, sharing: Sharing, ended: Callable[[Job], None] | None = None, only_looks_up: bool = False) -> None:
        """only_looks_up: every draft that no grammar forces was found in a text."""
        self.lock, self._ended, self._only_looks_up = threading.Lock(), ended, only_looks_up
        self._waiting: collections.deque[QueuedRequest] = collections.deque()
        self._claims: dict[int, Claim] = {}
        self._cancelled: dict[int, Job] = {}
        self._seats: dict[int, ActiveRequest] = {}
        self.jobs: dict[int, Job] = {}
        self.rows = RowTable(limits, sharing)
        self.ledger = Counters(limits.num_speculative_tokens)
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
        with self.lock:
            still_open("submit")
            if len(self._waiting) >= max_queued:
                raise QueueFullError(f"Engine.submit(): {max_queued} requests are waiting already (EngineConfig.max_queued)")
            most = max(self.ledger.most_waiting, len(self._waiting) + 1)
            # An interrupt comes out of a call. From here on there is but the last one, so that it finds nothing done, or all.
            self.jobs[waiting.job.id] = waiting.job
            if waiting.claim is not None:
                self._claims[waiting.job.id] = waiting.claim
            self.ledger.submitted += 1
            self.ledger.most_waiting = most
            self._waiting.append(waiting)

    def give_up(self, waiting: QueuedRequest) -> None:
        """Nobody will know of this job, whether it came into the queue or not."""
        if waiting.job.id in self.jobs:
            self.ask_cancel(waiting.job.id)
        elif waiting.claim is not None:
            waiting.claim.release()

    def ask_cancel(self, asked: Job | int) -> bool:
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
                    self.ledger.queue_seconds.add(seat.job.queue_seconds)
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
            self.ledger.prompt_tokens += tokens

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
        forced_drafts, accepted_forced = forced.bit_count(), (forced & held).bit_count()
        looked_up_drafts, accepted_looked_up = looked_up.bit_count(), (looked_up & held).bit_count()
        job, ledger = seat.job, self.ledger
        with self.lock:
            if tokens and not job.tokens:
                job.first_token_seconds = time.perf_counter() - job.submitted_at
                ledger.first_token_seconds.add(job.first_token_seconds)
            ledger.tokens += len(tokens)
            ledger.accepted_drafts += accepted
            ledger.forced_drafts += forced_drafts
            ledger.accepted_forced_drafts += accepted_forced
            ledger.looked_up_drafts += looked_up_drafts
            ledger.accepted_looked_up_drafts += accepted_looked_up
            if offered or (job.rounds and job.num_speculative_tokens):
                ledger.drafted(len(tokens), offered, accepted, lost)
        origins = origins_of(len(tokens), accepted, forced, looked_up)
        job.tokens.extend(tokens)
        job.origins.extend(origins)
        job.logprobs.extend(logprobs)
        job.num_accepted_drafts += accepted
        job.rounds += 1
        event = StepEvent(
            job.id,
            tuple(tokens),
            accepted,
            logprobs=tuple(logprobs),
            num_forced_drafts=forced_drafts,
            num_accepted_forced_drafts=accepted_forced,
            num_looked_up_drafts=looked_up_drafts,
            num_accepted_looked_up_drafts=accepted_looked_up,
            origins=origins,
        )
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
            self.ledger.finished[reason] += 1
            claim = self._claims.pop(job.id, None)
            if seat is not None:
                del self._seats[job.id]
                self.rows.release(seat)
                seat.matcher = None  # rounds on their way hold what they still need
        if claim:
            claim.release()
        if self._ended:
            self._ended(job)
        return StepEvent(job.id, (), 0, reason, error)

    def finish_all(self, reason: FinishReason, error: str) -> None:
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
