"""Experts against products of one token at a time, and their independence of the batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import product
from stepgraph.graphs.layers.experts import choose_experts, combine_experts, expert_product
from stepgraph.graphs.layers.quantised import KINDS, QuantKind
from stepgraph.sampling import native
from tests.graphs.layers.test_quantised import every_kind, made
from tests.helpers.torch_threads import torch_threads

EXPERTS, COUNT = 5, 2
MADE = torch.Generator().manual_seed(3)
PACKED = made(KINDS["Q4_1"], EXPERTS * 16, 32)[0]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=MADE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_experts_are_chosen(dtype: torch.dtype) -> None:
    """The first of equal logits; probabilities are normalised over all experts, or over the chosen ones."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 9.0], [-5.0, -4.0, -3.0, -2.0, -1.0]], dtype=dtype)
    for normalised in (False, True):
        shares, experts = choose_experts(logits, COUNT, normalised)
        assert experts.tolist() == [[1, 2], [4, 0], [4, 3]]
        expected = logits.double().softmax(-1).gather(1, experts)
        expected = expected / expected.sum(1, keepdim=True) if normalised else expected
        torch.testing.assert_close(shares.double(), expected, rtol=1e-6, atol=1e-7)
    shares, experts = choose_experts(logits.fill_(torch.nan), COUNT, True)
    assert bool(shares.isnan().all()) and bool(((experts >= 0) & (experts < EXPERTS)).all())


