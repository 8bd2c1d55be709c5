"""Rotary embeddings against multiplication of complex numbers, and the cache that rotated keys and values are written to."""

from __future__ import annotations

import pytest
import torch

from stepgraph.graphs.layers.slot_mapping import rope_and_write_kv, rope_angles, rotate
from stepgraph.runtime.models.llama_config import RopeConfig

TOKENS, HEADS, KV_HEADS, SIZE = 5, 4, 2, 12
POSITIONS = torch.tensor([0, 1, 30, 4000, 7])


def turns(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_angles(POSITIONS, RopeConfig().frequencies(SIZE), dtype)


def mixed(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parts of one product, as in a layer."""
    states = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    return list(states.split([HEADS, KV_HEADS, KV_HEADS], 1))


def test_pairs_are_rotated_by_their_angles() -> None:
    query = mixed()[0]
    real, imaginary = query.double().chunk(2, -1)
    rotated = torch.complex(real, imaginary) * torch.polar(
        torch.tensor(1.0).double(), POSITIONS[:, None, None] * RopeConfig().frequencies(SIZE).double()
    )
    expected = torch.cat([rotated.real, rotated.imag], -1)
    torch.testing.assert_close(rotate(query, *turns()).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_written_to_their_slots(dtype: torch.dtype) -> None:
    query, key, value = mixed(dtype)
    keys, values = (torch.full((9, KV_HEADS, SIZE), torch.nan, dtype=dtype) for _ in range(2))
    slots = torch.tensor([8, 3, 1, 5, 0])
    found = rope_and_write_kv(query, key, value, *turns(dtype), slots, keys, values)
    assert torch.equal(found, rotate(query, *turns(dtype))) and found.is_contiguous()
    assert torch.equal(keys[slots], rotate(key, *turns(dtype))) and torch.equal(values[slots], value)
    others = [slot for slot in range(9) if slot not in slots.tolist()]
    assert bool(keys[others].isnan().all() & values[others].isnan().all())


def test_arguments_of_wrong_shapes_are_refused() -> None:
    query, key, value = mixed()
    keys = torch.zeros(9, KV_HEADS, SIZE)
    slots = torch.arange(TOKENS)
    with pytest.raises(AssertionError, match="keys"):
        rope_and_write_kv(query, key[:, :1], value[:, :1], *turns(), slots, keys, keys.clone())
    with pytest.raises(AssertionError, match="values"):
        rope_and_write_kv(query, key, value, *turns(), slots, keys, keys[:8].clone())
    with pytest.raises(AssertionError, match="slots"):
        rope_and_write_kv(query, key, value, *turns(), slots[:3], keys, keys.clone())
    with pytest.raises(AssertionError, match="bfloat16"):
        rope_and_write_kv(query, key, value, *turns(torch.bfloat16), slots, keys, keys.clone())
