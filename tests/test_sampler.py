"""Distributions against a float64 oracle in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph.sampling import sampler
from tests.oracles import filtered


def params(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    return torch.tensor([[temperature, top_k, top_p, min_p]])


values = st.integers(-40, 40).map(lambda value: value / 8)  # few, so that ties are common


@settings(max_examples=400)
@given(
    logits=st.lists(st.one_of(values, st.just(-math.inf)), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_distribution_equals_the_oracle(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    result = sampler.distribution(torch.tensor([[logits]]), params(temperature, top_k, top_p, min_p))[0, 0]
    expected = filtered(logits, temperature, top_k, top_p, min_p)
    assert torch.allclose(result.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("width", [131_071, 151_936])
def test_distribution_of_a_large_vocabulary(width: int) -> None:
    logits = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 0, -100:] = -math.inf
    for row in (params(0.8, 50, 0.9, 0.01), params(1.0), params(0.0)):
        result = sampler.distribution(logits, row)[0, 0]
        expected = torch.tensor(filtered(logits[0, 0].tolist(), *row[0].tolist()), dtype=torch.float64)
        assert torch.allclose(result.double(), expected, atol=1e-6)
        assert float(result[-100:].sum()) == 0


def test_rows_keep_their_own_settings_and_a_dead_row_gives_nothing() -> None:
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(2))
    logits[1] = -math.inf
    rows = torch.cat([params(0.5, 3), params(1.0), params(0.0)])
    together = sampler.distribution(logits, rows)
    for row in range(3):
        assert torch.equal(together[row], sampler.distribution(logits[row : row + 1], rows[row : row + 1])[0])
    assert float(together[1].sum()) == 0
    assert torch.equal(together[2].argmax(-1), logits[2].argmax(-1)) and together[2].sum(-1).tolist() == [1.0, 1.0]
