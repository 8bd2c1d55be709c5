"""References in torch, which run where the C library is missing: a row has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import Activation, activate_and_mul, product
from stepgraph.graphs.layers.experts import choose_experts
from stepgraph.graphs.layers.reference import sigmoid

PARTS = [(first, count) for count in (1, 2, 3, 4, 15, 17, 32, 60) for first in (0, 1, 6)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(64, 8), (64, 1), (8, 1), (21, 3), (22, 8), (5, 1), (600, 130), (512, 512), (576, 1536)])
def test_products_are_correct_and_independent_of_the_batch(inner: int, outer: int, dtype: torch.dtype) -> None:
    states, weight = random(70, inner).to(dtype), random(outer, inner, seed=1).mul(inner**-0.5).to(dtype)
    near = 1e-5 if dtype is torch.float32 else 0.02
    for bias in (None, random(outer, seed=2).to(dtype)):
        together = product.reference(states, weight, bias)
        expected = torch.nn.functional.linear(states.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(together.double(), expected, rtol=near, atol=near)
        for first, count in PARTS:
            assert torch.equal(product.reference(states[first : first + count], weight, bias), together[first : first + count])


@pytest.mark.parametrize("activation", Activation)
def test_activations_are_independent_of_the_batch(activation: Activation) -> None:
    pairs = random(70, 22)
    together = activate_and_mul.reference(pairs, activation)
    for first, count in PARTS:
        assert torch.equal(activate_and_mul.reference(pairs[first : first + count], activation), together[first : first + count])


def test_choices_of_experts_are_independent_of_the_batch() -> None:
    logits, correction = random(70, 12), random(12, seed=1) / 4
    shares, experts = choose_experts.reference(logits, 3, True, correction, 4, 2, 2.5)
    for first, count in PARTS:
        few = choose_experts.reference(logits[first : first + count], 3, True, correction, 4, 2, 2.5)
        assert torch.equal(few[0], shares[first : first + count]) and torch.equal(few[1], experts[first : first + count])


def test_sigmoid_and_its_gradient() -> None:
    values = torch.cat([torch.linspace(-300, 300, 999), torch.tensor([torch.inf, -torch.inf, torch.nan])]).requires_grad_()
    found = sigmoid(values)
    torch.testing.assert_close(found, torch.sigmoid(values), rtol=1e-6, atol=1e-30, equal_nan=True)
    found[:-1].sum().backward()
    assert values.grad is not None and bool(values.grad[:-1].isfinite().all())
