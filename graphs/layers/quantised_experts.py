"""Products with the weights of experts that stay quantised in memory: only those of the experts that a token takes are read."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.layers.experts import MOST_BYTES, expert_product
from stepgraph.graphs.layers.quantised import TILE, is_packed, quantised_product
from stepgraph.sampling.kernels.c_kernel import CKernel, is_contiguous, same_float_type
from stepgraph.sampling.kernels.operation import Contiguous, Dense, operation


def _outputs(states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None = None) -> Tensor:
    assert experts.numel() % len(states) == 0 and len(weights) % num_experts == 0, f"states {states.shape}, experts {experts.shape}"
    return states.new_empty(experts.numel(), len(weights) // num_experts * TILE)


def _in_c(states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None) -> bool:
    others = [] if biases is None else [biases]
    dense = all(each.is_contiguous() for each in others) and is_contiguous(torch.int64, experts) and is_packed(weights)
    return dense and same_float_type(states, *others) and states.shape[1] * states.element_size() <= MOST_BYTES


@operation(_outputs, triton=True, c=CKernel("quantised_expert_product", _in_c))
def quantised_expert_product(states: Dense, experts: Contiguous, weights: Tensor, num_experts: int, biases: Tensor | None = None) -> Tensor:
    """`expert_product` with the packed weights of all experts, [num_experts * out / 16, blocks, bytes], in float32."""
    chosen, count = experts.flatten(), num_experts
    states = states.repeat_interleave(len(chosen) // len(states), 0)
    found = states.new_zeros(len(chosen), len(weights) // count * TILE)
    parts = zip(weights.chunk(count), [None] * count if biases is None else biases.chunk(count), strict=True)
    for index, (weight, bias) in enumerate(parts):
        found = torch.where((chosen == index)[:, None], quantised_product.reference(states, weight, bias), found)
    return found


def expert_linear(states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None = None) -> Tensor:
    """`expert_product`, or `quantised_expert_product` with packed weights."""
    run = quantised_expert_product if weights.dtype is torch.uint8 else expert_product
    return run(states, experts, weights, num_experts, biases)
