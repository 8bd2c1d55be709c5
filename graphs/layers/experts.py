"""Experts: MLPs of which every token uses a few. All shapes are static; the device reads which experts a token uses.

Weights of experts may stay quantised in memory: only those of the experts that tokens use are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import product
from stepgraph.graphs.layers.quantised import TILE, c_supports_weight, inner_size, quantised_product
from stepgraph.graphs.layers.reference import sigmoid
from stepgraph.sampling.kernels.operation import Contiguous, ContiguousFloats, DenseFloats, Float32s, Longs, empty_of, operation

_MAX_EXPERTS, _MAX_ROW_BYTES = 1024, 1 << 17  # bytes of a row of states; as in experts.c


def _choice_outputs(logits: Tensor, count: int, normalised: bool) -> tuple[Tensor, Tensor]:
    shares = torch.empty(len(logits), count, dtype=torch.float32, device=logits.device)
    return shares, shares.new_empty(shares.shape, dtype=torch.int64)


def _c_supports_choice(logits: Tensor, *_: object) -> bool:
    return logits.shape[1] <= _MAX_EXPERTS


@operation(_choice_outputs, triton=True, c=True, supports=_c_supports_choice)
def choose_experts(logits: ContiguousFloats, count: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The most probable experts of each token by logits [N, experts], and their probabilities, [N, count] each; ties by lower index.

    normalised: the probabilities of a token are divided by their sum.
    """
    shares, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :count], experts[:, :count]
    return shares / shares.sum(-1, keepdim=True) if normalised else shares, experts


def _grouped_outputs(logits: Tensor, correction: Tensor, count: int, *_: object) -> tuple[Tensor, Tensor]:
    assert correction.shape == logits.shape[1:], f"logits {logits.shape}, correction {correction.shape}"
    return _choice_outputs(logits, count, True)


@operation(_grouped_outputs, triton=True, c=True, supports=_c_supports_choice)
def choose_grouped_experts(
    logits: Float32s, correction: Float32s, count: int, groups: int, groups_taken: int, normalised: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """The experts of each token by scores sigmoid(logits) [N, experts], and their scores times `factor`, [N, count] each.

    correction [experts] is added to scores in comparisons only. Only experts of the groups with the largest sums of two scores
    compete. Ties by lower index. normalised: the scores of a token are divided by their sum.
    """
    scores = sigmoid(logits.float())
    compared = scores + correction
    group_scores = compared.view(len(logits), groups, -1).topk(2, -1).values.sum(-1)
    chosen_groups = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :groups_taken]
    is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, chosen_groups, False)
    compared = compared.masked_fill(is_excluded.repeat_interleave(logits.shape[1] // groups, 1), -torch.inf)
    experts = compared.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    shares = scores.gather(1, experts)
    return (shares / (shares.sum(-1, keepdim=True) + 1e-20) if normalised else shares) * factor, experts


def _product_outputs(states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None = None) -> Tensor:
    assert experts.numel() % len(states) == 0 and len(weights) % num_experts == 0, f"states {states.shape}, experts {experts.shape}"
    outer = len(weights) * (TILE if weights.dtype is torch.uint8 else 1)
    assert biases is None or biases.shape == (outer,), f"weights {weights.shape}, biases {biases.shape}"
    return states.new_empty(experts.numel(), outer // num_experts)


def _c_supports_product(states: Tensor, experts: Tensor, weights: Tensor, *_: object) -> bool:
    packed, inner = weights.dtype is torch.uint8, states.shape[1]
    fits = c_supports_weight(weights) if packed else weights.dtype is states.dtype and weights.is_contiguous()
    return fits and inner == (inner_size(weights) if packed else weights.shape[1]) and inner * states.element_size() <= _MAX_ROW_BYTES


@operation(_product_outputs, triton=True, c=True, supports=_c_supports_product)
def expert_product(
    states: DenseFloats, experts: Longs, weights: Contiguous, num_experts: int, biases: ContiguousFloats | None = None
) -> Tensor:
    """Products with the weights of each token's experts, plus biases: [N * count, out]. On the CPU a row has the same bits in any batch.

    states [N, in], or [N * count, in] with a row for each expert of a token; experts [N, count]; weights [num_experts * out, in];
    biases [num_experts * out].
    """
    return _products(product.reference, states, experts, weights, num_experts, biases)


@operation(_product_outputs, triton=True, c=True, supports=_c_supports_product)
def quantised_expert_product(
    states: DenseFloats, experts: Longs, weights: Contiguous, num_experts: int, biases: ContiguousFloats | None = None
) -> Tensor:
    """`expert_product` with the packed weights of all experts, [num_experts * out / 16, blocks, bytes], in float32."""
    return _products(quantised_product.reference, states, experts, weights, num_experts, biases)


def _products(
    multiply: Callable[..., Tensor], states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None
) -> Tensor:
    result, expert_of_row = _product_outputs(states, experts, weights, num_experts).zero_(), experts.flatten()
    states = states.repeat_interleave(len(expert_of_row) // len(states), 0)
    parts = zip(weights.chunk(num_experts), [None] * num_experts if biases is None else biases.chunk(num_experts), strict=True)
    for index, (weight, bias) in enumerate(parts):
        result = torch.where((expert_of_row == index)[:, None], multiply(states, weight, bias), result)
    return result


def expert_linear(states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None = None) -> Tensor:
    """`expert_product`, or `quantised_expert_product` with packed weights."""
    run = quantised_expert_product if weights.dtype is torch.uint8 else expert_product
    return run(states, experts, weights, num_experts, biases)


@operation(lambda parts, shares: empty_of((len(shares), parts.shape[1]), parts), triton=True, c=True)
def combine_experts(parts: ContiguousFloats, shares: Float32s) -> Tensor:
    """Sums of parts [N * count, size] by shares [N, count], in float32: [N, size]."""
    scaled = parts.float().view(*shares.shape, -1) * shares[..., None]
    total = scaled[:, 0]
    for index in range(1, shares.shape[1]):
        total = total + scaled[:, index]
    return total.to(parts.dtype)
