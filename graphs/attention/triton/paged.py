"""The Triton programs of paged_attention: the keys of a row are split into parts, one program each; a second launch combines the parts.

The launch depends on shapes only, so it can be captured: programs beyond a row's length return at once. The start of a part does not
depend on the batch, so a row's result has the same bits in every bucket. The query heads that share a cache head, and all queries of
a row, are rows of one matrix product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from stepgraph.graphs.attention import paged
from stepgraph.graphs.attention.triton.float8 import as_read

MAX_PARTS = 64
MIN_PART_KEYS = 128  # keys
MAX_HEAD_SIZE = 256
COMBINED_SUMS = 2048  # numbers of parts that one program combines at a time
_LOG2_E = tl.constexpr(1.4426950408889634)
# Triton 3.4 does not compile a branch at run time that changes tensors: with it, attention without a window is a separate program.
_TWO_PROGRAMS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 4))
_COUNTED = tl.constexpr(128)  # positions loaded at a time to find the last one


class Tile(NamedTuple):
    """Work of one program step."""

    rows: int  # of queries
    keys: int
    size: int  # of a head, rounded up
    warps: int
    stages: int  # of keys and values that are loaded ahead
    registers: int | None  # per thread; without a bound, ptxas of Triton 3.6 spills 20 bytes on sm_90


def tile_for(rows: int, size: int, capped: bool = False) -> Tile:
    """Rounds have few rows, and mostly one step per program; prompts have many. On sm_80, 32 rows with large heads and soft-capped
    scores would spill."""
    wide = max(16, triton.next_power_of_2(size))
    most = 64 if wide <= 128 else 16 if capped else 32
    tile_rows = min(most, max(16, triton.next_power_of_2(rows)))
    in_round = tile_rows <= 32 and wide <= 64  # with larger heads only one block would fit on a multiprocessor
    keys = MIN_PART_KEYS if in_round else 64 if wide <= 128 else 32
    return Tile(tile_rows, keys, wide, 4 if wide <= 64 else 8, 1 if in_round else 3, 168 if tile_rows == 32 and wide > 128 else None)


def parts_of(keys: int, least_part: int = MIN_PART_KEYS) -> tuple[int, int]:
    """Keys per part and number of parts for a table of `keys` keys: the same for every row."""
    part = max(least_part, triton.next_power_of_2(triton.cdiv(keys, MAX_PARTS)))
    return part, triton.cdiv(keys, part)


@triton.jit
def last_position(positions, slots, count, PAGE: tl.constexpr):
    """The last position of one row; inert positions, whose slots are in the scratch page, do not count."""
    last = tl.full([], -1, tl.int64)
    for start in range(0, count, _COUNTED):
        index = start + tl.arange(0, _COUNTED)
        slot = tl.load(slots + index, mask=index < count, other=0)
        position = tl.load(positions + index, mask=index < count, other=-1)
        last = tl.maximum(last, tl.max(tl.where(slot >= PAGE, position, -1), 0))
    return last


@triton.jit
def load_pages(table, start, limit, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """Pages of KEYS positions of a row; 0 from `limit` on."""
    index = start + tl.arange(0, KEYS)
    return tl.load(table + index // PAGE, mask=index < limit, other=0)


@triton.jit
def product(left, right, WIDE: tl.constexpr):
    if WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def score(queries, key, scale, cap, WIDE: tl.constexpr):
    """Scores as exponents of two. With a cap, `scale` includes the factor by which exp2 replaces exp in tanh."""
    scores = product(queries, key, WIDE) * scale
    if cap is not None:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def first_weights(sinks, head, counted, ROWS: tl.constexpr):
    """Initial peak and total of a softmax: those of the sinks where `counted`, which holds in one part of the keys only."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + head, mask=counted, other=float("-inf")).to(tl.float32) * _LOG2_E
        total = tl.where(counted, 1.0, 0.0)
    return peak, total


