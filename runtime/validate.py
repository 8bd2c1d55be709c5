"""What a caller asks for, checked field by field before anything is queued."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stepgraph.graphs.model import ModelPair
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.checks import checked_count, checked_embeddings, checked_ids, checked_prompt, checked_sampling
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.request import Job
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.params import SamplingParams


class Submissions:
    """Makes jobs of what is asked for. Safe from any thread: nothing here changes but the next id."""

    def __init__(self, config: EngineConfig, limits: Limits, stop_token_ids: Sequence[int], models: ModelPair, pinned: bool) -> None:
        if len(stop_token_ids) > limits.max_stop_ids:
            raise ValueError(
                f"EngineConfig.max_stop_ids: got {limits.max_stop_ids}, want at least {len(stop_token_ids)}, the vocabulary's stop ids"
            )
        self._config, self._limits, self._stop_token_ids = config, limits, tuple(stop_token_ids)
        self._takes_draft_ids = models.reads_text
        self._embedding_size, self._embedding_dtype = int(getattr(models.target, "embedding_size", 0)), models.target.feature_dtype
        self._pinned = pinned  # embeddings on their way to the device: a copy from other memory would wait for it
        self._ids = itertools.count(1)  # never used twice: an id also names the owner in mask tags

    def job(
        self,
        prompt_ids: Any,
        constraint: Constraint | None,
        sampling: SamplingParams | None,
        max_new_tokens: int,
        num_speculative_tokens: int | None,
        draft_ids: Any = None,
        cache_salt: str = "",
        prompt_embeddings: Any = None,
    ) -> Job:
        """ValueError names the field that cannot be served, what it got and what was wanted."""
        limits, most = self._limits, self._limits.num_speculative_tokens
        prompt = checked_prompt(prompt_ids, limits)
        why = f"max_length={limits.max_length} less {len(prompt)} of prompt"
        new_tokens = checked_count("max_new_tokens", max_new_tokens, 1, limits.max_length - len(prompt), why)
        drafts = most if num_speculative_tokens is None else num_speculative_tokens
        drafts = checked_count("num_speculative_tokens", drafts, 0, most, "what the engine was captured for")
        given = () if draft_ids is None else self._given(draft_ids, drafts)
        sampling = checked_sampling(
            sampling, limits, greedy_only=self._config.greedy_only, constrained=constraint is not None, max_new_tokens=new_tokens
        )
        stops = self._stops(checked_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.num_tokens), sampling.ignore_eos)
        seed = sampling.seed if sampling.seed is not None else 0 if sampling.greedy else secrets.randbits(63)
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt: got {type(cache_salt).__name__}, want a string")
        embeddings = () if prompt_embeddings is None else self._embeddings(prompt_embeddings, len(prompt))
        return Job(next(self._ids), prompt, constraint, sampling, new_tokens, drafts, stops, seed, given, cache_salt, embeddings)

    def _embeddings(self, given: Any, prompt: int) -> tuple[tuple[int, Tensor], ...]:
        spans = checked_embeddings(given, prompt, self._embedding_size, self._embedding_dtype)
        return tuple((place, values.pin_memory()) for place, values in spans) if self._pinned else spans

    def _given(self, draft_ids: Any, drafts: int) -> tuple[int, ...]:
        """The text that a request expects, if it can be of use."""
        given, most = checked_ids("draft_ids", draft_ids, self._limits.num_tokens), self._limits.max_length
        if not self._takes_draft_ids:
            who = "Engine(draft='ngram') does, or EngineConfig(look_up=3) beside a draft model"
            raise ValueError(f"draft_ids: got {len(given)} tokens, want None: the engine drafts from no text; {who}")
        if not drafts:
            raise ValueError(f"draft_ids: got {len(given)} tokens with num_speculative_tokens=0, want None")
        if len(given) > most:
            raise ValueError(f"draft_ids: got {len(given)} tokens, want at most max_length={most}")
        return given

    def _stops(self, extra: Sequence[int], ignore_eos: bool) -> tuple[int, ...]:
        """The vocabulary's stop ids, unless they are ignored, and the request's own."""
        stops = tuple(dict.fromkeys([*(() if ignore_eos else self._stop_token_ids), *extra]))
        if len(stops) > self._limits.max_stop_ids:
            raise ValueError(
                f"sampling.stop_token_ids: got {len(stops)} with the vocabulary's own, want at most {self._limits.max_stop_ids}"
            )
        return stops
