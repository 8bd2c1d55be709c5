"""What a layer does to each token alone: products, norms, gates. One operation each on a CPU with native kernels, else plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.layers import cpu as cpu_kernels
from stepgraph.graphs.layers.cpu import calls
from stepgraph.sampling.kernels import operation

LEAST_ROWS = 4  # of a matrix product in torch on the CPU: with fewer rows, MKL and oneDNN add up in another order


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """[N, in] by [out, in] -> [N, out], added to `onto`. On the CPU a row's result has the same bits whatever rows come with it.

    The native product runs on one thread. Where torch has several, the product is torch's, which shares it out among them.
    """
    several = torch.get_num_threads() > 1
    if several or not cpu_kernels.serves(states) or cpu_kernels.wants_gradients(states, weight, bias, onto):
        return linear(states, weight, bias, onto)
    output = states.new_empty(len(states), len(weight))
    product_operation(states, weight, bias, None if onto is None else onto.contiguous(), output)
    return output


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scale the last dimension to a mean square of one, in float32, and by `weight`."""
    if not cpu_kernels.serves(states) or cpu_kernels.wants_gradients(states, weight):
        return normed(states, weight, epsilon)
    output = torch.empty_like(states, memory_format=torch.contiguous_format)
    rms_norm_operation(states, weight, epsilon, output)
    return output


def silu_and_mul(pairs: Tensor) -> Tensor:
    """silu of the first half of the last dimension, times the second half."""
    if not cpu_kernels.serves(pairs) or cpu_kernels.wants_gradients(pairs):
        return opened(pairs)
    output = pairs.new_empty(*pairs.shape[:-1], pairs.shape[-1] // 2)
    gated_operation(pairs, output)
    return output


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    rows = len(states)
    if rows < LEAST_ROWS and states.device.type == "cpu":
        states = functional.pad(states, (0, 0, 0, LEAST_ROWS - rows))
    found = functional.linear(states, weight, bias)[:rows]
    return found if onto is None else onto + found


def normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = states.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(states.dtype)


def opened(pairs: Tensor) -> Tensor:
    gate, up = pairs.chunk(2, -1)
    return functional.silu(gate) * up


def product_reference(states: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None, output: Tensor) -> None:
    output.copy_(linear(states, weight, bias, onto))


def rms_norm_reference(states: Tensor, weight: Tensor, epsilon: float, output: Tensor) -> None:
    output.copy_(normed(states, weight, epsilon))


def silu_and_mul_reference(pairs: Tensor, output: Tensor) -> None:
    output.copy_(opened(pairs))


product_operation = operation.operation(
    "",
    "product",
    "(Tensor states, Tensor weight, Tensor? bias, Tensor? onto, Tensor(a!) output) -> ()",
    product_reference,
    cpu_kernels.prepared(calls.product),
)
rms_norm_operation = operation.operation(
    "",
    "rms_norm",
    "(Tensor states, Tensor weight, float epsilon, Tensor(a!) output) -> ()",
    rms_norm_reference,
    cpu_kernels.prepared(calls.rms_norm),
)
gated_operation = operation.operation(
    "", "gated", "(Tensor pairs, Tensor(a!) output) -> ()", silu_and_mul_reference, cpu_kernels.prepared(calls.gate)
)
