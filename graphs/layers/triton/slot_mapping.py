"""The Triton programs of place_tokens, shift_entries, rope_angles and rope_and_write_kv; the last has one instance per token and head.

Products and sums of rotations are rounded as torch rounds them, so that both give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.attention.triton.float8 import as_written

SHIFT_TILE = 128
_QUARTER = tl.constexpr(math.pi / 2)


@triton.jit
def entry_of(table, position, page_size, used):
    """The cache slot of a position; in the scratch page where it is not used."""
    page = tl.load(table + position // page_size, mask=used, other=0)
    return page * page_size + position % page_size


@triton.jit
def place_row(
    tokens,  # [B, Q] int64
    length,  # [B] int64
    end,  # [B] int64
    tables,  # [B, pages] int64
    offset,
    page_size,
    max_length,
    live,  # [B] bool, or None
    count,  # [B] int64, or None
    known,  # [B, Q] int64 each, written
    positions,
    slots,
    width,  # Q
    pages,
    length_step,
    end_step,
    WIDTH: tl.constexpr,  # rounded up
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, WIDTH)
    inside = index < width
    token = tl.load(tokens + row * width + index, mask=inside, other=-1)
    position = tl.load(length + row * length_step) + offset + index
    limit = tl.load(end + row * end_step)
    if live is not None:
        limit = tl.where(tl.load(live + row).to(tl.int32) != 0, limit, 0)
    used = (token >= 0) & (position >= 0) & (position < limit)
    if count is not None:
        used = used & (index < tl.load(count + row))
    position = tl.minimum(tl.maximum(position, 0), max_length - 1)
    tl.store(known + row * width + index, tl.maximum(token, 0), mask=inside)
    tl.store(positions + row * width + index, position, mask=inside)
    tl.store(slots + row * width + index, entry_of(tables + row * pages, position, page_size, used), mask=inside)


def place_tokens(*arguments: Any) -> None:
    """The arguments and outputs of slot_mapping.place_tokens, in the order of the program."""
    tokens, length, end, tables, *_ = arguments
    batch, width = tokens.shape
    sizes, warps = (width, tables.shape[1], length.stride(0), end.stride(0)), 1 if width <= 256 else 8
    place_row[(batch,)](*arguments, *sizes, WIDTH=triton.next_power_of_2(width), num_warps=warps)


@triton.jit
def shift_tile(positions, slots, tables, earlier, earlier_slots, width, pages, page_size, by, TILE: tl.constexpr):
    """A part of one row. positions, slots, earlier, earlier_slots [B, Q] int64, tables [B, pages] int64."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = index < width
    position = tl.load(positions + row * width + index, mask=inside, other=0)
    used = (tl.load(slots + row * width + index, mask=inside, other=0) >= page_size) & (position >= by)
    position = tl.maximum(position - by, 0)
    tl.store(earlier + row * width + index, position, mask=inside)
    tl.store(earlier_slots + row * width + index, entry_of(tables + row * pages, position, page_size, used), mask=inside)


def shift_entries(
    positions: Tensor, slots: Tensor, tables: Tensor, page_size: int, by: int, earlier: Tensor, earlier_slots: Tensor
) -> None:
    batch, width = positions.shape
    tile = min(SHIFT_TILE, triton.next_power_of_2(width))
    grid = (batch, triton.cdiv(width, tile))
    pages = tables.shape[1]
    shift_tile[grid](positions, slots, tables, earlier, earlier_slots, width, pages, page_size, by, TILE=tile, num_warps=1)


@triton.jit
def sine_and_cosine(angle):
    """Sine and cosine of a float64, to 1e-11 and the angle's own precision: correctly rounded in float32, except near ties.

    The angle is reduced to an eighth of a turn on either side of a multiple of a quarter.
    """
    quarter = tl.full([], _QUARTER, tl.float64)
    turns = tl.floor(angle / quarter + 0.5)
    rest = angle - turns * quarter
    square = rest * rest
    sine = rest * (1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72 * (1 - square / 110)))))
    cosine = 1 - square / 2 * (1 - square / 12 * (1 - square / 30 * (1 - square / 56 * (1 - square / 90 * (1 - square / 132)))))
    number = turns.to(tl.int64) & 3
    swapped = (number & 1) != 0
    first, second = tl.where(swapped, cosine, sine), tl.where(swapped, sine, cosine)
    return tl.where(number >= 2, -first, first), tl.where((number == 1) | (number == 2), -second, second)


