"""A request: the job and its events; and the active request, a job that holds a row."""

from __future__ import annotations

import enum
import functools
import operator
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from stepgraph.runtime.finish_reason import FinishReason
from stepgraph.runtime.job_text import JobText
from stepgraph.runtime.page_cache import CachedPage
from stepgraph.runtime.text import TextStream
from stepgraph.sampling.fields import shows_fields
from stepgraph.sampling.grammar.automaton.arena import ArenaBlock
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams


class Origin(str, enum.Enum):
    """Which drafter proposed an emitted token. Without relaxed acceptance every emitted token is the target's choice."""

    TARGET = "target"  # no drafter: the last token of a round, unless the output ended before it
    DRAFT = "draft"  # a draft model, a proposer or a function
    LOOK_UP = "look_up"  # an n-gram match in the text or in draft_ids
    FORCED = "forced"  # of the only text that the grammar allows; the target may spell it in other tokens
    __str__ = str.__str__


@shows_fields
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
    forced: int = 0  # proposed by a grammar: tokens of the only legal text
    accepted_forced: int = 0
    looked_up: int = 0  # proposed by a look-up; disjoint from forced
    accepted_looked_up: int = 0
    accepted_relaxed: int = 0  # by relaxed acceptance: not the target's choice

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*map(operator.add, self, other))


NO_DRAFTS = DraftCounts()


@functools.lru_cache(maxsize=1024)
def describe_drafts(count: int, accepted: int, forced: int, looked_up: int, relaxed: int) -> tuple[DraftCounts, tuple[Origin, ...]]:
    """The counts of a round, and the origins of the `count` tokens that it emitted. forced, looked_up, relaxed: bit i is for draft i."""
    accepted_bits = ~(-1 << accepted)
    bits = forced, forced & accepted_bits, looked_up, looked_up & accepted_bits, relaxed & accepted_bits
    drafts = (
        Origin.FORCED if forced >> index & 1 else Origin.LOOK_UP if looked_up >> index & 1 else Origin.DRAFT for index in range(accepted)
    )
    return DraftCounts(accepted, *map(int.bit_count, bits)), (*drafts, *(Origin.TARGET,) * (count - accepted))


@dataclass(slots=True)  # frozen, an event would take six times as long: one is made for each row and round
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


@shows_fields
@dataclass(eq=False, repr=False)
class Job(JobText):
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
    def prior_output(self) -> tuple[int, ...]:
        """The output before the present row: `resume_from`, and the own tokens before the latest preemption."""
        return (*self.resume_from, *self.tokens[: self.num_tokens_at_preemption])

    @functools.cached_property
    def context_ids(self) -> tuple[int, ...]:
        """The tokens before the first new one."""
        return self.prompt_ids + self.prior_output

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
    most_tokens: int = sys.maxsize  # of the job, with which its pages still hold all positions that the next launch may write

    @property
    def constrained(self) -> bool:
        return self.job.constraint is not None

    @property
    def num_to_prefill(self) -> int:
        """Number of tokens left to prefill: all but the last given token, which is an input of the first round."""
        return len(self.job.context_ids) - 1 - self.num_prefilled
