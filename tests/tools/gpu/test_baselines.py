"""The baselines give the tokens of the engine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
from stepgraph.graphs import Backend, TapeBackend
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tests.helpers.toy_engines import CONSTRAINTS, CONTROL, VOCABULARY, FixedDraft, compiled, finish
from tools.gpu.baselines.three_graphs import Row, Sizes, ThreeGraphs
from tools.gpu.baselines.transformers_generate import Timed, not_available, same_weights, small_assistant
from tools.gpu.checks import others
from tools.gpu.checks.context import Context
from tools.gpu.checks.shapes import TINY, pair_of

TARGET = ToyTarget(VOCABULARY.logits_width, seed=3)  # long texts
PROMPTS = [[7, 3, 1], [9], [40 + index for index in range(17)], [12, 12, 3, 90], [60, 61], [5, 4, 3, 2, 1]]


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = TapeBackend()
    yield made
    made.close()


def decode_in_loop(loop: ThreeGraphs, requested: list[tuple[list[int], Any]], max_new_tokens: int) -> list[tuple[list[int], str]]:
    """Admits a request whenever a row is free, so that texts of different lengths decode together."""
    rows: list[Row] = []
    waiting = list(requested)
    while waiting or any(loop.rows):
        while waiting and None in loop.rows:
            prompt, constraint = waiting.pop(0)
            rows.append(loop.admit(prompt, compiled(constraint), max_new_tokens))
        loop.step()
    return [(row.tokens, row.reason) for row in rows]


DRAFTS: dict[str, ToyDraft] = {
    "perfect": ToyDraft(TARGET, 1.0),
    "half": ToyDraft(TARGET, 0.8, d2t=[*range(CONTROL, -1, -2)]),
    "illegal": FixedDraft(TARGET, CONTROL),
}


@pytest.mark.parametrize(("k", "drafter"), [(0, ""), (3, "perfect"), (3, "half"), (4, "illegal")])
def test_tokens_equal_those_of_the_engine(backend: Backend, k: int, drafter: str) -> None:
    """Acceptance is equal too, since the drafts are the same."""
    requested: list[tuple[list[int], Constraint | None]] = [(prompt, None) for prompt in PROMPTS[:3]]
    requested += [*zip(PROMPTS[::-1], CONSTRAINTS[1:], strict=False)]
    loop = ThreeGraphs(backend, TARGET, DRAFTS.get(drafter), VOCABULARY, Sizes(3, k, 96))
    found = decode_in_loop(loop, requested, 14)
    config = EngineConfig(
        num_speculative_tokens=k, draft_length=k, max_rows=4, max_length=96, draft_masks=False, greedy_only=True, eager=True
    )
    with Engine(TARGET, DRAFTS.get(drafter), vocabulary=VOCABULARY, config=replace(config, compile_isolation="none")) as engine:
        engine.capture()
        jobs = [engine.submit(prompt, constraint=constraint, max_new_tokens=14) for prompt, constraint in requested]
        finish(engine)
        accepted = engine.stats().drafts.accepted
    assert found == [(job.tokens, job.finish_reason) for job in jobs]
    assert {reason for _, reason in found} >= {"constraint_complete", "length"}
    assert loop.accepted == accepted
    assert (accepted > 20) == (drafter == "perfect")
    assert loop.waits >= backend.stats.replays / max(1, k), "the host waits after the target, and again after the drafts"


@torch.no_grad()
def test_llama_and_eagle3_tokens_equal_those_of_the_engine(backend: Backend) -> None:
    pair = pair_of(TINY, torch.device("cpu"))
    loop = ThreeGraphs(backend, pair.target, pair.draft, pair.vocabulary, Sizes(2, 3, 96))
    found = decode_in_loop(loop, [(prompt, None) for prompt in PROMPTS], 24)
    config = EngineConfig(max_rows=2, num_speculative_tokens=3, draft_length=3, max_length=96, buckets=(2,), greedy_only=True, eager=True)
    with Engine(pair.target, pair.draft, vocabulary=pair.vocabulary, config=config) as engine:
        engine.capture()
        jobs = [engine.submit(prompt, max_new_tokens=24) for prompt in PROMPTS]
        finish(engine)
        accepted = engine.stats().drafts.accepted
    assert found == [(job.tokens, job.finish_reason) for job in jobs]
    assert loop.accepted == accepted > 0


@torch.no_grad()
def test_transformers_gives_the_tokens_of_the_engine() -> None:
    """Same weights in float32, with a random assistant and with xgrammar's processor."""
    unpadded = replace(TINY, target=replace(TINY.target, vocab_size=len(Vocabulary.printable().tokens)))
    pair, schema = pair_of(unpadded, torch.device("cpu")), {"type": "array", "items": {"type": "boolean"}, "minItems": 4}
    generator = same_weights(pair.target, pair.vocabulary)
    grammar, constraint = generator.compile(json.dumps(schema)), Constraint.json_schema(schema)
    config = EngineConfig(num_speculative_tokens=0, max_rows=2, max_length=64, greedy_only=True, eager=True, compile_isolation="none")
    with Engine(pair.target, vocabulary=pair.vocabulary, config=config) as engine:
        engine.capture()
        free, constrained = (
            engine.generate(PROMPTS[0], max_new_tokens=12),
            engine.generate(PROMPTS[0], constraint=constraint, max_new_tokens=12),
        )
    assistant = small_assistant(pair.target, pair.vocabulary)
    for mode in ("dynamic", "static", "assisted"):
        assert generator.generate(PROMPTS[0], 12, mode=mode, assistant=assistant).tokens == free.tokens, mode
    assert generator.generate(PROMPTS[0], 12, grammar, "static").tokens[: len(constrained.tokens)] == constrained.tokens
    with pytest.raises(ValueError, match=r"generate.mode: got 'fast', expected one of dynamic, static, compiled, assisted"):
        generator.generate(PROMPTS[0], 12, mode="fast")


@pytest.mark.parametrize(("assistant", "micros"), [(None, 4.0), (object(), 3.0)])
def test_time_per_token_counts_the_tokens_of_the_time(assistant: Any, micros: float) -> None:
    generator: Any = SimpleNamespace(generate=lambda *arguments, **options: Timed([1, 2, 3, 4], 0.0, 12e-6))
    context = Context(rehearsal=True, quick=True)
    assert others._per_token(context, generator, pair_of(TINY, torch.device("cpu")), "", None, assistant, 1) == pytest.approx(micros)


@pytest.mark.soak
@torch.no_grad()
def test_compiled_transformers_gives_the_same_tokens() -> None:
    """Inductor takes most of a minute; the GPU checks make the same call."""
    pair = pair_of(TINY, torch.device("cpu"))
    generator = same_weights(pair.target, pair.vocabulary)
    compiled_, static = (generator.generate(PROMPTS[0], 12, mode=mode, stops=False).tokens for mode in ("compiled", "static"))
    assert compiled_ == static
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"


def test_missing_package_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_available() == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else name)
    assert not_available() == "not available: transformers not installed; pip install transformers"
