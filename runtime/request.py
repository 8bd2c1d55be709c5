"""A request: the job and its events; and the active request, a job that holds a row."""

from __future__ import annotations

import functools
import operator
import sys
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from stepgraph.runtime.job import FinishReason, JobBase, Origin, T, TokenLogprob
from stepgraph.runtime.page_cache import CachedPage
from stepgraph.runtime.text import TextStream
from stepgraph.sampling.fields import shows_fields
from stepgraph.sampling.grammar.automaton.arena import ArenaBlock
from stepgraph.sampling.grammar.link.protocol import MatcherRow


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


@shows_fields
class Job(JobBase[T]):
    """A submitted request. Any thread may read it; only the engine writes it."""

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
    publishes: bool = True  # its pages, in the prefix cache
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
