"""Recorded chunks of prompts fill the caches as chunks that run eagerly do."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from stepgraph import Engine
from stepgraph.graphs import TapeBackend
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.prefill import PromptKey, prompt_keys
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.request import Job
from tests.helpers.toy_engines import TARGET, finish
from tools.gpu.checks.context import VOCABULARY
from tools.gpu.checks.engines import CONFIG, drafters_of

CHUNKS = replace(CONFIG, prefill_chunk=128, max_length=320, greedy_only=True, prompt_graphs=True)
LENGTHS = (1, 2, 33, 150, 290)  # 1: only the draft model has a chunk; 33: one of 32 tokens; 150: chunks of both graphs
MODELS = [each for each in drafters_of(torch.device("cpu")) if hasattr(each[2], "forward") and "look" not in each[0]]


def serve(target: Any, drafter: Drafter | str, **changes: Any) -> tuple[list[Job], dict[str, torch.Tensor], list[PromptKey]]:
    """The jobs of two rows, one of which decodes between the chunks of the other; then every cache without its scratch page."""
    draw = Random(4)
    prompts = [[draw.randrange(90) for _ in range(length)] for length in LENGTHS]
    prompts.append([*prompts[-1][:250], 7, 8])  # begins with shared pages
    spans = {}
    if hasattr(target, "embedding_size"):
        spans = {120: torch.randn(20, target.embedding_size, dtype=target.feature_dtype, generator=torch.Generator().manual_seed(1))}
    with Engine(target, drafter, vocabulary=VOCABULARY, config=replace(CHUNKS, **changes), backend=TapeBackend(poison="every")) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
        jobs.append(engine.submit(prompts[3], max_new_tokens=9, prompt_embeddings=spans or None))
        finish(engine)
        page = engine.limits.page_size
        caches = {name: tensor.clone() for name, tensor in cached(engine).items()}
        caches = {name: tensor[:, page:] if tensor.dim() > 1 else tensor[page:] for name, tensor in caches.items()}
        assert engine.stats().reused_tokens or engine.stats().prompt_tokens == sum(LENGTHS)
        return jobs, caches, [key for key in engine._graphs._recorded if isinstance(key, PromptKey)]


def cached(engine: Engine) -> dict[str, torch.Tensor]:
    models = engine._parts.models
    specs = [spec for model in (models.target, models.draft) if model is not None for spec in model.cache_specs(engine.limits)]
    return {spec.name: engine.buffers[spec.name] for spec in specs}


@pytest.mark.parametrize(("target", "drafter", "changes"), [each[1:] for each in MODELS], ids=[each[0] for each in MODELS])
def test_recorded_chunks_give_the_tokens_and_caches_of_eager_ones(target: Any, drafter: Any, changes: dict[str, Any]) -> None:
    jobs, caches, keys = serve(target, drafter, **changes)
    expected_jobs, expected, none = serve(target, drafter, prompt_graphs=False, **changes)
    assert sorted(key.tokens for key in keys) == [32, 128] and not none
    assert [job.tokens for job in jobs] == [job.tokens for job in expected_jobs]
    assert [job.num_cached_tokens for job in jobs] == [job.num_cached_tokens for job in expected_jobs] and jobs[5].num_cached_tokens > 200
    for name, cache in caches.items():
        assert bool(cache.any()) == bool(cache.numel()) and torch.equal(cache, expected[name]), name


def test_chunks_are_captured_with_the_rounds_and_listed_in_the_report() -> None:
    config = replace(CHUNKS, max_rows=1, buckets=(1,))
    with Engine(TARGET, "none", vocabulary=None, config=config) as engine:
        report = engine.capture()
        assert [str(key) for key, _ in report.prompts] == ["prompt tokens=128", "prompt tokens=32"]
        prompts: Any = report.as_dict()["prompts"]
        assert (
            "prompt tokens=128" in str(report)
            and len(prompts) == 2
            and all("stages" in row and "graph_nodes" not in row for row in prompts)
        )
        job = engine.submit(list(range(60)), max_new_tokens=3)
        finish(engine)
        step = engine._graphs.step(PromptKey(32))

        def between() -> None:
            engine.buffers.prompt.fill_(1)

        engine.backend.capture(step, engine.buffers, check="twice", between=between)
        assert len(job.tokens) == 3 and engine.stats().replays == engine.stats().rounds, "chunks do not count as rounds"


def test_a_whole_chunk_and_quarters_of_it_have_graphs() -> None:
    def tokens(chunk: int) -> list[int]:
        return [key.tokens for key in prompt_keys(Limits(1, 0, 64, 8, 8, 50, 50, 0, prefill_chunk=chunk))]

    assert [tokens(chunk) for chunk in (1, 127, 128, 2048)] == [[2], [127], [128, 32], [2048, 512, 128, 32]]
