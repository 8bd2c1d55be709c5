"""Distributions against a float64 oracle in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph.sampling import sampler
from tests.helpers.oracles import filtered


def params(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    return torch.tensor([[temperature, top_k, top_p, min_p]])


def agrees(result: Tensor, logits: list[float], temperature: float, top_k: float, top_p: float, min_p: float) -> bool:
    """Whether a result is the oracle's distribution, with thresholds moved by up to 1e-6, because rounding may move a token across one."""
    for near in (1, 1 - 1e-6, 1 + 1e-6):
        expected = torch.tensor(filtered(logits, temperature, top_k, top_p * near, min_p * near), dtype=torch.float64)
        seen = expected > 1e-30  # not 0
        if torch.equal(result > 1e-30, seen) and torch.allclose(result.double(), expected, rtol=1e-5, atol=0):
            return True
    return False


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
    assert agrees(result, logits, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("width", [131_071, 151_936])
def test_distribution_of_a_large_vocabulary(width: int) -> None:
    logits = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 0, -100:] = -math.inf
    for row in (params(0.8, 50, 0.9, 0.01), params(1.0), params(0.0)):
        result = sampler.distribution(logits, row)[0, 0]
        assert agrees(result, logits[0, 0].tolist(), *row[0].tolist())
        assert float(result[-100:].sum()) == 0


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [
        ([7.0, 3.0, -2.0], 1e-40, [1.0, 0.0, 0.0]),
        ([-3.0, -7.0, -math.inf], 1e-45, [1.0, 0.0, 0.0]),
        ([3e38, 3e38, -3e38], 0.01, [0.5, 0.5, 0.0]),
        ([7.0, -7.0, -math.inf], 3.4e38, [0.5, 0.5, 0.0]),
    ],
)
def test_temperature_that_overflows_float32(logits: list[float], temperature: float, expected: list[float]) -> None:
    assert sampler.distribution(torch.tensor([[logits]]), params(temperature))[0, 0].tolist() == expected


def test_rows_have_their_own_settings_and_dead_rows_are_zero() -> None:
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(2))
    logits[1] = -math.inf
    rows = torch.cat([params(0.5, 3), params(1.0), params(0.0)])
    together = sampler.distribution(logits, rows)
    for row in range(3):
        assert torch.equal(together[row], sampler.distribution(logits[row : row + 1], rows[row : row + 1])[0])
    assert float(together[1].sum()) == 0
    assert torch.equal(together[2].argmax(-1), logits[2].argmax(-1)) and together[2].sum(-1).tolist() == [1.0, 1.0]


def test_equal_weights_are_filtered_together() -> None:
    """Permuted logits give permuted probabilities, bit for bit: no sum depends on its order."""
    made = torch.Generator().manual_seed(3)
    logits = (torch.randn(1, 1, 50_000, generator=made) * 3).round(decimals=1)
    order = torch.randperm(50_000, generator=made)
    for row in (params(1.0), params(0.7, 50, 0.9), params(1.3, 0, 0.95, 1e-4), params(1.0, 0, 0.999999), params(1.0, 20_000)):
        result = sampler.distribution(logits, row)
        assert torch.equal(sampler.distribution(logits[..., order], row), result[..., order])
    kept = sampler.distribution(torch.tensor([[[2.0, 1.0, 1.0, 0.0]]]), torch.cat([params(1.0, 2)]))[0, 0] > 0
    assert kept.tolist() == [True, True, True, False]
    assert sampler.distribution(torch.zeros(1, 1, 5), params(1.0, 1, 0.1))[0, 0].tolist() == [torch.tensor(0.2).item()] * 5


def test_probabilities_sum_to_one() -> None:
    """A likely token and 200,000 unlikely ones, which a running float32 sum would lose."""
    logits = torch.full((1, 1, 200_001), -17.4)
    logits[0, 0, 0] = 0.0
    result = sampler.distribution(logits, params(1.0))[0, 0]
    assert abs(float(result.double().sum()) - 1) < 1e-6
    kept = sampler.distribution(logits, params(1.0, 0, 0.999))[0, 0] > 0
    share = 1 / (1 + 200_000 * math.exp(-17.4))
    assert share < 0.999 and bool(kept.all()), "equal weights are kept together"


def test_tiny_probabilities_are_kept_without_filters() -> None:
    logits = torch.tensor([[[0.0, -30.0, -80.0]]])
    assert bool((sampler.distribution(logits, params(1.0)) > 0).all())
    assert (sampler.distribution(logits, params(1.0, 2))[0, 0] > 0).tolist() == [True, True, False]
    assert (sampler.distribution(logits, params(1.0, 0, 0.9999999))[0, 0] > 0).tolist() == [True, False, False]


def test_portable_exp_is_accurate_and_monotonic() -> None:
    """On a sample; over all floats from -86 to 0 the error is at most 1.05 ULP, and the function is monotonic."""
    spaced = torch.cat([-torch.linspace(0, 86, 1_000_000), -torch.logspace(-30, 1.93, 200_000)]).sort().values.float()
    edges = -(torch.arange(124).double() + 0.5) * math.log(2)  # where the exponent changes
    around = (edges.float().view(torch.int32)[:, None] + torch.arange(-50, 50, dtype=torch.int32)).flatten().view(torch.float32)
    values = torch.cat([spaced, around]).sort().values
    weights, exact = sampler.portable_exp(values), values.double().exp()
    unit = 2.0 ** (exact.log2().floor() - 23)
    assert float(((weights.double() - exact).abs() / unit).max()) < 1.1
    assert bool((weights[1:] >= weights[:-1]).all())
    ends = sampler.portable_exp(torch.tensor([0.0, -0.0, -86.1, -math.inf, -1e-45]))
    assert ends.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
