"""A request: the job, its events and its finish reason; and the active request, a job that holds a row."""

from __future__ import annotations

import enum
import functools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from stepgraph.runtime.page_cache import CachedPage
from stepgraph.runtime.text import TextStream
from stepgraph.sampling.grammar.automaton.arena import ArenaBlock
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.python_types import has_no_longer_text
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams


class FinishReason(str, enum.Enum):
    """Why a job ended. Every job ends with one of these."""

    STOP = "stop"  # a stop token was emitted, which is the last token of the output; or the text contains a stop text
    LENGTH = "length"  # max_new_tokens were emitted; a constrained text may be complete, but its end is found one token later
    CONSTRAINT_COMPLETE = "constraint_complete"  # the grammar allows only a stop token, which is not emitted
    CANCELLED = "cancelled"
    DEAD_END = "dead_end"  # the output is incomplete, but grammar and bad_token_ids leave no legal token
    ERROR = "error"
    __str__ = str.__str__


class Origin(str, enum.Enum):
    """Which drafter proposed an emitted token. Without relaxed acceptance every emitted token is the target's choice."""

    TARGET = "target"  # no drafter: the last token of a round, unless the output ended before it
    DRAFT = "draft"  # a draft model, a proposer or a function
    LOOK_UP = "look_up"  # an n-gram match in the text or in draft_ids
    FORCED = "forced"  # the only token that the grammar allows
    __str__ = str.__str__


@functools.lru_cache(maxsize=1024)
def origins_of(count: int, accepted: int, forced: int, looked_up: int) -> tuple[Origin, ...]:
    """The origins of `count` tokens that a round emitted. forced, looked_up: bit i is for draft i."""
    drafts = (
        Origin.FORCED if forced >> index & 1 else Origin.LOOK_UP if looked_up >> index & 1 else Origin.DRAFT for index in range(accepted)
    )
    return (*drafts, *(Origin.TARGET,) * (count - accepted))


class TokenLogprob(NamedTuple):
    """Natural log-probabilities of an emitted token."""

    raw: float  # under the target's unprocessed logits
    masked: float  # under the distribution it was sampled from, after penalties, temperature and filters; greedy: 0, -inf if relaxed
    # With SamplingParams.top_logprobs, the most probable tokens and their log-probabilities, in descending order; fewer if fewer exist
    top_raw: tuple[tuple[int, float], ...] = ()
    top_masked: tuple[tuple[int, float], ...] = ()


class EngineClosedError(RuntimeError):
    """The engine was closed, or failed; the message says why."""


class DraftCounts(NamedTuple):
    """Numbers of drafts: of one round of a request, or summed."""

    accepted: int = 0
    forced: int = 0  # proposed by a grammar: its only legal token
    accepted_forced: int = 0
    looked_up: int = 0  # proposed by a look-up; disjoint from forced
    accepted_looked_up: int = 0
    accepted_relaxed: int = 0  # by relaxed acceptance: not the target's choice

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*map(operator.add, self, other))


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True)
class StepEvent:
    """What one step added to one job."""

    job_id: int
    tokens: tuple[int, ...] = ()
    drafts: DraftCounts = NO_DRAFTS
    finish_reason: FinishReason | None = None
    error: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if SamplingParams.logprobs
    origins: tuple[Origin, ...] = ()  # one per token

    @property
    def num_accepted_drafts(self) -> int:
        return self.drafts.accepted


class Lora(NamedTuple):
    """An adapter; the default is none."""

    name: str = ""
    slot: int = 0
    serial: int = 0  # unique: a cached prefix is found only with the serial under which it was computed


