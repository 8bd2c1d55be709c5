"""Experts: MLPs of which every token uses a few. All shapes are static; the device reads which experts a token uses.

Weights of experts may stay quantised in memory: only those of the experts that tokens use are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import num_columns, product
from stepgraph.graphs.layers.quantised import c_supports_product
from stepgraph.graphs.layers.reference import sigmoid
from stepgraph.sampling.kernels.operation import Contiguous, ContiguousFloats, DenseFloats, Float32s, Longs, empty_of, operation

_MAX_EXPERTS, _MAX_ROW_BYTES = 1024, 1 << 17  # bytes of a row of states; as in experts.c


def _choice_outputs(logits: Tensor, count: int, normalised: bool, correction: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    assert correction is None or correction.shape == logits.shape[1:], f"logits {logits.shape}, correction of another size"
    shares = torch.empty(len(logits), count, dtype=torch.float32, device=logits.device)
    return shares, shares.new_empty(shares.shape, dtype=torch.int64)


@operation(_choice_outputs, triton=True, c=True, supports=lambda logits: logits.shape[1] <= _MAX_EXPERTS)
def choose_experts(
    logits: ContiguousFloats,
    count: int,
    normalised: bool,
    correction: Float32s | None = None,
    groups: int = 1,
    groups_taken: int = 1,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The best experts of each token by logits [N, experts], and their scores times `factor`, [N, count] each; ties by lower index.

    Scores are probabilities; with a correction [experts], which is added to scores in comparisons only, sigmoids of the logits. Only
    experts of the groups with the largest sums of two scores compete. normalised: the scores of a token are divided by their sum.
    """
    scores = logits.float().softmax(-1) if correction is None else sigmoid(logits.float())
    compared = scores if correction is None else scores + correction
    if groups > 1:
        group_scores = compared.view(len(logits), groups, -1).topk(2, -1).values.sum(-1)
        chosen_groups = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :groups_taken]
        is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, chosen_groups, False)
        compared = compared.masked_fill(is_excluded.repeat_interleave(logits.shape[1] // groups, 1), -torch.inf)
    experts = compared.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    shares = scores.gather(1, experts)
    return (shares / (shares.sum(-1, keepdim=True) + 1e-20) if normalised else shares) * factor, experts


def _product_outputs(states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None = None) -> Tensor:
    assert experts.numel() % len(states) == 0 and len(weights) % num_experts == 0, f"states {states.shape}, experts {experts.shape}"
    outer = num_columns(weights)
    assert biases is None or biases.shape == (outer,), f"weights {weights.shape}, biases {biases.shape}"
    return states.new_empty(experts.numel(), outer // num_experts)


def _c_supports_product(states: Tensor, weights: Tensor) -> bool:
    return c_supports_product(states, weights) and states.shape[1] * states.element_size() <= _MAX_ROW_BYTES


@operation(_product_outputs, triton=True, c=True, supports=_c_supports_product)
def expert_product(
    states: DenseFloats, experts: Longs, weights: Contiguous, num_experts: int, biases: ContiguousFloats | None = None
) -> Tensor:
    """Products with the weights of each token's experts, plus biases: [N * count, out]. On the CPU a row has the same bits in any batch.

    states [N, in], or [N * count, in] with a row for each expert of a token; experts [N, count]; weights [num_experts * out, in], or packed
    ones of all experts, [num_experts * out / 16, blocks, bytes], which are multiplied in float32; biases [num_experts * out].
    """
    result, expert_of_row = _product_outputs(states, experts, weights, num_experts).zero_(), experts.flatten()
    states = states.repeat_interleave(len(expert_of_row) // len(states), 0)
    parts = zip(weights.chunk(num_experts), [None] * num_experts if biases is None else biases.chunk(num_experts), strict=True)
    for index, (weight, bias) in enumerate(parts):
        result = torch.where((expert_of_row == index)[:, None], product.reference(states, weight, bias), result)
    return result


@operation(lambda parts, shares: empty_of((len(shares), parts.shape[1]), parts), triton=True, c=True)
def combine_experts(parts: ContiguousFloats, shares: Float32s) -> Tensor:
    """Sums of parts [N * count, size] by shares [N, count], in float32: [N, size]."""
    scaled = parts.float().view(*shares.shape, -1) * shares[..., None]
    total = scaled[:, 0]
    for index in range(1, shares.shape[1]):
        total = total + scaled[:, index]
    return total.to(parts.dtype)