@triton.jit
def weigh(scores, value, peak, total, summed, WIDE: tl.constexpr):
    """Add entries to a running softmax of powers of two. scores [ROWS, KEYS], minus infinity for keys that a query does not see."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(peak - level)
    summed = summed * shrink[:, None] + product(weights.to(value.dtype), value, WIDE)
    return higher, total * shrink + tl.sum(weights, 1), summed


@triton.jit
def attend_part(
    query,  # [B, Q, heads, size]
    keys,  # [slots, kv_heads, size]
    values,
    positions,  # [B, Q] int64
    slots,  # [B, Q] int64
    tables,  # [B, pages] int64
    sinks,  # [heads], or None
    output,  # [B, Q, heads, size], written where there is one part
    sums,  # [B * Q * heads, parts, SIZE] float32, written; None, as the next two, where there is one part
    peaks,  # [B * Q * heads, parts] float32; minus infinity: no key of the part was visible, and its sum is not written
    totals,  # like peaks
    count,  # Q
    heads,
    pages,
    cache_stride,
    part,  # keys of one part
    window,  # 0: none; or None
    scale,  # see `score`
    cap,  # or None
    size: tl.constexpr,
    GROUPS: tl.constexpr,  # query heads of one cache head
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: Triton's interpreter treats bfloat16 as integers
):
    """One part of the keys of one row and cache head, for ROWS of its queries.

    A round has few keys per program, so dependent loads determine its time: each load is issued before the first use of another.
    """
    batch, block, parts = tl.program_id(0), tl.program_id(2), tl.cdiv(pages * PAGE, part)
    head, part_index = tl.program_id(1) % (heads // GROUPS), tl.program_id(1) // (heads // GROUPS)
    row, column = block * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    is_query = row < count * GROUPS
    output_row = (batch * count + row // GROUPS).to(tl.int64) * heads + head * GROUPS + row % GROUPS
    begin, table = part_index * part, tables + batch * pages
    page = load_pages(table, begin, pages * PAGE, KEYS, PAGE)
    position = tl.load(positions + batch * count + row // GROUPS, mask=is_query, other=-1).to(tl.int32)
    queries = tl.load(query + output_row[:, None] * size + column[None, :], mask=is_query[:, None] & (column < size)[None, :], other=0.0)
    last = last_position(positions + batch * count, slots + batch * count, count, PAGE).to(tl.int32)

    end = tl.minimum(tl.minimum(last, tl.max(position, 0)) + 1, begin + part)
    if window is not None:  # noqa: SIM102  # at compile time; the next condition may be one at run time
        if _TWO_PROGRAMS or window > 0:
            begin = tl.maximum(begin, (tl.min(tl.where(is_query, position, last), 0) - window + 1) // KEYS * KEYS)
            page = load_pages(table, begin, end, KEYS, PAGE)
    peak, total = first_weights(sinks, head * GROUPS + row % GROUPS, row < tl.where(part_index == 0, count * GROUPS, 0), ROWS)
    summed = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(begin, end, KEYS):
        key_index = start + tl.arange(0, KEYS)
        in_range = key_index < end
        entry = (page * PAGE + key_index % PAGE) * cache_stride + head * size
        key = tl.load(keys + entry[None, :] + column[:, None], mask=in_range[None, :] & (column < size)[:, None], other=0)
        value = tl.load(values + entry[:, None] + column[None, :], mask=in_range[:, None] & (column < size)[None, :], other=0)
        page = load_pages(table, start + KEYS, end, KEYS, PAGE)
        visible = in_range[None, :] & (key_index[None, :] <= position[:, None])
        if window is not None:  # noqa: SIM102
            if _TWO_PROGRAMS or window > 0:
                visible = visible & (key_index[None, :] > position[:, None] - window)
        scores = tl.where(visible, score(queries, as_read(key, queries), scale, cap, WIDE), float("-inf"))
        peak, total, summed = weigh(scores, as_read(value, queries), peak, total, summed, WIDE)

    if sums is None:
        result = summed / tl.where(total == 0, 1.0, total)[:, None]
        in_output = is_query[:, None] & (column < size)[None, :]
        tl.store(output + output_row[:, None] * size + column[None, :], result.to(output.dtype.element_ty), mask=in_output)
    else:
        peak = tl.where(total == total, peak, total)  # a maximum may drop NaN: keep it
        written = is_query & (peak != float("-inf"))
        tl.store(peaks + output_row * parts + part_index, peak, mask=is_query)
        tl.store(totals + output_row * parts + part_index, total, mask=written)
        tl.store(sums + (output_row[:, None] * parts + part_index) * SIZE + column[None, :], summed, mask=written[:, None])


@triton.jit
def combine_parts(sums, peaks, totals, output, parts, size: tl.constexpr, PARTS: tl.constexpr, COMBINED: tl.constexpr, SIZE: tl.constexpr):
    """Combine the parts of one query and head by their weights, COMBINED at a time: a loop over parts would wait for the loads of each. The
    parts after the last one with a visible key are not read. PARTS is a power of two >= parts."""
    output_row = tl.program_id(0).to(tl.int64)
    part_index, column = tl.arange(0, PARTS), tl.arange(0, SIZE)
    peak = tl.load(peaks + output_row * parts + part_index, mask=part_index < parts, other=float("-inf"))
    highest = tl.max(peak, 0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.load(totals + output_row * parts + part_index, mask=peak != float("-inf"), other=0.0)
    total_weight = tl.sum(total * tl.exp2(peak - level), 0)
    last = tl.max(tl.where(peak != float("-inf"), part_index, -1), 0)
    summed = tl.zeros([COMBINED, SIZE], tl.float32)
    for first in range(0, last + 1, COMBINED):
        part = first + tl.arange(0, COMBINED)
        part_peak = tl.load(peaks + output_row * parts + part, mask=part <= last, other=float("-inf"))
        written = (part_peak != float("-inf"))[:, None] & (column < size)[None, :]
        part_sums = tl.load(sums + (output_row * parts + part)[:, None] * SIZE + column[None, :], mask=written, other=0.0)
        summed += part_sums * tl.exp2(part_peak - level)[:, None]
    result = tl.sum(summed, 0) / tl.where(total_weight == 0, 1.0, total_weight)
    tl.store(output + output_row * size + column, result.to(output.dtype.element_ty), mask=column < size)


def paged_attention(*arguments: Any, least_part: int = MIN_PART_KEYS) -> None:
    *tensors, page_size, window, scale, softcap, sinks, output = arguments
    query, keys, values, _, _, tables = tensors
    if query.dtype is torch.float32 and query.is_cuda:  # products of float32 would use no tensor cores, and spill
        return paged.paged_attention.run_reference(*arguments)
    batch, count, heads, size = query.shape
    if size > MAX_HEAD_SIZE:
        raise ValueError(f"attention: got heads of size {size}, expected at most {MAX_HEAD_SIZE} for the Triton program")
    assert keys.stride() == values.stride() and keys.stride()[1:] == (size, 1), f"keys {keys.stride()}, values {values.stride()}"
    kv_heads, pages, groups = keys.shape[1], tables.shape[1], heads // keys.shape[1]
    tile = tile_for(groups * count, size, softcap != 0)
    part, parts = parts_of(pages * page_size, least_part)
    lines, sizes = batch * count * heads, (tile.size, 1, 1)  # of sums, peaks and totals
    partials = [torch.empty(lines, parts, each, dtype=torch.float32, device=query.device) if parts > 1 else None for each in sizes]
    scales = scale * _LOG2_E.value * (2 / softcap if softcap else 1), softcap * _LOG2_E.value if softcap else None
    numbers = count, heads, pages, keys.stride(0), part, window or None if _TWO_PROGRAMS.value else window, *scales
    constants = {"size": size, "GROUPS": groups, "PAGE": page_size, "ROWS": tile.rows, "KEYS": tile.keys, "SIZE": tile.size}
    constants |= {"WIDE": query.device.type == "cpu", "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    grid = (batch, kv_heads * parts, triton.cdiv(groups * count, tile.rows))  # CUDA limits the last two to 65,535
    attend_part[grid](*tensors, sinks, output, *partials, *numbers, **constants, enable_fp_fusion=False)
    if parts > 1:
        width = triton.next_power_of_2(parts)
        constants = {"size": size, "PARTS": width, "COMBINED": min(width, COMBINED_SUMS // tile.size), "SIZE": tile.size, "num_warps": 2}
        combine_parts[(lines,)](*partials, output, parts, **constants, enable_fp_fusion=False)