@triton.jit
def angles_of(positions, frequencies, cosines, sines, half, factor, HALF: tl.constexpr):
    """One token. positions [N] int64, frequencies [half] float32; cosines, sines [N, 2 * half], written. HALF: half, rounded up."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    inside = column < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + column, mask=inside, other=0.0)
    sine, cosine = sine_and_cosine(angle.to(tl.float64))
    sine = (sine.to(tl.float32) * factor).to(sines.dtype.element_ty)
    cosine = (cosine.to(tl.float32) * factor).to(cosines.dtype.element_ty)
    at = token * 2 * half + column
    tl.store(cosines + at, cosine, mask=inside)
    tl.store(cosines + at + half, cosine, mask=inside)
    tl.store(sines + at, sine, mask=inside)
    tl.store(sines + at + half, sine, mask=inside)


def rope_angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float, cosines: Tensor, sines: Tensor) -> None:
    half = len(frequencies)
    width = triton.next_power_of_2(half)
    warps = max(1, width // 32)
    grid = (len(positions),)
    angles_of[grid](positions, frequencies, cosines, sines, half, factor, HALF=width, num_warps=warps, enable_fp_fusion=False)


@triton.jit
def rotate_head(source, target, cosines, sines, half, column, inside, element, copied, PARTIAL: tl.constexpr):
    """Write a head rotated; each product is rounded before the sum. copied: mask of the elements that are copied."""
    if PARTIAL:
        tl.store(target + element, as_written(tl.load(source + element, mask=copied, other=0.0), target), mask=copied)
    first, second = tl.load(source + column, mask=inside, other=0.0), tl.load(source + half + column, mask=inside, other=0.0)
    cosine = tl.load(cosines + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + column, mask=inside, other=0.0).to(tl.float32)
    low = (first.to(tl.float32) * cosine).to(first.dtype).to(tl.float32) - (second.to(tl.float32) * sine).to(first.dtype).to(tl.float32)
    cosine = tl.load(cosines + half + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + half + column, mask=inside, other=0.0).to(tl.float32)
    high = (second.to(tl.float32) * cosine).to(first.dtype).to(tl.float32) + (first.to(tl.float32) * sine).to(first.dtype).to(tl.float32)
    tl.store(target + column, as_written(low.to(first.dtype), target), mask=inside)
    tl.store(target + half + column, as_written(high.to(first.dtype), target), mask=inside)


@triton.jit
def rotate_heads(
    query,  # [N, heads, size], tokens `query_stride` apart
    key,  # [N, kv_heads, size]
    value,
    cosines,  # [N, 2 * half]
    sines,
    slots,  # [N] int64
    keys,  # [slots, kv_heads, size], entries `cache_stride` apart
    values,
    output,  # [N, heads, size]
    query_stride,
    key_stride,
    value_stride,
    cache_stride,
    heads,
    size,  # of a head
    half,  # half the number of rotated elements
    HALF: tl.constexpr,  # rounded up
    SIZE: tl.constexpr,  # rounded up
    PARTIAL: tl.constexpr,  # not all elements are rotated
):
    """One token's query head, or its key and value of one cache head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, element = tl.arange(0, HALF), tl.arange(0, SIZE)
    inside, copied = column < half, (element >= half * 2) & (element < size)
    cosines, sines = cosines + token * half * 2, sines + token * half * 2
    if head < heads:
        rotated = output + (token * heads + head) * size
        rotate_head(query + token * query_stride + head * size, rotated, cosines, sines, half, column, inside, element, copied, PARTIAL)
    else:
        within = (head - heads) * size
        entry = tl.load(slots + token) * cache_stride + within
        rotate_head(key + token * key_stride + within, keys + entry, cosines, sines, half, column, inside, element, copied, PARTIAL)
        own = tl.load(value + token * value_stride + within + element, mask=element < size, other=0.0)
        tl.store(values + entry + element, as_written(own, values), mask=element < size)


def rope_and_write_kv(*tensors: Tensor) -> None:
    """The arguments and the output of slot_mapping.rope_and_write_kv, in the order of the program."""
    query, key, value, cosines, _, _, keys, values, _ = tensors
    (tokens, heads, size), rotated = query.shape, cosines.shape[2]
    assert rotated % 2 == 0 and keys.stride() == values.stride() and keys.stride()[1:] == (size, 1), f"keys {keys.stride()}"
    strides, half = [each.stride(0) for each in (query, key, value, keys)], rotated // 2
    constants = {"HALF": triton.next_power_of_2(half), "SIZE": triton.next_power_of_2(size), "PARTIAL": rotated < size}
    rotate_heads[(tokens, heads + key.shape[1])](*tensors, *strides, heads, size, half, **constants, num_warps=1, enable_fp_fusion=False)
