"""Layers that work on each token alone: products, norms, SiLU. One kernel each: in C on the CPU, Triton programs on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.sampling.kernels.c_kernel import CKernel, same_float_type
from stepgraph.sampling.kernels.operation import Contiguous, like_first, operation

LEAST_ROWS = 4  # of a matrix product in torch on the CPU: with fewer rows, MKL and oneDNN sum in another order


def _product_in_c(states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """On one thread: with several, torch shares the product out among them."""
    others = [each for each in (weight, bias) if each is not None]
    dense = states.dim() == 2 and states.stride(-1) == 1 and all(each.is_contiguous() for each in others)
    return torch.get_num_threads() == 1 and dense and same_float_type(states, *others)


def _product_outputs(states: Tensor, weight: Tensor, *_: object) -> Tensor:
    return states.new_empty(len(states), len(weight))


@operation(_product_outputs, c=CKernel("product", _product_in_c))
def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, in] by [out, in] -> [N, out], plus `bias`. On the CPU a row has the same bits in any batch."""
    rows = len(states)
    if rows < LEAST_ROWS and states.device.type == "cpu":
        states = functional.pad(states, (0, 0, 0, LEAST_ROWS - rows))
    return functional.linear(states, weight, bias)[:rows]


def _norm_in_c(states: Tensor, weight: Tensor, epsilon: float) -> bool:
    """states [N, size] or [N, inner, size], inner ones adjacent."""
    packed = states.stride(-1) == 1 and (states.dim() == 2 or (states.dim() == 3 and states.stride(1) == states.shape[2]))
    return packed and weight.is_contiguous() and same_float_type(states, weight)


@operation(like_first, triton=True, c=CKernel("rms_norm", _norm_in_c))
def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scale the last dimension to a mean square of one, in float32, then multiply by `weight`."""
    wide = states.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(states.dtype)


class Residual(NamedTuple):
    states: Tensor  # with the update
    normed: Tensor


def _add_norm_outputs(states: Tensor, *_: object) -> Residual:
    return Residual(torch.empty_like(states), torch.empty_like(states))


def _add_norm_in_c(states: Tensor, update: Tensor, weight: Tensor, epsilon: float) -> bool:
    return states.shape == update.shape and states.dim() == 2 and weight.is_contiguous() and same_float_type(states, update, weight)


@operation(_add_norm_outputs, triton=True, c=CKernel("add_rms_norm", _add_norm_in_c))
def add_rms_norm(states: Contiguous, update: Contiguous, weight: Tensor, epsilon: float) -> Residual:
    """A residual connection: states plus their update, [N, size] each, and `rms_norm` of the sum."""
    states = states + update
    return Residual(states, rms_norm.reference(states, weight, epsilon))


def _silu_outputs(pairs: Tensor) -> Tensor:
    return pairs.new_empty(*pairs.shape[:-1], pairs.shape[-1] // 2)


def _silu_in_c(pairs: Tensor) -> bool:
    return 2 <= pairs.dim() <= 4 and pairs.is_contiguous() and same_float_type(pairs)


@operation(_silu_outputs, triton=True, c=CKernel("silu_and_mul", _silu_in_c))
def silu_and_mul(pairs: Contiguous) -> Tensor:
    """silu of the first half of the last dimension, times the second half."""
    gate, up = pairs.chunk(2, -1)
    return functional.silu(gate) * up
