"""Llama in the engine: texts equal greedy decoding by `transformers` without a cache, for any draft and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepgraph import Engine, EngineConfig
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.llama import Llama
from stepgraph.sampling.native import why_not
from tests.helpers.families import folder_of
from tests.helpers.family_texts import CONFIG, CONSTRAINTS, PROMPTS, decode, plain


class DraftLlama(Llama):
    """The target's weights plus noise: accepted often, rejected often, with its own cache."""

    d2t = None

    def __init__(self, target: Llama, noise: float) -> None:
        super().__init__(target.config, name="draft")
        made = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for mine, its in zip(self.parameters(), target.parameters(), strict=True):
                mine.copy_(its + noise * its.std(correction=0) * torch.randn(its.shape, generator=made))


def make_engine(family: str, k: int, noise: float = 0.1, **changes: Any) -> Engine:
    checkpoint = open_checkpoint(folder_of(family))
    target = checkpoint.load("cpu")
    config = EngineConfig(**{**vars(CONFIG), "num_speculative_tokens": k, "draft_length": k, **changes})
    draft = DraftLlama(target, noise) if k else None
    return Engine(target, draft, vocabulary=checkpoint.vocabulary, config=config)


@pytest.mark.parametrize(
    ("family", "k"),
    [
        *(("smollm2", 0), ("mistral", 3), ("qwen3", 1), ("gpt-oss", 3)),
        *(pytest.param(family, 3, marks=pytest.mark.slow) for family in ("phi-4-mini", "gemma-3", "qwen3-moe")),
        pytest.param("mixtral", 1, marks=pytest.mark.slow),
        pytest.param("glm-4.5", 2, marks=pytest.mark.slow),
        ("deepseek-v3", 3),
        pytest.param("deepseek-v3, queries of the hidden state", 1, marks=pytest.mark.slow),
    ],
)
def test_texts_equal_plain_greedy_decoding(family: str, k: int) -> None:
    with make_engine(family, k, noise=0.02, greedy_only=True) as engine:
        accepted = 0
        for constraint in CONSTRAINTS:
            for prompt, job in zip(PROMPTS, decode(engine, PROMPTS, constraint), strict=True):
                expected = plain(family, tuple(prompt), constraint, 24, tuple(job.tokens))
                assert (job.tokens, str(job.finish_reason)) == expected, (prompt, constraint)
                accepted += job.num_accepted_drafts
    assert k == 0 or accepted > 20, "the draft is often right"


@pytest.mark.parametrize("k", [0, 3])
def test_bits_are_independent_of_batch_rows_and_buckets(k: int) -> None:
    """Log-probabilities are compared exactly."""
    with make_engine("smollm2", k) as engine:
        alone = [decode(engine, [prompt], logprobs=True)[0] for prompt in PROMPTS]
        together = decode(engine, PROMPTS, logprobs=True)
        backwards = decode(engine, PROMPTS[::-1], logprobs=True)[::-1]
        for one, two, three in zip(alone, together, backwards, strict=True):
            assert one.tokens == two.tokens == three.tokens
            assert one.logprobs == two.logprobs == three.logprobs and len(one.logprobs) == len(one.tokens)


def test_bfloat16_texts_are_independent_of_the_batch() -> None:
    checkpoint = open_checkpoint(folder_of("qwen3"), torch.bfloat16)
    with Engine(checkpoint.load("cpu"), vocabulary=checkpoint.vocabulary, config=CONFIG) as engine:
        together = decode(engine, PROMPTS, logprobs=True)
        alone = [decode(engine, [prompt], logprobs=True)[0] for prompt in PROMPTS]
        assert [(job.tokens, job.logprobs) for job in alone] == [(job.tokens, job.logprobs) for job in together]


def test_from_pretrained_decodes() -> None:
    with Engine.from_pretrained(folder_of("llama-2"), config=CONFIG) as engine:
        notes = engine.notes
        assert (f"attention: reference; no native: {why_not()}" if why_not() else "attention: native") in ";".join(notes)
        job = engine.generate(PROMPTS[0], max_new_tokens=24)
        assert job.tokens == plain("llama-2", tuple(PROMPTS[0]), None, 24, tuple(job.tokens))[0]
    with Engine.from_pretrained(folder_of("llama-2"), None, config=EngineConfig(num_speculative_tokens=2, max_length=64)) as engine:
        assert engine.config.num_speculative_tokens == 0
