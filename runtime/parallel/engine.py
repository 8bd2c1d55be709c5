"""The engine of one rank: before every step the ranks compare what they are about to do and what the step before gave."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.models.files.loading import load_models
from stepgraph.runtime.parallel.llama import shard
from stepgraph.runtime.parallel.ranks import TIMEOUT_SECONDS, Ranks
from stepgraph.runtime.request import Job, StepEvent
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.params import SamplingParams

_REFUSED = {"save_hidden_states": None, "max_loras": 0, "rounds_per_launch": 1}  # with the accepted values
DRAFTERS = ("auto", "ngram", "none")


class ParallelEngine(Engine):
    """Every rank makes the same calls of submit(), cancel() and step() in the same order, each rank in one thread."""

    ranks: Ranks

    def submit(self, *args: Any, **options: Any) -> Job:
        """Waits for the grammar: how long a compile takes differs between ranks, and a step must not depend on it."""
        sampling = options.get("sampling")
        if isinstance(sampling, SamplingParams) and sampling.temperature and sampling.seed is None:
            raise ValueError("SamplingParams.seed: got None with tensor_parallel, expected an integer, the same on every rank")
        if options.get("prompt_embeddings") is not None:
            raise ValueError("prompt_embeddings: got embeddings with tensor_parallel, expected None: ranks do not compare them")
        job = super().submit(*args, **options)
        queued = self.queue.unfinished[job.id]
        while not queued.ready:
            self.queue.wake.wait(0.01)
        said = (job.prompt_ids, job.constraint, job.sampling, job.max_new_tokens, job.num_speculative_tokens, job.stop_ids)
        text = repr((*said, job.draft_ids, job.cache_salt, bool(queued.error)))
        self._said.update(f"submit {text}".encode())
        return job

    def cancel(self, job: Job | int) -> bool:
        found = super().cancel(job)
        self._said.update(f"cancel {found}".encode())
        return found

    def start(self, ranks: Ranks) -> ParallelEngine:
        self.ranks, self._said = ranks, hashlib.sha256()
        ranks.require_equal("the engine configs", repr((self.config, self.limits)).encode())
        return self

    def step(self) -> list[StepEvent]:
        events = super().step()
        for event in events:
            self._said.update(repr((event.tokens, event.finish_reason)).encode())
        return events

    def _admit(self) -> list[StepEvent]:
        self.ranks.require_equal("the requests or the results of the steps before", self._said.digest())
        return super()._admit()


def parallel_config(config: EngineConfig | None) -> EngineConfig | None:
    """With a time limit of rounds, which is also that of sums. ValueError for settings that are not divided among ranks."""
    if config is None:
        return None
    for name, accepted in _REFUSED.items():
        if getattr(config, name) != accepted:
            raise ValueError(f"EngineConfig.{name}: got {getattr(config, name)!r} with tensor_parallel, expected {accepted!r}")
    return replace(config, round_timeout_seconds=config.round_timeout_seconds or TIMEOUT_SECONDS)


def open_parallel(path: str | Path, draft: object, config: EngineConfig | None, size: object, options: dict[str, Any]) -> ParallelEngine:
    """Engine.from_pretrained(tensor_parallel=size) of one rank."""
    if draft is not None and draft not in DRAFTERS:
        names = ", ".join(map(repr, DRAFTERS))
        raise ValueError(f"draft: got {clip_repr(draft)} with tensor_parallel={clip_repr(size)}, expected None or one of {names}")
    backend = "auto" if config is None else config.backend
    if backend == "cuda" or (backend == "auto" and torch.cuda.is_available()):
        raise ValueError(f"EngineConfig.backend: got {backend!r} with tensor_parallel={clip_repr(size)} and a GPU, expected 'tape'")
    config = parallel_config(config)
    ranks = Ranks(size, None if config is None else config.round_timeout_seconds)
    name = "ngram" if draft == "auto" else draft
    loaded = load_models(path, name, config, divide=functools.partial(shard, ranks=ranks), **options)
    fixed = replace(loaded.config, round_timeout_seconds=ranks.seconds)
    if fixed.draft_length == "auto":  # by measured times, which differ between ranks
        fixed = replace(fixed, draft_length=fixed.num_speculative_tokens)
    tokenizer = functools.partial(TextCodec.open, path, loaded.vocabulary)
    engine = ParallelEngine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, tokenizer=tokenizer, config=fixed)
    return engine.start(ranks)
