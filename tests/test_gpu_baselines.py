"""The hand-written loop says what the engine says, token for token: it is a fair thing to be measured against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepgraph.graphs import Backend, TapeBackend
from stepgraph.runtime import Engine, EngineConfig
from tests.toy_engines import CONSTRAINTS, DRAFTERS, TARGET, VOCABULARY, Setup, compiled, shared_engine
from tools.baselines.three_graphs import Row, Sizes, ThreeGraphs
from tools.checks.shapes import TINY, pair_of

PROMPTS = [[7, 3, 1], [9], [40 + place for place in range(17)], [12, 12, 3, 90], [60, 61], [5, 4, 3, 2, 1]]


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = TapeBackend()
    yield made
    made.close()


def told_by_loop(loop: ThreeGraphs, asked: list[tuple[list[int], Any]], max_new_tokens: int) -> list[tuple[list[int], str]]:
    """Rows are filled as they come free, so that texts of all ages decode together."""
    rows: list[Row] = []
    waiting = list(asked)
    while waiting or any(loop.rows):
        while waiting and None in loop.rows:
            prompt, constraint = waiting.pop(0)
            rows.append(loop.admit(prompt, compiled(constraint), max_new_tokens))
        loop.step()
    return [(row.tokens, row.reason) for row in rows]


@pytest.mark.parametrize(("k", "drafter"), [(0, "fair"), (3, "perfect"), (3, "half"), (4, "illegal")])
def test_it_says_what_the_engine_says(backend: Backend, k: int, drafter: str) -> None:
    asked = list(zip(PROMPTS + PROMPTS[:2], itertools.cycle(CONSTRAINTS), strict=False))
    draft: Any = DRAFTERS[drafter]() if k else None
    loop = ThreeGraphs(backend, TARGET, draft, VOCABULARY, Sizes(3, k, 96))
    found = told_by_loop(loop, asked, 12)
    engine = shared_engine(Setup(k=k, drafter=drafter, draft_masks=False, eager=True))
    before = engine.stats().accepted_drafts
    jobs = [engine.submit(prompt, constraint=constraint, max_new_tokens=12) for prompt, constraint in asked]
    for _ in engine.stream():
        pass
    assert found == [(job.tokens, job.finish_reason) for job in jobs]
    assert loop.accepted == engine.stats().accepted_drafts - before, "the same drafts are proposed, in the same places"
    assert {reason for _, reason in found} >= {"constraint_complete", "length"}
    assert loop.waits >= backend.stats.replays / max(1, k), "the host waits after the target, and again after the drafts"


@torch.no_grad()
def test_with_a_llama_and_an_eagle_head_it_says_what_the_engine_says(backend: Backend) -> None:
    pair = pair_of(TINY, torch.device("cpu"))
    loop = ThreeGraphs(backend, pair.target, pair.draft, pair.vocabulary, Sizes(2, 3, 96))
    found = told_by_loop(loop, [(prompt, None) for prompt in PROMPTS], 24)
    config = EngineConfig(max_rows=2, num_speculative_tokens=3, max_length=96, buckets=(2,), greedy_only=True, eager=True)
    with Engine(pair.target, pair.draft, vocabulary=pair.vocabulary, config=config) as engine:
        engine.capture()
        jobs = [engine.submit(prompt, max_new_tokens=24) for prompt in PROMPTS]
        for _ in engine.stream():
            pass
        accepted = engine.stats().accepted_drafts
    assert found == [(job.tokens, job.finish_reason) for job in jobs]
    assert loop.accepted == accepted > 0
