"""Bookkeeping of the requests that hold rows: admission, results of rounds, the end of jobs, and counters. For the stepping thread only."""

from __future__ import annotations

import collections
import enum
import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from stepgraph.graphs.limits import Limits
from stepgraph.graphs.row_layout import REFUSED, ResultRecord
from stepgraph.runtime.device_grammars import DeviceGrammars
from stepgraph.runtime.histogram import HistogramBuilder
from stepgraph.runtime.job import FinishReason, TokenLogprob
from stepgraph.runtime.record import Recorder
from stepgraph.runtime.request import NO_DRAFTS, ActiveRequest, DraftCounts, Job, StepEvent, describe_drafts
from stepgraph.runtime.request_queue import QueuedRequest, RequestQueue
from stepgraph.runtime.row_table import PrefixSharing, RowTable
from stepgraph.sampling.grammar.compile.limits import TOO_DEEP, names_limit, with_limit_name
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus

REFUSED_CONSTRAINT = "refused"  # in counts by finish reason, where alerts on "error" must not include wrong requests


class LossCause(str, enum.Enum):
    """Why a round accepted fewer drafts than requested: the first cause in the chain."""

    ILLEGAL = "illegal"  # the grammar forbids the next draft; found when it was proposed or when it was verified
    IMPROBABLE = "improbable"  # the target chose or sampled another token
    ENDED = "ended"  # the text ended at an accepted draft, or at the position of the next one
    UNDRAFTED = "undrafted"  # no drafter proposed a token for the next position


def loss_cause(requested: int, result: ResultRecord) -> LossCause | None:
    """The cause for one row of a round that `requested` so many drafts; None if all of them were accepted."""
    accepted = result.accepted
    if accepted >= requested:
        return None
    if result.emitted == accepted:
        return LossCause.ENDED
    if accepted < result.draft_count:
        return LossCause.IMPROBABLE if MaskStatus.OK <= result.statuses[accepted + 1] < MaskStatus.ILLEGAL else LossCause.ILLEGAL
    return LossCause.ILLEGAL if result.drafts[accepted] == REFUSED else LossCause.UNDRAFTED


class Counters:
    """What `stats()` reports of all requests so far."""

    def __init__(self, num_drafts: int) -> None:
        self.tokens = self.prompt_tokens = self.drafting_tokens = self.preemptions = 0
        self._rounds_by_drafts = collections.Counter[DraftCounts]()  # a sum for each row and round takes longer
        self.finished = collections.Counter[str]()  # by finish reason, or REFUSED_CONSTRAINT
        self.queue_seconds, self.first_token_seconds, self.token_seconds = (HistogramBuilder() for _ in range(3))
        self.offered, self.accepted = [0] * (num_drafts + 1), [0] * (num_drafts + 1)  # drafting rounds by number of drafts
        self.losses: dict[LossCause | None, int] = dict.fromkeys((None, *LossCause), 0)

    def add_round(self, result: ResultRecord, drafts: DraftCounts, max_drafts: int) -> None:
        """Count a round of a row. max_drafts: drafts that it could verify."""
        self.tokens += result.emitted
        if max_drafts:
            self._rounds_by_drafts[drafts] += 1
            self.offered[result.draft_count] += 1
            self.accepted[result.accepted] += 1
            self.drafting_tokens += result.emitted
            self.losses[loss_cause(max_drafts, result)] += 1

    @property
    def drafts(self) -> DraftCounts:
        totals = ([rounds * count for count in drafts] for drafts, rounds in self._rounds_by_drafts.items())
        return DraftCounts(*map(sum, zip(NO_DRAFTS, *totals, strict=True)))


