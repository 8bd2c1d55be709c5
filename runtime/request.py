"""What a user holds of a request: the job, its events, and why it ended. Knows no rows and no device."""

from __future__ import annotations

import enum
import functools
import operator
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.params import SamplingParams


class FinishReason(str, enum.Enum):
    """Every job ends with one of these."""

    STOP = "stop"  # a stop token was emitted; it is the last token of the output
    LENGTH = "length"  # max_new_tokens
    CONSTRAINT_COMPLETE = "constraint_complete"  # the grammar allows nothing more but a stop token, which is not emitted
    CANCELLED = "cancelled"
    DEAD_END = "dead_end"  # nothing may follow although the text is not complete: the grammar, or what the request forbids, leaves no token
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


FINISH_REASONS = {
    FinishCode.STOP: FinishReason.STOP,
    FinishCode.LENGTH: FinishReason.LENGTH,
    FinishCode.CONSTRAINT_COMPLETE: FinishReason.CONSTRAINT_COMPLETE,
    FinishCode.DEAD_END: FinishReason.DEAD_END,
    FinishCode.MASK_FAULT: FinishReason.ERROR,
    FinishCode.LOGITS_FAULT: FinishReason.ERROR,
}


class Origin(str, enum.Enum):
    """Who said a token first. Whoever did, it is what the target says there."""

    TARGET = "target"  # nobody before it: a round's last token, if no end cut it off
    DRAFT = "draft"  # the drafter, and it held: a model, a proposer or a function
    LOOK_UP = "look_up"  # a draft found in the text, or in the one that was given
    FORCED = "forced"  # a draft that the grammar left no choice about

    def __str__(self) -> str:
        return self.value


@functools.lru_cache(maxsize=1024)
def origins_of(count: int, accepted: int, forced: int, looked_up: int) -> tuple[Origin, ...]:
    """Of the tokens that a round emitted; a bit per draft tells which of the accepted ones were forced, and which looked up."""
    drafts = (
        Origin.FORCED if forced >> place & 1 else Origin.LOOK_UP if looked_up >> place & 1 else Origin.DRAFT for place in range(accepted)
    )
    return (*drafts, *(Origin.TARGET,) * (count - accepted))


class TokenLogprob(NamedTuple):
    """How likely an emitted token was, as natural logarithms."""

    raw: float  # to the target: under its own logits, before anything
    masked: float  # in the distribution it was drawn from, after masks, penalties, temperature and filters; 0.0 where greedy


class DraftCounts(NamedTuple):
    """Numbers of drafts: of one round of a request, or summed."""

    accepted: int = 0
    forced: int = 0  # proposed because the grammar allowed one token only
    accepted_forced: int = 0
    looked_up: int = 0  # found in the text; disjoint from forced
    accepted_looked_up: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*map(operator.add, self, other))


NO_DRAFTS = DraftCounts()


class QueueFullError(RuntimeError):
    """As many requests wait for a row as EngineConfig.max_queued lets wait."""


class EngineClosedError(RuntimeError):
    """The engine was closed, or failed; it says why."""


@dataclass(frozen=True)
class StepEvent:
    """What one round added to one job."""

    job_id: int
    tokens: tuple[int, ...]
    drafts: DraftCounts = NO_DRAFTS
    finish_reason: FinishReason | None = None
    error: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, where the request wants them
    origins: tuple[Origin, ...] = ()  # one per token

    @property
    def num_accepted_drafts(self) -> int:
        return self.drafts.accepted


@dataclass(eq=False)
class Job:
    """A submitted request. Read it freely from any thread; only the engine writes it."""

    id: int
    prompt_ids: tuple[int, ...]
    constraint: Constraint | None
    sampling: SamplingParams
    max_new_tokens: int
    num_speculative_tokens: int
    stop_ids: tuple[int, ...]  # the vocabulary's and the request's own
    seed: int  # the request's, or the one it was given
    draft_ids: tuple[int, ...] = ()  # the text that the request gave to draft from
    cache_salt: str = ""  # prefixes are shared among requests of one salt
    # places in the prompt, in order, and what stands there in place of the tokens' embeddings; on the host
    embeddings: tuple[tuple[int, Tensor], ...] = field(default=(), repr=False)
    num_cached_tokens: int = 0  # of the prompt: not computed, but found in the cache
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # one per token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, where the request wants them
    num_accepted_drafts: int = 0
    rounds: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    submitted_at: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None  # until it had a row
    first_token_seconds: float | None = None  # from its submit until its first token was known

    @property
    def shareable(self) -> int:
        """Positions from the first on whose cache entries follow from the tokens alone."""
        return self.embeddings[0][0] if self.embeddings else len(self.prompt_ids) + self.max_new_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
