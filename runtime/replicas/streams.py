"""Streams that continue on another replica when theirs is lost, with exactly the tokens that they would have had. Needs no Ray.

On equal hardware the next token depends only on the request and the tokens before it, so that `resume_from` continues the request. Requests
whose tokens depend on their drafts have no drafts.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import random
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from stepgraph.runtime.job import FinishReason, Lora
from stepgraph.runtime.replicas.replica import REPORTED, AnswerPart, EngineInfo, Refusal, ReplicaRequest
from stepgraph.runtime.replicas.router import page_hashes
from stepgraph.runtime.request import Job, StepEvent
from stepgraph.runtime.request_queue import QueueFullError
from stepgraph.runtime.serve.serving import AnswerError
from stepgraph.runtime.validate import TokenIds, checked_ids
from stepgraph.sampling.fields import check_value, instance_of
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint
from stepgraph.sampling.grammar.constraints.python_types import typed_constraint
from stepgraph.sampling.params import SamplingParams

# Calls a replica. Yields Tokens, or a Refusal. Raises ReplicaLost.
Call = Callable[[ReplicaRequest], AsyncGenerator[AnswerPart, None]]
POLICIES = ("exact", "same-hardware", "never")  # when a stream continues; same-hardware: also where a near tie may end differently
ATTEMPTS = 4  # most replicas in a row that give no new token
BACKOFF_SECONDS = 0.05  # before the second attempt, then doubled
MAX_OTHERS = 64  # replicas of another identity that a stream asks; a replica that restarts has a new name
_LISTS_OF_IDS = ("resume_from", "draft_ids")
_OF_THE_FIRST, _SUMMED = REPORTED[:2], REPORTED[2:4]  # replica, over all replicas; others are those of the latest one


class ReplicaLost(RuntimeError):
    """The replica of a stream ended before the stream did, or its engine failed."""


class IdentityMismatch(ReplicaLost):
    """The replica would not compute the same bits."""


@dataclass(eq=False)
class RemoteJob(Job):
    """A request on a replica. `queue_seconds` and `num_cached_tokens` are those of its first one, `rounds` and `num_preemptions` of all.

    Not known: `id`, which is 0, the slot of `lora`, `embeddings` and what only its engine needs.
    """

    replicas: list[str] = field(default_factory=list)  # in order; more than one if it was continued


@dataclass
class Counts:
    retried: int = 0  # sent to another replica before the first token
    continued: int = 0
    refused: int = 0  # could not be continued
    ended: collections.Counter[FinishReason] = field(default_factory=collections.Counter)  # by the server, before their last token


class ResumedStream:
    """The events of one request, from one replica after another. Dropping it cancels the request.

    Not an async generator: generators that use each other and are freed together are closed by a task each, which fail.
    """

    def __init__(
        self,
        call: Call,
        info: EngineInfo,
        resume: str,
        counts: Counts,
        on_end: Callable[[], None],
        prompt: TokenIds,
        options: dict[str, Any],
    ) -> None:
        """resume: one of POLICIES. on_end: called once, at the end of a stream that was opened. ValueError as for Engine.submit()."""
        self._call, self._info, self._resume, self._counts = call, info, resume, counts
        self._continues = resume == "same-hardware" or (resume == "exact" and info.exact)  # after its first token
        sampling = SamplingParams() if options.get("sampling") is None else options["sampling"]
        check_value("sampling", sampling, instance_of(SamplingParams, "SamplingParams"))
        if not sampling.greedy and sampling.seed is None:  # a seed drawn by the replica could not be repeated
            sampling = replace(sampling, seed=secrets.randbits(63))
        drafts = options.get("num_speculative_tokens")
        drafts = info.num_drafts if drafts is None else drafts
        depends_on_drafts = sampling.relaxed_top_n > 0 or (not sampling.greedy and (sampling.seed or 0) < 0)
        if depends_on_drafts and drafts in range(info.num_drafts + 1) and self._continues:  # the replica refuses other numbers
            options = options | {"num_speculative_tokens": (drafts := 0)}
        constraint, vocabulary = options.get("constraint"), info.vocabulary
        prompt_ids = checked_ids("prompt", prompt, info.num_tokens)
        constraint = constraint.constraint if isinstance(constraint, CompiledConstraint) else constraint
        typed = None if constraint is None else typed_constraint(constraint)
        ids = {name: checked_ids(name, options[name], info.num_tokens) for name in _LISTS_OF_IDS if options.get(name) is not None}
        options = options | ids | {"sampling": sampling, "constraint": typed and typed.constraint}
        pages = page_hashes(prompt_ids, info.page_size, (options.get("cache_salt", ""), options.get("lora_name", "")))
        self._request = ReplicaRequest(prompt_ids, options, pages)
        known: dict[str, Any] = {"constraint": None, "max_new_tokens": info.max_length - len(prompt_ids), "num_speculative_tokens": drafts}
        known |= {each.name: options[each.name] for each in fields(Job) if options.get(each.name) is not None}
        stop_ids = () if vocabulary is None or sampling.ignore_eos else vocabulary.stop_token_ids
        stop_ids, seed = tuple(dict.fromkeys((*stop_ids, *sampling.stop_token_ids))), sampling.seed or 0
        self.job = job = RemoteJob(0, prompt_ids, stop_ids=stop_ids, seed=seed, vocabulary=vocabulary, **known)
        job.lora, job.parse = Lora(options.get("lora_name", "")), typed.parse if typed else str
        self._identity, self._num_lost = "", 0
        self._lost, self._others = set[str](), set[str]()  # replicas to avoid; those of another identity
        self._record_end = functools.partial(_record_end, job, on_end)  # does not refer to the stream
        self._parts: AsyncGenerator[AnswerPart, None] | None = None  # of the current replica
        self._unread: StepEvent | None = None
        self._reading: asyncio.Future[StepEvent | None]  # the latest one
        self._closing: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Wait for the first tokens. Raises ValueError and QueueFullError of the engine, and AnswerError."""
        self._dropped = weakref.finalize(self, _call_in_loop, asyncio.get_running_loop(), self._record_end)
        self._dropped.atexit = False
        self._unread = await self.__anext__()

    def __aiter__(self) -> ResumedStream:
        return self

    async def __anext__(self) -> StepEvent:
        if self._unread is None and self._closing is None:
            self._reading = asyncio.ensure_future(self._next())  # a task, which cancel() can end without ending the reader's
            try:
                await asyncio.wait({self._reading})  # raises the cancellation of the reader only
            except asyncio.CancelledError:
                await self.aclose()
                raise
            if self._closing is None or not self._reading.cancelled():
                self._unread = self._reading.result()
        if self._closing is not None:
            await asyncio.shield(self._closing)
        event, self._unread = self._unread, None
        if event is None:
            raise StopAsyncIteration
        return event

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the request without waiting; the last event has this reason. Idempotent. For the replica, whose generator Ray closes, the
        request is cancelled: Ray passes no reason, and a call for it would wait behind the streams of a busy replica."""
        if self._closing is None:
            self._counts.ended[reason] += self.job.finish_reason is None
            self._closing = asyncio.ensure_future(self._close(reason))

    async def aclose(self) -> None:
        self.cancel()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _close(self, reason: FinishReason) -> None:
        if runs := self.job.finish_reason is None:
            self.job.finish_reason = reason
        self._reading.cancel()
        await asyncio.wait({self._reading})
        await self._end()
        if runs:
            self._unread = replace(self._unread or StepEvent(0), finish_reason=reason)

    async def _next(self) -> StepEvent | None:
        """The next event; None after the last one."""
        event = None
        try:
            while event is None and self._dropped.alive:
                try:
                    event = await self._next_of_replica()
                except ReplicaLost as error:
                    await self._prepare_next_replica(error)
            return event
        finally:
            if event is None or event.finish_reason is not None:
                await self._end()

    async def _end(self) -> None:
        """Idempotent."""
        try:
            await self._leave_replica()
        finally:
            if self._dropped.detach() is not None:
                self._record_end()

    async def _leave_replica(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            await parts.aclose()

    async def _prepare_next_replica(self, error: ReplicaLost) -> None:
        await self._leave_replica()
        job = self.job
        replicas, is_other = {*error.args[1:]}, isinstance(error, IdentityMismatch)
        none_left = is_other and (replicas <= self._others or len(self._others) == MAX_OTHERS)  # at this moment
        self._num_lost = num_lost = 0 if len(job.tokens) > self._num_known else self._num_lost + (none_left or not is_other)
        self._check(error, num_lost)
        if none_left:
            self._lost.clear()  # one of them may have returned
        elif is_other:
            self._others |= replicas
        else:
            self._lost |= replicas
        self._counts.retried += not job.tokens
        self._counts.continued += bool(job.tokens)
        await asyncio.sleep((num_lost > 1) * BACKOFF_SECONDS * 2 ** (num_lost - 2) * random.uniform(0.8, 1.2))

    def _check(self, error: ReplicaLost, num_lost: int) -> None:
        """AnswerError if the request must not be sent to another replica."""
        why = ""
        if num_lost >= ATTEMPTS:
            why = f"{num_lost} replicas in a row gave no new token"
        elif self.job.tokens and self._resume == "never":
            why = "resume is 'never'"
        elif self.job.tokens and not self._continues:
            why = f"with this model on {self._info.device} a near tie may end differently; resume='same-hardware' accepts that"
        if why:
            self._fail(f"{why} ({error.args[0]})", error)

    def _fail(self, why: str, error: Exception | None = None) -> NoReturn:
        self._counts.refused += bool(self.job.tokens)
        self.job.finish_reason, self.job.error = FinishReason.ERROR, why
        raise AnswerError(f"the answer cannot be continued after {len(self.job.tokens)} tokens: {why}") from error

    def _ask_replica(self) -> AsyncGenerator[AnswerPart, None]:
        job, options = self.job, self._request.options
        self._earlier, self._num_known = {name: getattr(job, name) for name in REPORTED}, len(job.tokens)
        if job.tokens:
            sampling = replace(job.sampling, prompt_logprobs=None)  # the first replica has reported them
            options = options | {"resume_from": (*job.resume_from, *job.tokens), "sampling": sampling}
        if job.replicas and job.timeout_seconds is not None:  # what is left of it
            options = options | {"timeout_seconds": max(1e-9, job.deadline - time.perf_counter())}
        identity = self._identity if job.tokens else ""
        return self._call(replace(self._request, options=options, avoid=frozenset(self._lost | self._others), identity=identity))

    async def _next_of_replica(self) -> StepEvent:
        """The next new tokens of the current replica, or of another one."""
        job = self.job
        self._parts = parts = self._parts or self._ask_replica()
        async for part in parts:
            if isinstance(part, Refusal):
                self._refused(part)
            if part.replica:
                self._identity = part.identity
                job.replicas.append(part.replica)
                job.prompt_scores = job.prompt_scores if job.tokens else part.prompt_scores
            for name, value in zip(REPORTED, part.reported, strict=False):
                if len(job.replicas) == 1 or name not in _OF_THE_FIRST:
                    setattr(job, name, self._earlier[name] + value if name in _SUMMED else value)
            if (event := self._event(part.event)) is not None:
                return event
        raise ReplicaLost("the stream ended without a finish reason", *job.replicas[-1:])

    def _refused(self, part: Refusal) -> NoReturn:
        if part.why == "value":
            if not self.job.tokens:
                raise ValueError(part.message)
            self._fail(f"replica {part.replica} refuses it: {part.message}")
        if part.why == "full" and not self.job.tokens:
            raise QueueFullError(part.message)
        if part.why == "identity":
            raise IdentityMismatch(part.message, part.replica)
        raise ReplicaLost(part.message, part.replica)

    def _event(self, event: StepEvent) -> StepEvent | None:
        """Record an event of the replica's job. Returns that of this job; None if it has nothing new."""
        job = self.job
        if event.finish_reason == FinishReason.CANCELLED:  # by a replica that shuts down
            raise ReplicaLost("the replica was shut down", job.replicas[-1])
        if job.first_token_seconds is None and event.tokens:
            job.first_token_seconds = time.perf_counter() - job.submitted_at
        job.tokens += event.tokens
        job.logprobs += event.logprobs
        job.origins += event.origins
        job.num_accepted_drafts += event.num_accepted_drafts
        if event.finish_reason is not None:
            job.finish_reason, job.error = event.finish_reason, event.error
        return replace(event, job_id=0) if event.tokens or event.finish_reason is not None else None


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)


def _record_end(job: Job, on_end: Callable[[], None]) -> None:
    job.finish_reason = job.finish_reason or FinishReason.CANCELLED
    job.seconds = time.perf_counter() - job.submitted_at
    on_end()