class Scheduler:
    """Takes requests from the queue, and keeps them until they end. What other threads read is changed under the queue's lock."""

    def __init__(
        self,
        queue: RequestQueue,
        grammars: DeviceGrammars,
        limits: Limits,
        sharing: PrefixSharing,
        recorder: Recorder | None = None,
        on_end: Callable[[Job], None] | None = None,
        only_looks_up: bool = False,
    ) -> None:
        """on_end: called for each finished job. only_looks_up: every draft that is not forced comes from a look-up."""
        self._queue, self._grammars, self._recorder, self._on_end, self._only_looks_up = queue, grammars, recorder, on_end, only_looks_up
        self._active = queue.active
        self.rows = RowTable(limits, sharing)
        self.counters = Counters(limits.num_speculative_tokens)  # changed under the lock of the queue

    @property
    def active(self) -> Collection[ActiveRequest]:
        """The requests that hold rows, in order of admission."""
        return tuple(self._active.values())

    @property
    def runnable(self) -> bool:
        """Whether a request is active, could be admitted or is cancelled. False while all wait for their grammars."""
        with self._queue.lock:
            return bool(self._active or self._queue.cancelled or any(map(self._may_start, self._queue.waiting)))

    def _may_start(self, queued: QueuedRequest) -> bool:
        return queued.ready and (not self._queue.holds or queued.job.num_preemptions > 0)

    def begin_step(self) -> list[tuple[Job, ActiveRequest | None, FinishReason]]:
        """Remove the cancelled and expired jobs from the queue, and return them with the reasons that they get."""
        if self._queue.next_deadline < math.inf and time.perf_counter() >= self._queue.next_deadline:
            self._queue.expire()
        if self._recorder:
            self._recorder.steps += 1
        cancelled = self._queue.pop_cancelled() if self._queue.cancelled else {}
        return [(job, self._active.get(job.id), reason) for job, reason in cancelled.values() if not job.finished]

    def admit(self) -> list[StepEvent]:
        """Give rows to queued requests in the order of the queue. The first one without a free row or pages holds back the rest; one whose
        grammar is still being compiled does not. Ends the requests whose grammar failed."""
        failed, taken = list[tuple[Job, ActiveRequest | None, str]](), list[QueuedRequest]()
        with self._queue.lock:
            for queued in self._admissible():
                if queued.error:
                    failed.append((queued.job, None, queued.error))
                elif request := self.rows.allocate(queued.job, queued.matcher):
                    self._active[request.job.id] = request
                    if self._recorder:
                        self._recorder.write("admit", job=request.job.id)
                    if queued.claim and (error := self._grammars.admit(request, queued.claim.result())):
                        failed.append((queued.job, request, error))
                    if request.job.queue_seconds is None:  # otherwise it continues after a preemption
                        request.job.queue_seconds = time.perf_counter() - request.job.submitted_at
                        self.counters.queue_seconds.add(request.job.queue_seconds)
                else:
                    break
                taken.append(queued)
            if taken:
                self._queue.remove(taken)
        return [self.finish(job, request, FinishReason.ERROR, error) for job, request, error in failed]

    def _admissible(self) -> Iterator[QueuedRequest]:
        """The waiting requests that may have a row, in order. Under the lock."""
        return (each for each in self._queue.waiting if self._may_start(each) and each.job.id not in self._queue.cancelled)

    def start_prefill(self, request: ActiveRequest) -> None:
        with self._queue.lock:
            self.rows.start_prefill(request)

    def record_prefill(self, request: ActiveRequest, tokens: int) -> None:
        """Record that the next `tokens` prompt tokens of a request are launched; after the last one it takes part in rounds."""
        with self._queue.lock:
            request.num_prefilled += tokens
            request.decoding = request.num_to_prefill == 0
            self.rows.publish_prompt(request)
            self.counters.prompt_tokens += tokens

    def record(self, request: ActiveRequest, result: ResultRecord) -> StepEvent:
        """Add a round's result to its job, and finish the job if the round ended it."""
        job, counters, stops = request.job, self.counters, request.stop_stream
        tokens = tuple(result.tokens[: result.emitted])
        if stops and len(up_to_stop := stops.up_to_stop(tokens)) < len(tokens):
            tokens, result = up_to_stop, result._replace(emitted=len(up_to_stop), accepted=min(result.accepted, len(up_to_stop)))
        forced = looked_up = relaxed = 0
        if result.draft_count:
            forced = result.forced if request.constrained else 0  # no round without grammars writes it
            looked_up = (~(-1 << result.draft_count) if self._only_looks_up else result.looked_up) & ~forced
            relaxed = result.relaxed if job.sampling.relaxed_top_n else 0  # greedy rounds do not write it
        drafts, origins = describe_drafts(len(tokens), result.accepted, forced, looked_up, relaxed)
        could_draft = result.draft_count or len(job.tokens) > job.num_tokens_at_preemption  # not in the first round with this row
        max_drafts = min(job.num_speculative_tokens, len(result.drafts)) if could_draft else 0
        if tokens and self._recorder:
            self._recorder.write("tokens", job=job.id, tokens=tokens)
        with self._queue.lock:
            if tokens and not job.tokens:
                job.first_token_seconds = time.perf_counter() - job.submitted_at
                counters.first_token_seconds.add(job.first_token_seconds)
            counters.add_round(result, drafts, max_drafts)
        logprobs = tuple(map(_logprob, tokens, result.logprobs)) if job.sampling.logprobs else ()
        job.tokens.extend(tokens)
        job.origins.extend(origins)
        job.logprobs.extend(logprobs)
        job.num_accepted_drafts += result.accepted
        job.rounds += 1
        if stops and stops.found_stop:
            self.finish(job, request, FinishReason.STOP)
        elif result.finish != FinishCode.RUNNING:
            code = FinishCode(result.finish)
            reason = FinishReason.ERROR if code > FinishCode.DEAD_END else FinishReason[code.name]
            self.finish(job, request, reason, _error(code, request, result.statuses[result.accepted]))
        return StepEvent(job.id, tokens, drafts, job.finish_reason, job.error, logprobs, origins)

    def finish(self, job: Job, request: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        """End a job and free what it holds. Returns an event without tokens."""
        with self._queue.lock:
            job.seconds = time.perf_counter() - job.submitted_at
            job.error, job.finish_reason = error, reason
            queued = self._queue.unfinished.pop(job.id)
            refused = reason == FinishReason.ERROR and ((queued.error and not job.num_preemptions) or names_limit(error))
            self.counters.finished[REFUSED_CONSTRAINT if refused else reason.value] += 1
            if job.first_token_seconds is not None and len(job.tokens) > 1:
                self.counters.token_seconds.add((job.seconds - job.first_token_seconds) / (len(job.tokens) - 1))
            if request is not None:
                self._free(request)
        if queued.claim:
            queued.claim.release()
        if self._on_end:
            self._on_end(job)
        if self._recorder:
            self._recorder.write("end", job=job.id, reason=str(reason), error=error)
        return StepEvent(job.id, finish_reason=reason, error=error)

    def _free(self, request: ActiveRequest) -> None:
        del self._active[request.job.id]
        self.rows.release(request)
        self._grammars.release(request)
        request.matcher = None  # rounds in flight hold their own references

    def finish_all(self, reason: FinishReason, error: str) -> None:
        """End every job. Jobs submitted before are included; later submits are refused."""
        if self._recorder:
            self._recorder.write("closed", why=error)
            self._recorder.close()
        with self._queue.lock:
            unfinished = tuple(self._queue.unfinished.values())
            self._queue.waiting.clear()
        for queued in unfinished:
            self.finish(queued.job, self._active.get(queued.job.id), reason, error=error)


def _logprob(token: int, values: list[Any]) -> TokenLogprob:
    """A token in a list of most probable ones has its value there: its own is computed separately, and rounded differently."""
    pair = TokenLogprob(*values)
    return pair._replace(raw=dict(pair.top_raw).get(token, pair.raw), masked=dict(pair.top_masked).get(token, pair.masked))


def _error(code: FinishCode, request: ActiveRequest, status: int) -> str:
    """The error message of a job that a round ended, at a mask of this status."""
    if code == FinishCode.MASK_FAULT:
        fault = with_limit_name((request.matcher.fault if request.matcher else "") or (TOO_DEEP if status == MaskStatus.FAULT else ""))
        return f"no valid grammar mask: {fault or 'its tag names another request, history or position'}"
    return "the target's best legal logit is not finite" if code == FinishCode.LOGITS_FAULT else ""
