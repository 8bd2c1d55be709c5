"""Caches in float8_e4m3fn: entries have torch's bits, attention reads their numbers, engines take half the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.attention.float8 import ENTRIES, from_entries, to_entries
from stepgraph.graphs.attention.reference import by_reference
from stepgraph.graphs.layers.slot_mapping import rope_and_write_kv
from stepgraph.graphs.limits import KvCacheDtype, Limits
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.loading import memory_need
from stepgraph.runtime.models.files.transformers_folder import Implementation, open_target
from stepgraph.runtime.models.toy import ToyTarget
from tests.graphs.attention.test_paged import make_case
from tests.helpers.families import BASE, CONFIG, GRAMMAR, PROMPTS, VOCABULARY, CachedModel, random_model, save
from tests.helpers.torch_threads import without_subnormals

CACHE = torch.empty(0, dtype=ENTRIES)
DTYPES: tuple[KvCacheDtype, ...] = get_args(KvCacheDtype)
FLOAT8: KvCacheDtype = "fp8_e4m3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    """Every bfloat16 value, including infinity and NaN; with float32 also values between two bfloat16 values, such as ties."""
    value = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    value = torch.cat([value, value * 1.0078125 if dtype is torch.float32 else value]).view(-1, 2, 64)
    count = len(value)
    cosines, sines = torch.ones(count, 1, 64, dtype=dtype), torch.zeros(count, 1, 64, dtype=dtype)
    key = value.nan_to_num(0, 0, 0).flip(0)
    keys, values = (torch.zeros(count, 2, 64, dtype=ENTRIES) for _ in range(2))
    rope_and_write_kv(key, key, value, cosines, sines, torch.arange(count), keys, values)
    for found, given in ((keys, key), (values, value)):
        expected = given.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(from_entries(found), expected, rtol=0, atol=0, equal_nan=True)
    assert int(from_entries(values).isnan().sum()) == int(value.isnan().sum()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "window"), [(64, None), (12, 9), (128, 30)])
def test_attention_reads_the_numbers_of_the_entries(size: int, window: int | None, dtype: torch.dtype) -> None:
    """All 256 entries except NaN. The output has the bits that a cache in the model's dtype gives, which holds these values exactly."""
    case = make_case([70, 9, 0, 33], 3, size=size, dtype=dtype)
    codes = torch.arange(case.keys.numel(), dtype=torch.int64) * 37 % 256
    codes = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(case.keys.shape)
    keys, values = (torch.where(given.isnan(), torch.tensor(127, dtype=torch.uint8), codes) for given in case[1:3])
    small, wide = (
        case._replace(keys=keys, values=values),
        case._replace(keys=from_entries(keys).to(dtype), values=from_entries(values).to(dtype)),
    )
    assert torch.isfinite(small.run(window)).all() and torch.equal(small.run(window), wide.run(window))
    with without_subnormals():
        assert torch.equal(small.run(window), wide.run(window))
    referred = [each._replace(inputs=each.inputs._replace(attend=by_reference)).run(window) for each in (small, wide)]
    assert torch.equal(*referred)


class RoundedCache(DynamicCache):
    """The cache of transformers, with keys and values rounded to float8."""

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
        keys, values = (from_entries(to_entries(each, CACHE)) for each in (key_states, value_states))
        return super().update(keys, values, *others, **options)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(implementation: Implementation, tmp_path: Path) -> None:
    """In one piece and in chunks; the logits differ from those without rounding."""
    model, tokens = random_model("Llama", BASE, seed=3), torch.arange(40)[None]
    save(model, tmp_path)
    with torch.no_grad():
        expected, other = model(tokens, past_key_values=RoundedCache()).logits, model(tokens).logits
    target = open_target(tmp_path, torch.float32, implementation=implementation).load("cpu")
    for size in (40, 7):
        found = CachedModel(target, kv_cache_dtype=FLOAT8).in_chunks(tokens, size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert bool(((other - expected).abs().amax(-1) > 0.05).all())


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_drafts_do_not_change_the_texts(implementation: Implementation, tmp_path: Path) -> None:
    """Look-up and a draft model, whose cache is float8 too; with and without a grammar, in a batch."""
    save(random_model("Llama", BASE, seed=3), tmp_path)
    config, found = replace(CONFIG, kv_cache_dtype=FLOAT8), []
    for draft in ("none", "ngram", tmp_path):
        with Engine.from_pretrained(tmp_path, draft, config=config, dtype=torch.float32, implementation=implementation) as engine:
            assert "cache: float8_e4m3fn" in engine.capture().notes
            jobs = [engine.submit(prompt, constraint=each, max_new_tokens=12) for each in (None, GRAMMAR) for prompt in PROMPTS]
            list(engine.stream())
            assert not any(job.error for job in jobs)
            found.append([job.tokens for job in jobs])
    assert found[0] == found[1] == found[2] and max(map(len, found[0])) == 12


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_caches_take_a_byte_for_each_number(implementation: Implementation, tmp_path: Path) -> None:
    """Half the bytes of bfloat16, a quarter of float32."""
    save(random_model("Llama", BASE, seed=3), tmp_path)
    for dtype, times in ((torch.bfloat16, 2), (torch.float32, 4)):
        target = open_target(tmp_path, dtype, implementation=implementation).load("cpu")
        sizes = 2, 4, 64, 8, 16, VOCABULARY, VOCABULARY, target.feature_size
        plain, small = (sum(spec.nbytes for spec in target.cache_specs(Limits(*sizes, kv_cache_dtype=each))) for each in DTYPES)
        assert plain == times * small > 0
    checkpoint = open_checkpoint(tmp_path, torch.bfloat16)
    plain, small = (memory_need("", checkpoint.outline(), Limits(*sizes, kv_cache_dtype=each)).cache for each in DTYPES)
    assert plain - small == sum(spec.nbytes for spec in checkpoint.outline().cache_specs(Limits(*sizes))) // 2


def test_other_types_and_models_with_caches_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.kv_cache_dtype: got 'int8', expected one of 'auto', 'fp8_e4m3'"):
        EngineConfig(kv_cache_dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"EngineConfig.kv_cache_dtype: got 'fp8_e4m3', expected 'auto': the target does not declare its cache"
    ):
        Engine(ToyTarget(VOCABULARY), config=EngineConfig(kv_cache_dtype=FLOAT8))
