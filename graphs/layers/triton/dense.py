"""The Triton programs of product, rms_norm, add_rms_norm and activate_and_mul: each number is read and written once.

Each step is rounded as torch rounds it. Sums and reciprocal roots may differ from torch's in the last bits of float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.attention.triton.paged import product as matrix_product
from stepgraph.graphs.layers.triton.quantised import quantised_product

ACTIVATED_TILE = 1024
# A product of few rows with the weight of a vocabulary. For these cuBLAS clears a workspace first: on an H200 the fill and the wait after
# it take 6 us in a graph, 15 us in a graph with two streams. With fewer columns cuBLAS is as fast or faster.
WIDE_COLUMNS, WIDE_ROWS = 32_000, 16
COLUMN_TILE, INNER_TILE = 64, 128
WIDE_OPTIONS = {"num_warps": 4, "num_stages": 4, "maxnreg": 64}  # without a bound 66 on sm_80; neither spills


@triton.jit
def wide_product(
    states,  # [N <= ROWS, inner], the last dimension adjacent
    weight,  # [outer, inner]
    bias,  # [outer], or None
    output,  # [N, outer], written
    count,  # N
    inner,
    outer,
    row_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,  # divides `inner`
    WIDE: tl.constexpr,  # multiply in float32: Triton's interpreter treats bfloat16 as integers
):
    """COLUMNS columns of all rows. The order of the sums does not depend on the other rows."""
    column, row, index = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, INNER)
    source = weight + tl.minimum(column, outer - 1).to(tl.int64)[:, None] * weight_stride + index[None, :]
    state = states + row.to(tl.int64)[None, :] * row_stride + index[:, None]
    live = (row < count)[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, inner, INNER):
        sums += matrix_product(tl.load(source + start), tl.load(state + start, mask=live, other=0.0), WIDE)
    if bias is not None:
        sums += tl.load(bias + column, mask=column < outer, other=0.0).to(tl.float32)[:, None]
    place = output + row.to(tl.int64)[None, :] * outer + column[:, None]
    tl.store(place, sums.to(output.dtype.element_ty), mask=live & (column < outer)[:, None])


def product(states: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
    if weight.dtype is torch.uint8:
        return quantised_product(states, weight.contiguous(), bias, output)
    (count, inner), outer = states.shape, len(weight)
    dense = weight.is_contiguous() and inner % INNER_TILE == 0 and states.dtype is not torch.float32
    if not (dense and count <= WIDE_ROWS and outer >= WIDE_COLUMNS):
        matrix = weight.t()
        torch.mm(states, matrix, out=output) if bias is None else torch.addmm(bias, states, matrix, out=output)
        return
    arguments = states, weight, bias, output, count, inner, outer, states.stride(0), weight.stride(0)
    tiles = {"ROWS": WIDE_ROWS, "COLUMNS": COLUMN_TILE, "INNER": INNER_TILE, "WIDE": states.device.type == "cpu"}
    wide_product[(triton.cdiv(outer, COLUMN_TILE),)](*arguments, **tiles, **WIDE_OPTIONS)


def warps_of(width: int) -> int:
    return min(32, max(1, width // 256))


@triton.jit
def normalise_row(
    states,  # [N, inner, size], the inner ones adjacent
    update,  # [N, size], or None
    weight,  # [size]
    sums,  # [N, size], written with an update
    output,  # [N * inner, size]
    row_stride,
    inner,
    size,
    epsilon,
    offset,
    SIZE: tl.constexpr,  # rounded up
    SHIFTED: tl.constexpr,  # with an offset
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < size
    state = tl.load(states + row // inner * row_stride + row % inner * size + column, mask=inside, other=0.0)
    if update is not None:
        change = tl.load(update + row * size + column, mask=inside, other=0.0)
        state = (state.to(tl.float32) + change.to(tl.float32)).to(state.dtype)
        tl.store(sums + row * size + column, state, mask=inside)
    wide = state.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = wide * scale
    if SHIFTED:
        factor += offset
    else:
        scaled = scaled.to(state.dtype).to(tl.float32)
    tl.store(output + row * size + column, (factor * scaled).to(state.dtype), mask=inside)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, offset: float, output: Tensor) -> None:
    if states.dim() != 3 or states.stride()[1:] != (states.shape[2], 1):
        states = states.contiguous().view(-1, 1, states.shape[-1])
    _launch(states, None, weight, None, output, epsilon, offset)


def add_rms_norm(states: Tensor, update: Tensor, weight: Tensor, epsilon: float, offset: float, sums: Tensor, output: Tensor) -> None:
    _launch(states[:, None], update, weight, sums, output, epsilon, offset)


def _launch(states: Tensor, *others: Any) -> None:
    """The arguments of the program without sizes."""
    tokens, inner, size = states.shape
    *tensors, epsilon, offset = others
    width, sizes = triton.next_power_of_2(size), (states.stride(0), inner, size)
    constants = {"SIZE": width, "SHIFTED": offset != 0, "num_warps": warps_of(width), "enable_fp_fusion": False}
    normalise_row[(tokens * inner,)](states, *tensors, *sizes, epsilon, offset, **constants)


@triton.jit
def gate_tile(pairs, output, size, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """A part of one token's MLP. pairs [N, 2 * size], output [N, size]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    gate = tl.load(pairs + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(pairs + row * 2 * size + size + column, mask=inside, other=0.0)
    wide, factor = gate.to(tl.float32), up.to(tl.float32)
    steep = wide
    if ACTIVATION == 1:  # Activation.GELU_TANH
        steep = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    if ACTIVATION == 2:  # Activation.LIMITED
        wide = tl.where(wide > 7.0, 7.0, wide)  # a NaN stays
        steep = 1.702 * wide
        factor = tl.where(factor > 7.0, 7.0, tl.where(factor < -7.0, -7.0, factor))
        factor = (factor + 1.0).to(up.dtype).to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-steep))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * size + column, (opened * factor).to(gate.dtype), mask=inside)


def activate_and_mul(pairs: Tensor, activation: int, output: Tensor) -> None:
    size = output.shape[-1]
    grid = (output.numel() // max(1, size), triton.cdiv(size, ACTIVATED_TILE))
    gate_tile[grid](pairs, output, size, TILE=ACTIVATED_TILE, ACTIVATION=int(activation), num_warps=4, enable_fp_fusion=False)