@dataclass(eq=False, repr=False)
class Job:
    """A submitted request. Any thread may read it; only the engine writes it."""

    id: int
    prompt_ids: tuple[int, ...]
    constraint: Constraint | None
    sampling: SamplingParams
    max_new_tokens: int
    num_speculative_tokens: int
    stop_ids: tuple[int, ...]  # of the vocabulary and of the request
    seed: int  # of the request, or chosen at random
    draft_ids: tuple[int, ...] = ()  # the expected output, to draft from
    cache_salt: str = ""  # only requests with equal salts share prefixes
    lora: Lora = field(default_factory=Lora)
    # (first position in the prompt, host tensor [n, width]) in order: embeddings that replace those of the tokens there
    embeddings: tuple[tuple[int, Tensor], ...] = ()
    resume_from: tuple[int, ...] = ()  # the output of an earlier request, which this one continues; not part of `tokens`
    prior_output_host: Tensor | None = None  # `prior_output`, for the counts of penalties
    priority: int = 0  # lower numbers get rows first
    tenant: str = ""  # at equal priority, tenants get rows in turn
    num_preemptions: int = 0  # how often it lost its row and continued
    num_tokens_at_preemption: int = 0  # number of `tokens` before the latest preemption
    vocabulary: Vocabulary | None = None
    parse: Callable[[str], Any] = str  # the text of a complete output -> `parsed`
    num_cached_tokens: int = 0  # tokens of the prompt and of `resume_from` found in the prefix cache, when it first had a row
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # one per token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, if SamplingParams.logprobs
    num_accepted_drafts: int = 0
    rounds: int = 0
    grammar_lane: str = ""  # "device", or "host: " and why; empty without a constraint, and before it has a row
    finish_reason: FinishReason | None = None
    error: str = ""
    submitted_at: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None  # from submit until it had a row
    first_token_seconds: float | None = None  # from submit until its first token was known
    seconds: float | None = None  # from submit until its end was known

    def __repr__(self) -> str:
        counts = f"{len(self.prompt_ids)} prompt tokens, {len(self.tokens)} tokens"
        return f"<Job {self.id}: {counts}, {self.finish_reason or 'running'}{self.error and ': ' + self.error}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("Job: cannot be copied or pickled; pass its text, tokens or other fields: the job is a part of its engine")

    @property
    def text(self) -> str:
        """The output so far, `resume_from` included, without control and stop tokens, up to a stop string."""
        stream, resumed = self._text_stream()
        return resumed + stream.push(self.tokens) + stream.finish()

    def text_stream(self) -> TextStream:
        """A decoder for `tokens` in pieces. ValueError if the engine has no vocabulary."""
        return self._text_stream()[0]

    def _text_stream(self) -> tuple[TextStream, str]:
        """The decoder, which has read `resume_from`, and the text of `resume_from`."""
        if self.vocabulary is None:
            raise ValueError("Job.text: the engine has no vocabulary, expected Engine(vocabulary=...)")
        stream = TextStream(self.vocabulary, self.sampling.stop, self.sampling.stop_token_ids)
        return stream, stream.push(self.resume_from)

    @property
    def prior_output(self) -> tuple[int, ...]:
        """The output before the present row: `resume_from`, and the own tokens before the latest preemption."""
        return (*self.resume_from, *self.tokens[: self.num_tokens_at_preemption])

    @functools.cached_property
    def context_ids(self) -> tuple[int, ...]:
        """The tokens before the first new one."""
        return self.prompt_ids + self.prior_output

    def count_preemption(self) -> None:
        """The tokens so far become part of `prior_output`."""
        self.num_preemptions += 1
        self.num_tokens_at_preemption = len(self.tokens)
        self.__dict__.pop("context_ids", None)  # the cached value

    @property
    def parsed(self) -> Any:
        """The output as the type given as `constraint`: an object of a pydantic model, a member of an enum, the match of a pattern, a
        functools.partial of a function. JSON values for a Constraint that is JSON; otherwise the text, which a stop text or stop token
        may have cut short. ValueError if a value is incomplete, or if the end of a text was not reached. At max_new_tokens, a JSON value
        other than a number, and an option of a choice with which no longer one begins, have no longer text and are complete."""
        ended = self.finish_reason in (FinishReason.STOP, FinishReason.CONSTRAINT_COMPLETE)
        if ended or self.finish_reason == FinishReason.LENGTH:
            text, marker, ids = self.text, self.constraint and self.constraint.marker, (*self.resume_from, *self.tokens)
            if isinstance(marker, tuple) and self.vocabulary:  # the text does not show where token ids are
                ends = (end for end in range(len(marker), len(ids)) if ids[end - len(marker) : end] == marker)
                stream = TextStream(self.vocabulary, self.sampling.stop, self.sampling.stop_token_ids)
                text = stream.push(ids[next(ends, len(ids)) :]) + stream.finish()
            if ended or has_no_longer_text(self.constraint, text):
                return self.parse(text)
        raise ValueError(
            "Job.parsed: the output is incomplete or its end was not reached, "
            f"finish_reason is {self.finish_reason}{self.error and ': ' + self.error}"
        )

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the output, as in vLLM: one of SamplingParams.stop or stop_token_ids. None for a stop token of the vocabulary, and if
        `finish_reason` is not `stop`."""
        if self.finish_reason != FinishReason.STOP:
            return None
        if self.sampling.stop:
            stream = self.text_stream()
            stream.push(self.tokens)
            if stream.found_stop:
                return stream.found_stop
        return self.tokens[-1] if self.tokens[-1] in self.sampling.stop_token_ids else None

    @property
    def cache_key(self) -> tuple[str, int]:
        """The salt and the adapter. Only requests with equal keys share prefixes."""
        return self.cache_salt, self.lora.serial

    @property
    def shareable_tokens(self) -> int:
        """The length of the prefix whose cache entries depend on token ids only."""
        return self.embeddings[0][0] if self.embeddings else len(self.prompt_ids) + self.max_new_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class ActiveRequest:
    """A job that holds a row, its pages and its matcher, from admission to finish."""

    job: Job
    row: int
    pages: list[int]  # its block table
    matcher: MatcherRow | None  # of a grammar on the host
    sampled: bool  # needs more than a masked argmax
    cached_pages: list[CachedPage]  # of its first pages: those it found published, then those it published
    num_skipped: int = 0  # last tokens, at most, that the draft model has not processed
    arena_block: ArenaBlock | None = None  # of a grammar on the device
    prefill_started: bool = False
    num_reused: int = 0  # tokens found in the prefix cache
    num_prefilled: int = 0  # prompt tokens whose cache entries are launched
    decoding: bool = False  # takes part in rounds
    stop_stream: TextStream | None = None  # of a job with stop strings: its text so far

    @property
    def constrained(self) -> bool:
        return self.job.constraint is not None

    @property
    def num_to_prefill(self) -> int:
        """Number of tokens left to prefill: all but the last given token, which is an input of the first round."""
        return len(self.job.context_ids) - 1 - self.num_prefilled