def grouped_choice(logits: list[float], correction: list[float], count: int, groups: int, taken: int) -> list[tuple[float, int]]:
    """Scores and experts, computed in plain Python."""
    scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    compared, size = [score + more for score, more in zip(scores, correction, strict=True)], len(logits) // groups
    pairs = [sum(sorted(compared[start : start + size])[-2:]) for start in range(0, len(logits), size)]
    best = sorted(range(groups), key=lambda group: -pairs[group])[:taken]
    candidates = sorted((expert for expert in range(len(logits)) if expert // size in best), key=lambda expert: -compared[expert])
    return [(scores[expert], expert) for expert in candidates[:count]]


@pytest.mark.parametrize(("number", "groups", "taken", "count"), [(8, 4, 2, 3), (12, 3, 1, 4), (6, 1, 1, 6), (256, 8, 4, 8), (20, 5, 5, 1)])
def test_the_best_experts_of_the_best_groups_are_chosen(number: int, groups: int, taken: int, count: int) -> None:
    """With the kernel and with the reference. The correction changes the choice, not the shares."""
    logits, correction = random(9, number), random(number) / 4
    for normalised, in_torch in itertools.product((False, True), repeat=2):
        run = choose_experts.reference if in_torch else choose_experts
        shares, experts = run(logits, count, normalised, correction, groups, taken, 2.5)
        for row in range(len(logits)):
            expected = grouped_choice(logits[row].tolist(), correction.tolist(), count, groups, taken)
            assert experts[row].tolist() == [expert for _, expert in expected]
            total = sum(score for score, _ in expected) if normalised else 1.0
            assert shares[row].tolist() == pytest.approx([2.5 * score / total for score, _ in expected], rel=1e-5)
    shares, experts = choose_experts(torch.zeros(1, number), count, True, torch.zeros(number), groups, taken)
    assert experts.tolist() == [list(range(count))], "the first of equal experts"
    shares, experts = choose_experts(logits.fill_(torch.nan), count, True, correction, groups, taken)
    assert bool(shares.isnan().all()) and bool(((experts >= 0) & (experts < number)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(64, 16), (21, 200), (8, 1), (9000, 3), (600, 130)])
def test_products_are_correct_and_independent_of_the_batch(inner: int, outer: int, dtype: torch.dtype) -> None:
    """Also of the number of threads. More rows than are gathered at once; `states` has a row per token, or per expert of a token."""
    tokens = 30
    weights, biases = random(EXPERTS * outer, inner, dtype=dtype).mul(inner**-0.5), random(EXPERTS * outer, dtype=dtype)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=MADE)[:COUNT] for _ in range(tokens)])  # the last expert is never chosen
    by_expert = weights.view(EXPERTS, outer, inner)
    near = 1e-5 if dtype is torch.float32 else 0.05
    for rows, bias in ((tokens, None), (tokens * COUNT, biases)):
        states = random(rows, inner + 3, dtype=dtype)[:, :inner]
        found = expert_product(states, chosen, weights, EXPERTS, bias)
        each = states.repeat_interleave(tokens * COUNT // rows, 0)
        expected = torch.einsum("noi,ni->no", by_expert[chosen.flatten()].double(), each.double())
        expected = expected if bias is None else expected + bias.view(EXPERTS, outer)[chosen.flatten()].double()
        torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
        torch.testing.assert_close(expert_product.reference(states, chosen, weights, EXPERTS, bias), found, rtol=near, atol=near)
        with torch_threads(3):
            assert torch.equal(expert_product(states, chosen, weights, EXPERTS, bias), found)
        for first, count in ((0, 1), (7, 2), (3, 19)):
            taken = states.view(tokens, -1, inner)[first : first + count].flatten(0, 1)
            alone = expert_product(taken, chosen[first : first + count], weights, EXPERTS, bias)
            assert torch.equal(alone, found[COUNT * first : COUNT * (first + count)])


@every_kind
def test_products_with_packed_weights_are_those_of_each_expert_alone(kind: QuantKind) -> None:
    """Same bits as `product`, independent of other rows; more rows of one expert than are gathered at once."""
    tokens, outer, inner = 60, 48, 384
    packed, _ = made(kind, EXPERTS * outer, inner)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=MADE)[:COUNT] for _ in range(tokens)])  # the last expert is never chosen
    for rows, dtype, biases in ((tokens, torch.float32, None), (tokens * COUNT, torch.bfloat16, random(EXPERTS * outer).bfloat16())):
        states = random(rows, inner + 3, dtype=dtype)[:, :inner]
        found = expert_product(states, chosen, packed, EXPERTS, biases)
        each = states.repeat_interleave(tokens * COUNT // rows, 0)
        for index, expert in enumerate(chosen.flatten().tolist()):
            bias = None if biases is None else biases.view(EXPERTS, outer)[expert]
            alone = product(each[index : index + 1], packed.chunk(EXPERTS)[expert], bias)
            if native.why_not():
                torch.testing.assert_close(found[index : index + 1], alone, rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(found[index : index + 1], alone)
        reference = expert_product.reference(states, chosen, packed, EXPERTS, biases)
        torch.testing.assert_close(found, reference, rtol=1e-4 if biases is None else 2**-7, atol=1e-3)


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_an_expert_outside_of_the_weights_is_refused() -> None:
    with pytest.raises(IndexError):
        expert_product(random(2, 8), torch.tensor([[0, EXPERTS], [1, 2]]), random(EXPERTS * 4, 8), EXPERTS)
    with pytest.raises(IndexError):
        expert_product(random(2, 32), torch.tensor([[0, -1], [1, 2]]), PACKED, EXPERTS)


def test_many_choices_are_taken_in_several_parts() -> None:
    chosen, states, weights = torch.randint(0, EXPERTS, (700, COUNT), generator=MADE), random(700, 8), random(EXPERTS * 3, 8)
    given = states, chosen, weights, EXPERTS
    torch.testing.assert_close(expert_product(*given), expert_product.reference(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_weighted_in_float32(dtype: torch.dtype) -> None:
    parts, shares = random(7 * 3, 50, dtype=dtype), random(7, 3)
    found = combine_experts(parts, shares)
    expected = (parts.double().view(7, 3, 50) * shares[..., None].double()).sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6 if dtype is torch.float32 else 2**-8)
    assert torch.equal(combine_experts(parts[3:6], shares[1:2]), found[1:2])
