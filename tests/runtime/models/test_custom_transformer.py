"""The transformer of docs/own-model.md: its tokens equal those of dense attention over the whole text, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from stepgraph import Engine, EngineConfig
from tests.helpers.documents import block_with

WINDOWS = (None, 5)


@pytest.fixture(scope="module")
def target() -> Any:
    """The class from the documentation, with weights under which the logits depend on the text."""
    snippet, namespace = block_with("class Transformer"), {"__name__": "readme"}
    exec(snippet[: snippet.index("\n\nengine =")], namespace)
    torch.manual_seed(3)
    model: Any = namespace["Transformer"](windows=WINDOWS)  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4 if name.startswith(("blocks", "mlps")) else 0.5)
    return model


@torch.no_grad()
def plain(target: Any, prompt: Sequence[int], count: int) -> list[int]:
    model, tokens = copy.deepcopy(target).double(), list[int]()
    while len(tokens) < count:
        ids = torch.tensor([*prompt, *tokens])
        index = torch.arange(len(ids))
        states = model.embedding(ids) + model.positions(index)
        for (norm, project, out), mlp, window in zip(model.blocks, model.mlps, WINDOWS, strict=True):
            query, key, value = project(norm(states)).unflatten(-1, (3, model.heads, -1)).permute(1, 2, 0, 3)
            distance = index[:, None] - index
            seen = (distance >= 0) & (distance < (window or len(ids)))
            states = states + out(scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(0, 1).flatten(1))
            states = states + mlp(states)
        tokens.append(int((states[-1] @ model.embedding.weight.T).argmax()))
    return tokens


@pytest.mark.parametrize(("drafts", "forward_in_inference_mode"), [(0, False), (3, False), (3, True)])
def test_tokens_equal_those_of_dense_attention(
    target: Any, drafts: int, forward_in_inference_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forward_in_inference_mode:
        monkeypatch.setattr(target, "forward", torch.inference_mode()(target.forward))
    config = EngineConfig(max_rows=3, num_speculative_tokens=drafts, max_length=128, page_size=8, prefill_chunk=16)
    prompts = [[1, 2, 3], [*range(10, 50)], [7] * 9, [9]]
    with Engine(target, "ngram" if drafts else None, config=config) as engine:
        jobs = engine.generate(prompts, max_new_tokens=24)
        assert engine.stats().drafts.accepted > 0 or not drafts
    assert [job.tokens for job in jobs] == [plain(target, prompt, 24) for prompt in prompts]
    assert len({*jobs[1].tokens}) > 3


@pytest.mark.slow  # imports the compiler
@pytest.mark.parametrize("eager", [False, True])
def test_a_compiled_target(target: Any, eager: bool) -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=3, max_length=128, page_size=8, prefill_chunk=16, eager=eager)
    compiled: Any = torch.compile(target, backend="aot_eager")
    with Engine(compiled, "ngram", config=config) as engine:
        assert engine.generate([*range(10, 50)], max_new_tokens=12).tokens == plain(target, [*range(10, 50)], 12)


def test_new_weights_with_a_new_cache_salt(target: Any) -> None:
    model, new, prompt = copy.deepcopy(target), copy.deepcopy(target), [*range(10, 50)]
    with torch.no_grad():
        new.embedding.weight.copy_(new.embedding.weight.flip(0))
    with Engine(model, config=EngineConfig(max_rows=1, max_length=128, page_size=8)) as engine:
        assert engine.generate(prompt, max_new_tokens=9).tokens == plain(target, prompt, 9) != plain(new, prompt, 9)
        model.load_state_dict(new.state_dict())
        job = engine.generate(prompt, max_new_tokens=9, cache_salt="2")
    assert job.tokens == plain(new, prompt, 9) and job.num_cached_tokens == 0
