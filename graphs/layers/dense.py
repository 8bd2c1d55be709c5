"""Layers that work on each token alone: products, embeddings, norms, activations. One kernel each: in C on the CPU, Triton programs on a
GPU."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.layers.quantised import TILE, c_supports_product, quantised_rows, unpack
from stepgraph.graphs.layers.reference import matrix_product, sigmoid
from stepgraph.sampling.kernels.c_kernel import same_float_type
from stepgraph.sampling.kernels.operation import Contiguous, ContiguousFloats, DenseFloats, empty_as, empty_of, operation


def num_columns(weight: Tensor) -> int:
    """Numbers per row of a product with a weight, packed or not."""
    return len(weight) * (TILE if weight.dtype is torch.uint8 else 1)


def _product_outputs(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    columns = num_columns(weight)
    assert bias is None or bias.shape == (columns,), f"weight {weight.shape}, bias {bias.shape}"
    return empty_of((len(states), columns), states)


@operation(_product_outputs, triton=True, c=True, supports=c_supports_product)
def product(states: DenseFloats, weight: Tensor, bias: ContiguousFloats | None = None) -> Tensor:
    """[N, in] by [out, in], which may be packed -> [N, out], plus `bias`. On the CPU a row has the same bits in any batch; on a GPU the
    programs for packed weights and for a vocabulary have that property; cuBLAS, which computes other products, has not."""
    if weight.dtype is torch.uint8:
        return matrix_product(states.float(), unpack(weight), None if bias is None else bias.float()).to(states.dtype)
    return matrix_product(states, weight, bias)


def embed_tokens(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding, [N, in]; `dtype` if it is packed."""
    return quantised_rows(tokens, weight, dtype) if weight.dtype is torch.uint8 else functional.embedding(tokens, weight)


def _c_supports_norm(states: Tensor, weight: Tensor) -> bool:
    """states [N, size] or [N, inner, size], inner ones adjacent."""
    packed = states.stride(-1) == 1 and (states.dim() == 2 or (states.dim() == 3 and states.stride(1) == states.shape[2]))
    return packed and weight.is_contiguous() and weight.shape == states.shape[-1:] and same_float_type(states, weight)


@operation(empty_as, triton=True, c=True, supports=_c_supports_norm)
def rms_norm(states: Tensor, weight: Contiguous, epsilon: float, offset: float = 0.0) -> Tensor:
    """Scale the last dimension to a mean square of one, in float32, then multiply by `weight`, or by weight + offset in float32."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * (weight.float() + offset)).to(states.dtype) if offset else weight * wide.to(states.dtype)


class Residual(NamedTuple):
    states: Tensor  # plus the update
    normed: Tensor


def _c_supports_add_norm(states: Tensor, update: Tensor, weight: Tensor) -> bool:
    return states.shape == update.shape and states.dim() == 2 and weight.shape == states.shape[1:]


@operation(lambda states, *_: Residual(empty_as(states), empty_as(states)), triton=True, c=True, supports=_c_supports_add_norm)
def add_rms_norm(
    states: ContiguousFloats, update: ContiguousFloats, weight: ContiguousFloats, epsilon: float, offset: float = 0.0
) -> Residual:
    """A residual connection: states plus their update, [N, size] each, and `rms_norm` of the sum."""
    states = states + update
    return Residual(states, rms_norm.reference(states, weight, epsilon, offset))


class Activation(IntEnum):
    """Each is x * sigmoid(z): z = x; z = 2 sqrt(2 / pi) (x + 0.044715 x^3); z = 1.702 x, with limits of 7, as GPT-OSS has them."""

    SILU = 0
    GELU_TANH = 1
    LIMITED = 2


def _activated_outputs(pairs: Tensor, activation: int) -> Tensor:
    assert pairs.shape[-1] % 2 == 0, f"pairs {pairs.shape}"
    return pairs.new_empty(*pairs.shape[:-1], pairs.shape[-1] // 2)


@operation(_activated_outputs, triton=True, c=True, supports=lambda pairs: 2 <= pairs.dim() <= 4 and pairs.shape[-1] > 0)
def activate_and_mul(pairs: ContiguousFloats, activation: int = Activation.SILU) -> Tensor:
    """An Activation of the first half of the last dimension, times the second half; LIMITED: times its clamped value plus one."""
    gate, up = pairs.chunk(2, -1)
    wide = steep = gate.float()
    if activation == Activation.GELU_TANH:
        steep = 1.5957691216057308 * (wide + 0.044715 * wide.pow(3))
    if activation == Activation.LIMITED:
        wide, up = wide.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        steep = 1.702 * wide
    return (wide * sigmoid(steep)).to(up.dtype) * up
