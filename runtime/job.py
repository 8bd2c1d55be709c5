"""A job: why it ends, where its tokens come from, its fields, and its output as text and as a value."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, cast

from torch import Tensor
from typing_extensions import TypeVar

from stepgraph.runtime.text import TextStream
from stepgraph.sampling.fields import shows_fields
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.python_types import has_no_longer_text
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams

T = TypeVar("T", default=Any)  # of Job.parsed


class FinishReason(str, enum.Enum):
    """Why a job ended. Every job ends with one of these."""

    STOP = "stop"  # a stop token was emitted, which is the last token of the output; or the text contains a stop text
    LENGTH = "length"  # max_new_tokens were emitted; a constrained text may be complete, but its end is found one token later
    CONSTRAINT_COMPLETE = "constraint_complete"  # the grammar allows only a stop token, which is not emitted
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"  # its timeout_seconds have passed; the output so far is kept
    DEAD_END = "dead_end"  # the output is incomplete, but grammar and bad_token_ids leave no legal token
    ERROR = "error"
    __str__ = str.__str__


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
    # Under the distribution it was sampled from, after penalties, temperature and filters; greedy: 0, -inf if relaxed; in a prompt: `raw`
    masked: float
    # With SamplingParams.top_logprobs, the most probable tokens and their log-probabilities, in descending order; fewer if fewer exist
    top_raw: tuple[tuple[int, float], ...] = ()
    top_masked: tuple[tuple[int, float], ...] = ()


class Lora(NamedTuple):
    """An adapter; the default is none."""

    name: str = ""
    slot: int = 0
    serial: int = 0  # unique: a cached prefix is found only with the serial under which it was computed


@dataclass(eq=False, repr=False)
class JobBase(Generic[T]):
    """The fields of a Job, and its output as text."""

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
    priority: int = 0  # lower numbers get rows first
    tenant: str = ""  # at equal priority, tenants get rows in turn
    timeout_seconds: float | None = None  # from submit, after which it ends
    num_preemptions: int = 0  # how often it lost its row and continued
    num_tokens_at_preemption: int = 0  # number of `tokens` before the latest preemption
    vocabulary: Vocabulary | None = None
    parse: Callable[[str], Any] = str  # the text of a complete output -> `parsed`
    num_cached_tokens: int = 0  # tokens of the prompt and of `resume_from` found in the prefix cache, when it first had a row
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # one per token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, if SamplingParams.logprobs
    # [len(prompt_ids) - 1, columns] in host memory, if SamplingParams.prompt_logprobs: what the device writes for `prompt_logprobs`
    prompt_scores: Tensor | None = None
    num_accepted_drafts: int = 0
    rounds: int = 0
    grammar_lane: str = ""  # "device", or "host: " and why; empty without a constraint, and before it has a row
    finish_reason: FinishReason | None = None
    error: str = ""
    submitted_at: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None  # from submit until it had a row
    first_token_seconds: float | None = None  # from submit until its first token was known
    seconds: float | None = None  # from submit until its end was known

    @property
    def deadline(self) -> float:
        """When its `timeout_seconds` have passed, on the clock of `submitted_at`."""
        return math.inf if self.timeout_seconds is None else self.submitted_at + self.timeout_seconds

    @property
    def scores_prompt(self) -> bool:
        """Whether its prefill computes `prompt_scores`. Not after a preemption, if a round was read: the device has written them before."""
        return self.sampling.prompt_logprobs is not None and not self.rounds

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None]:
        """With SamplingParams.prompt_logprobs: None for the first prompt token, then an entry for each token, without `top_masked`. Empty
        until the first event of the job."""
        if self.prompt_scores is None or not self.rounds:
            return []
        found, top = list[TokenLogprob | None]([None]), self.prompt_scores.shape[1] // 2
        for raw, *ranked in self.prompt_scores.tolist():
            pairs = zip(map(int, ranked[top:]), ranked[:top], strict=True)
            found.append(TokenLogprob(raw, raw, tuple(pair for pair in pairs if pair[1] > -math.inf)))
        return found

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
    def parsed(self) -> T:
        """The output as the type given as `constraint`: an object of a pydantic model, a member of an enum, the match of a pattern, a
        functools.partial of a function. JSON values for a Constraint that is JSON; otherwise the text, which a stop text or stop token
        may have cut short. ValueError if a value is incomplete, or if the end of a text was not reached. At max_new_tokens, a JSON value
        other than a number, and an option of a choice with which no longer one begins, have no longer text and are complete."""
        ended = self.finish_reason in (FinishReason.STOP, FinishReason.CONSTRAINT_COMPLETE)
        if ended or self.finish_reason == FinishReason.LENGTH:
            text, marker, ids = self.text, self.constraint and self.constraint.marker, (*self.resume_from, *self.tokens)
            if isinstance(marker, str):
                text = text.partition(marker)[2]
            elif marker and self.vocabulary:  # the text does not show where token ids are
                ends = (end for end in range(len(marker), len(ids)) if ids[end - len(marker) : end] == marker)
                stream = TextStream(self.vocabulary, self.sampling.stop, self.sampling.stop_token_ids)
                text = stream.push(ids[next(ends, len(ids)) :]) + stream.finish()
            if ended or has_no_longer_text(self.constraint, text):
                return cast("T", self.parse(text))
        reason = f"{self.finish_reason}{self.error and ': ' + self.error}"
        raise ValueError(f"Job.parsed: the output is incomplete or its end was not reached, finish_reason is {reason}")

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
