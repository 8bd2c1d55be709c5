"""Texts in bfloat16, the type of most checkpoints: drafts change no token, and tokens that differ from transformers are near ties."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from stepgraph import Constraint, Engine, EngineConfig, Job
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.transformers_folder import Implementation
from tests.helpers.families import folder_of, hf_model
from tests.helpers.family_texts import CONFIG, CONSTRAINTS, PROMPTS, decode, plain
from tests.runtime.models.test_llama_engine import DraftLlama

# In standard deviations of the logits: bfloat16 errors of these models are 0.01 to 0.02, larger where a token takes other experts.
NEAR = {"smollm2": 0.1, "qwen3": 0.1, "qwen3-moe": 0.2}
HALF = torch.bfloat16


@functools.cache
def texts(family: str, k: int, implementation: Implementation = "native") -> list[tuple[list[int], Constraint | None, Job]]:
    """Jobs for each prompt under each constraint, with k drafts per round of a model whose drafts are often accepted."""
    path = folder_of(family, HALF)
    draft: Any = DraftLlama(open_checkpoint(path).load("cpu"), 0.02).to(HALF) if k else None
    config = EngineConfig(**{**vars(CONFIG), "num_speculative_tokens": k, "draft_length": k, "eager": True})
    found = list[tuple[list[int], Constraint | None, Job]]()
    with Engine.from_pretrained(path, draft, config=config, implementation=implementation) as engine:
        kinds = {parameter.dtype for parameter in engine._parts.models.target.parameters()}  # type: ignore[attr-defined]
        assert kinds == ({HALF, torch.float32} if family == "deepseek-v3" else {HALF}), "sigmoid routers stay in float32"
        for constraint in CONSTRAINTS:
            found += [
                (prompt, constraint, job) for prompt, job in zip(PROMPTS, decode(engine, PROMPTS, constraint, logprobs=True), strict=True)
            ]
    return found


NATIVE = (
    "smollm2",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3-moe", "deepseek-v3")),
    *(pytest.param(family, marks=pytest.mark.soak) for family in ("mistral", "qwen3", "gemma-3")),
)


@pytest.mark.parametrize("family", NATIVE)
def test_drafts_change_no_bit_of_a_native_class(family: str) -> None:
    require_equal_bits(family, "native")


def test_drafts_change_no_bit_of_a_class_of_transformers() -> None:
    require_equal_bits("smollm2", "transformers")


def require_equal_bits(family: str, implementation: Implementation) -> None:
    accepted = 0
    for (prompt, constraint, job), (_, _, drafted) in zip(texts(family, 0, implementation), texts(family, 3, implementation), strict=True):
        assert (drafted.tokens, drafted.finish_reason) == (job.tokens, job.finish_reason), (prompt, constraint)
        assert drafted.logprobs == job.logprobs
        accepted += drafted.num_accepted_drafts
    assert accepted > 50, "the draft is often right"


def gap(family: str, prompt: list[int], text: list[int], other: list[int]) -> float:
    """Logit difference of the first two unequal tokens, by the same weights in float32, in standard deviations; 0 for equal texts."""
    index = next((index for index, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
    if index is None:
        assert len(text) == len(other), "one text is longer than the other"
        return 0.0
    with torch.no_grad():
        logits = exact(family)(torch.tensor([[*prompt, *text[:index]]])).logits[0, -1]
    return float((logits[text[index]] - logits[other[index]]).abs() / logits.std())


@functools.cache
def exact(family: str) -> Any:
    return copy.deepcopy(hf_model(family, HALF)).float()


@pytest.mark.parametrize("family", ["smollm2", *(pytest.param(family, marks=pytest.mark.slow) for family in NEAR if family != "smollm2")])
def test_each_difference_to_transformers_is_a_near_tie(family: str) -> None:
    """Texts with drafts, compared with decoding by transformers in bfloat16 without a cache, which sums products in another order."""
    gaps = []
    for prompt, constraint, job in texts(family, 3):
        gaps.append(gap(family, prompt, job.tokens, plain(family, tuple(prompt), constraint, 24, tuple(job.tokens), HALF)[0]))
    assert max(gaps) < NEAR[family], gaps
    assert family == "smollm2" or 1 <= sum(map(bool, gaps)) <= 8, f"of {len(gaps)}"


def test_a_wrong_token_is_no_near_tie() -> None:
    """The second choice of the float32 model at some position of each free text."""
    gaps = []
    for prompt, constraint, job in texts("smollm2", 3):
        if constraint is None:
            place = len(job.tokens) // 2
            with torch.no_grad():
                second = int(exact("smollm2")(torch.tensor([[*prompt, *job.tokens[:place]]])).logits[0, -1].topk(2).indices[1])
            gaps.append(gap("smollm2", prompt, job.tokens, [*job.tokens[:place], second, *job.tokens[place + 1 :]]))
    assert max(gaps) > NEAR["smollm2"] and sorted(gaps)[len(gaps) // 2] > NEAR["smollm2"], gaps
