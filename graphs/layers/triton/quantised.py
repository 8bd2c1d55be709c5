"""The Triton programs of products with packed weights: each weight is read once for up to `MOST_ROWS` states.

Numbers are multiplied as stored: they are whole or float8, which bfloat16 and float16 represent exactly. The scales of a group are applied
to its sums in float32, and its minimums to the sums of its states.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.attention.triton.paged import product as matrix_product
from stepgraph.graphs.layers.quantised import TILE, Kind, kind_of

MOST_ROWS = 32  # states of one instance; 64 would spill
WARPS = 4


def rows_of(count: int) -> int:
    """tl.dot takes at least 16."""
    return 16 if count <= 16 else MOST_ROWS


def blocks_of(kind: Kind) -> int:
    return WARPS if kind.group > 32 else 2 * WARPS


@triton.jit
def load_fields(
    words,  # packed weights as int32
    at,  # [blocks, columns]: the first word of each
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE: tl.constexpr,
):
    """Numbers without their scales, [blocks, columns, GROUP] float32. A vector has one word of each column of its tile, see `pack`."""
    PER_WORD: tl.constexpr = 32 // BITS
    found = tl.load(words + at[:, :, None] + tl.arange(0, GROUP // PER_WORD) * TILE)
    index = tl.arange(0, PER_WORD)
    byte, field, odd = index // (PER_WORD // 2), index // 2 % (PER_WORD // 4), index % 2
    fields = (found[:, :, :, None] >> ((odd * 2 + byte) * 8 + field * BITS)) & ((1 << BITS) - 1)
    fields = tl.reshape(fields, [at.shape[0], at.shape[1], GROUP])
    if FLOAT8:  # as float16, which has a bit more for the exponent: its bias is larger by eight
        half = ((fields & 128) << 8) | ((fields & 127) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return (fields - ZERO).to(tl.float32)


@triton.jit
def tile_sums(
    states,
    offsets,  # [ROWS, 1]: where each row of states begins
    live,  # [ROWS, 1]
    words,
    scales,
    tile,
    inner,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    RANGED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,  # where the scales of a block begin, and the size of a block, in units of their type
    SCALE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # at a time: each is a product of its own, so that the warps share them
    WIDE: tl.constexpr,  # multiply in float32: Triton's interpreter takes bfloat16 for whole numbers
):
    """[ROWS, TILE] float32: rows of states by a tile of packed weights."""
    column, blocks, offsets = tl.arange(0, TILE), inner // GROUP, offsets + tl.arange(0, GROUP)
    totals = tl.zeros([BLOCKS, ROWS, TILE], tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        wanted = (block < blocks)[:, None, None] & live
        block = tl.minimum(block, blocks - 1)
        state = tl.load(states + block[:, None, None] * GROUP + offsets, mask=wanted, other=0.0)
        at = tile * blocks + block[:, None]
        fields = load_fields(words, at * BLOCK + column, BITS, GROUP, ZERO, FLOAT8, TILE)
        sums = matrix_product(state, tl.permute(fields.to(state.dtype), 0, 2, 1), WIDE)
        scale = scales + at * SCALE_BLOCK + SCALES + column
        totals += sums * tl.load(scale).to(tl.float32)[:, None, :]
        if RANGED:
            totals += tl.sum(state.to(tl.float32), 2)[:, :, None] * tl.load(scale + TILE).to(tl.float32)[:, None, :]
    return tl.sum(totals, 0)


@triton.jit
def packed_product(
    states,  # [N, inner], the last dimension adjacent
    words,  # [outer / TILE, blocks, BLOCK] int32: the packed weights
    scales,  # the same memory in the type of the scales
    bias,  # [outer], or None
    output,  # [N, outer], written
    count,  # N
    inner,
    outer,
    state_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    RANGED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile of columns of up to ROWS states. The order of the sums does not depend on the other states."""
    row, tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0).to(tl.int64)
    offsets, live = row.to(tl.int64)[:, None] * state_stride, (row < count)[:, None]
    found = tile_sums(
        states, offsets, live, words, scales, tile, inner,
        BITS, GROUP, ZERO, FLOAT8, RANGED, BLOCK, SCALES, SCALE_BLOCK, TILE, ROWS, BLOCKS, WIDE,
    )  # fmt: skip
    columns = tile * TILE + tl.arange(0, TILE)
    if bias is not None:
        found += tl.load(bias + columns).to(tl.float32)
    tl.store(output + row.to(tl.int64)[:, None] * outer + columns, found.to(output.dtype.element_ty), mask=live)


def layout_of(kind: Kind) -> dict[str, Any]:
    """The constants that describe a block."""
    scale_bytes, block_bytes = kind.scale_type.itemsize, kind.block_bytes // kind.together
    return {
        "BITS": kind.bits,
        "GROUP": kind.group,
        "ZERO": kind.zero,
        "FLOAT8": kind.float8,
        "RANGED": kind.ranged,
        "BLOCK": block_bytes // 4,
        "SCALES": kind.field_bytes // scale_bytes,
        "SCALE_BLOCK": block_bytes // scale_bytes,
        "TILE": TILE,
    }


def quantised_product(states: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
    kind, (count, inner) = kind_of(weight), states.shape
    rows = rows_of(count)
    packed_product[(len(weight), triton.cdiv(count, rows))](
        states,
        weight.view(torch.int32),
        weight.view(kind.scale_type),
        bias,
        output,
        count,
        inner,
        output.shape[1],
        states.stride(0),
        **layout_of(kind),
        ROWS=rows,
        BLOCKS=blocks_of(kind),
        WIDE=states.device.type == "cpu",
        num_warps=WARPS,
    )


@triton.jit
def packed_rows(
    indices,  # [N]
    words,  # as in packed_product
    scales,
    output,  # [N, inner], written
    inner,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    RANGED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One block of one row."""
    row, block, one = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, 1)
    index = tl.load(indices + row)
    at = index // TILE * (inner // GROUP) + block
    fields = load_fields(words, at * BLOCK + index % TILE + one[:, None] + one, BITS, GROUP, ZERO, FLOAT8, TILE)
    scale = scales + at * SCALE_BLOCK + SCALES + index % TILE
    values = tl.reshape(fields, [GROUP]) * tl.load(scale).to(tl.float32)
    if RANGED:
        values += tl.load(scale + TILE).to(tl.float32)
    tl.store(output + row * inner + block * GROUP + tl.arange(0, GROUP), values.to(output.dtype.element_ty))


def quantised_rows(indices: Tensor, weight: Tensor, dtype: torch.dtype, output: Tensor) -> None:
    kind, (count, inner) = kind_of(weight), output.shape
    arguments = indices, weight.view(torch.int32), weight.view(kind.scale_type), output, inner
    packed_rows[(count, inner // kind.group)](*arguments, **layout_of(kind), num_warps=1, enable_fp_fusion=False)
