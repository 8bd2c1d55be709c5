"""The Llama family compared with `transformers`, and with itself for other chunkings and batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stepgraph.runtime.models.llama import Llama
from tests.helpers.families import FAMILIES, FEATURE_LAYERS, LENGTH, VOCABULARY, CachedModel, hf_model, load


def texts(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_equal_transformers(family: str) -> None:
    tokens, cached = texts(), CachedModel(load(family))
    logits, features = cached.run(tokens, 0, LENGTH)
    with torch.no_grad():
        answer = hf_model(family)(tokens, output_hidden_states=True)
    assert relative(logits, answer.logits) < 1e-4
    assert relative(features, torch.cat([answer.hidden_states[layer] for layer in FEATURE_LAYERS], -1)) < 1e-4


def in_half(family: str, lean: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Our logits, those of transformers, and those of transformers in float32."""
    tokens, cached = torch.cat([texts(seed) for seed in range(2)]), CachedModel(load(family, dtype, lean))
    ours = torch.cat([cached.run(pair, 0, LENGTH)[0] for pair in tokens.split(2)]).float()
    with torch.no_grad():
        return ours, hf_model(family, dtype, lean)(tokens).logits.float(), hf_model(family, lean=lean)(tokens).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_choices_equal_transformers(family: str) -> None:
    """On 99.5% of all positions; elsewhere both choices are near ties for the float32 model."""
    ours, theirs, exact = in_half(family, lean=True)
    chosen, expected = ours.argmax(-1), theirs.argmax(-1)
    different = chosen != expected
    assert float(different.float().mean()) <= 0.005
    gaps = (exact.gather(2, chosen[..., None]) - exact.gather(2, expected[..., None]))[different].abs()
    assert bool((gaps < 0.1 * exact.std()).all()), gaps


@pytest.mark.parametrize(("family", "dtype"), [*((family, torch.bfloat16) for family in FAMILIES), ("llama-3.1", torch.float16)])
def test_half_precision_is_as_close_to_float32_as_transformers_is(family: str, dtype: torch.dtype) -> None:
    """With experts, the medians over all positions are compared: tokens that take other experts have far larger errors."""
    ours, theirs, exact = in_half(family, False, dtype)
    errors, expected = (((each - exact).pow(2).mean(-1)) for each in (ours, theirs))
    typical = torch.mean if load(family, dtype).config.experts is None else torch.median
    assert typical(errors) <= 1.2 * typical(expected)


HALF = ("smollm2", "mistral", "qwen3", "qwen3-moe")


@pytest.mark.parametrize(("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), *((f, torch.bfloat16) for f in HALF)])
def test_bits_are_independent_of_chunking_and_batch(family: str, dtype: torch.dtype) -> None:
    tokens, cached = texts()[:, :60], CachedModel(load(family, dtype))
    whole, _ = cached.run(tokens, 0, 60)
    assert torch.isfinite(whole).all()
    for size in (17, 1):
        cached.buffers.reset()
        assert torch.equal(cached.in_chunks(tokens, size), whole)
    cached.buffers.reset()
    assert torch.equal(cached.in_chunks(tokens[:1], 16), whole[:1]), "alone"


def test_frequencies_survive_a_change_of_precision() -> None:
    """A module that is moved to bfloat16 rounds all its floating point buffers."""
    model = load("llama-3.1")
    before = model.frequency_bits.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.frequency_bits, before)


def test_attention_window_limits_the_reach() -> None:
    """A token beyond the reach of all layers changes nothing, one inside does."""
    tokens, cached = texts()[:1, :100], CachedModel(load("mistral"))
    whole, _ = cached.run(tokens, 0, 100)
    for position, same in ((99 - 4 * 15 - 1, True), (99 - 15, False)):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % VOCABULARY
        assert torch.equal(cached.run(changed, 0, 100)[0][0, 99], whole[0, 99]) == same


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_have_the_names_of_all_linear_modules(family: str) -> None:
    """In layers with experts only attention has adapters: routers and expert weights are not linear modules."""
    named = {name: child.out_features for name, child in hf_model(family).named_modules() if isinstance(child, nn.Linear)}
    adapted = {name: size for weight in load(family).lora_weights.values() for name, size in weight.parts.items()}
    assert adapted == {name: size for name, size in named.items() if name != "lm_head"}


def test_max_length_beyond_the_models_positions_is_refused() -> None:
    model = load("llama-2")
    with pytest.raises(ValueError, match=r"EngineConfig\.max_length: got 208, expected at most the 100 positions of the target"):
        CachedModel(Llama(replace(model.config, max_positions=100)))
