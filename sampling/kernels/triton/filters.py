"""The Triton programs of distribution and draw, and their launches. Imported only where Triton can launch.

One number decides which tokens are kept: the smallest kept weight. Weights from 0 to 1 have the order of their bits, so the number is
found as two: the k-th largest weight by counting, then the smallest weight of the top-p set by summing units. One launch sums the
weights by exponent, which decides a short range for that number; the next lists the weights in this range, and the last program of a
line finds the number in its list, digit by digit. Sums are integers, so their order does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling import sampler
from stepgraph.sampling.kernels.triton.choice import _LAST_ID, best_of, store_best, value_of
from stepgraph.sampling.kernels.triton.numeric import exponential, portable_exp
from stepgraph.sampling.rng import GOLDEN, signed
from stepgraph.sampling.sampler import Param

FILTER_TILE = 2048  # tokens per program
KEEP_REGISTERS, FIND_REGISTERS = 64, 144  # sm_100 would take more than 64; without the other bound, ptxas of Triton 3.6 spills on sm_80
FIND_WINDOW = 512  # listed weights at a time
DIGIT_BITS = 5  # bits of the smallest kept weight that are found at a time

_TEMPERATURE = tl.constexpr(int(Param.TEMPERATURE))
_TOP_K = tl.constexpr(int(Param.TOP_K))
_TOP_P = tl.constexpr(int(Param.TOP_P))
_MIN_P = tl.constexpr(int(Param.MIN_P))
_UNIT = tl.constexpr(2.0**sampler.UNIT_BITS)
_FROM_UNIT = tl.constexpr(2.0**-sampler.UNIT_BITS)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1
_WEIGHT_BITS = tl.constexpr(30)  # of a float32 from 0 to 1: sign and highest exponent bit are 0
_EXPONENT = tl.constexpr(23)  # the lowest bit of the exponent
_BUCKETS = tl.constexpr(128)  # of weights, by exponent; bucket 0 contains only the weight 0
_UNIT_BUCKETS = tl.constexpr(32)  # weights below 2**-30 share one
_EDGES = tl.constexpr(4)  # compared at a time; with more, registers spill
_SUMS = tl.constexpr(256)  # per line: of both kinds of buckets, and a counter


@triton.jit
def _line_maximum(maxima, TILES: tl.constexpr):
    tiles = tl.num_programs(1)
    return tl.max(tl.load(maxima + tl.program_id(0).to(tl.int64) * tiles + tl.minimum(tl.arange(0, TILES), tiles - 1)), 0)


@triton.jit
def _weight(logit, temperature, best):
    return portable_exp(tl.math.div_rn(logit - best, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def line_tile(logits, positions, width, row_stride, position_stride, TILE: tl.constexpr):
    """This program's tile of its line, as float32; minus infinity beyond the width."""
    line = tl.program_id(0)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = logits + (line // positions).to(tl.int64) * row_stride + (line % positions).to(tl.int64) * position_stride
    if (tl.program_id(1) + 1) * TILE <= width:  # without a mask: wide loads
        values = tl.load(source + ids).to(tl.float32)
    else:
        values = tl.load(source + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    return values


@triton.jit
def _units(weight_bits):
    return (weight_bits.to(tl.float32, bitcast=True) * _UNIT).to(tl.int64)


@triton.jit
def _bits(logits, row, maxima, positions, width, row_stride, position_stride, TILE: tl.constexpr, TILES: tl.constexpr):
    """The bits of the weights of this program's tile; -1 beyond the width, 0 for NaN, in a row without a finite best logit."""
    values = line_tile(logits, positions, width, row_stride, position_stride, TILE)
    bits = _weight(values, tl.load(row + _TEMPERATURE), value_of(_line_maximum(maxima, TILES)))
    return tl.where(tl.program_id(1) * TILE + tl.arange(0, TILE) < width, tl.where(bits <= _ONE, bits, 0), -1)


@triton.jit
def _has_top_k(row, width):
    top_k = tl.load(row + _TOP_K)
    return (top_k > 0) & (top_k < width)


@triton.jit
def _unit_edge(bucket):
    """The least bits of a weight in this one of _UNIT_BUCKETS."""
    return tl.where(bucket > 0, bucket + (_BUCKETS - _UNIT_BUCKETS), 0) << _EXPONENT


@triton.jit
def _last_enough(sums, target):
    """The index of the last sum that is enough, 0 if none is. Sums fall with the index."""
    return tl.max(tl.where(sums.to(tl.float64) >= target, tl.arange(0, sums.shape[0]), 0), 0)


@triton.jit
def _at(values, index):
    """The value at `index`, 0 beyond the values."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def _listed_range(row, sums, width):
    """The bits from `low` and below `end` among which the smallest kept weight is, and the units of the weights from `end` on."""
    low, end, above = tl.maximum(tl.maximum(tl.load(row + _MIN_P), 0.0).to(tl.int32, bitcast=True), 1), _LAST_ID, tl.zeros([], tl.int64)
    if _has_top_k(row, width):
        counts = tl.load(sums + tl.arange(0, _BUCKETS))
        from_bucket = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        low = tl.maximum(low, _last_enough(from_bucket, tl.load(row + _TOP_K).to(tl.float64)) << _EXPONENT)
    elif tl.load(row + _MIN_P) <= 0:
        units = tl.load(sums + _BUCKETS + tl.arange(0, _UNIT_BUCKETS))
        bucket = _last_enough(units, tl.maximum(tl.load(row + _TOP_P).to(tl.float64) * _at(units, 0).to(tl.float64), 1.0))
        low = tl.maximum(_unit_edge(bucket), 1)
        end, above = _unit_edge(bucket + 1), _at(units, bucket + 1)  # after the last bucket: an edge above every weight, and 0
    return low, end, above


@triton.jit
def _sums_from(listed, edges, COUNTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WINDOW: tl.constexpr):
    """The units, or if COUNTS the number, of the weights of a line that are at least each edge. listed: where the lists of its tiles begin,
    the length of each list, and of the longest."""
    weights, last, max_listed = listed
    tile, first = tl.arange(0, TILES)[:, None], 0
    sums = tl.zeros([edges.shape[0]], tl.int64)
    while first < max_listed:
        at = first + tl.arange(0, WINDOW)[None, :]
        bits = tl.reshape(tl.load(weights + tile * TILE + at, mask=at < last, other=-1), [TILES * WINDOW])
        amounts = tl.full([TILES * WINDOW], 1, tl.int64) if COUNTS else _units(bits)
        sums += tl.sum(tl.where(bits[:, None] >= edges[None, :], amounts[:, None], 0), 0)
        first += WINDOW
    return sums


@triton.jit
def _least_enough(
    listed, above, target, COUNTS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WINDOW: tl.constexpr
):
    """The greatest bits from which on the sum of listed weights, and those above, is enough; 0 if it never is."""
    low = tl.zeros([], tl.int32)
    for step in range((_WEIGHT_BITS + BITS - 1) // BITS):
        shift = tl.maximum(_WEIGHT_BITS - BITS * (step + 1), 0)
        edges = low + (tl.arange(0, 1 << BITS) << shift)
        low += _last_enough(above + _sums_from(listed, edges, COUNTS, TILE, TILES, WINDOW), target) << shift
    return low


@triton.jit
def tile_maxima(
    logits,  # [B, Q, >= width]
    maxima,  # [B * Q, tiles] int64, written
    sums,  # [B * Q, _SUMS] int64, written: zeros
    positions,
    width,
    row_stride,
    position_stride,
    TILE: tl.constexpr,
):
    """The greatest logit of each tile and its index, as a candidate of choice.py."""
    line = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    best = best_of(line_tile(logits, positions, width, row_stride, position_stride, TILE), ids)
    tl.store(maxima + line * tl.num_programs(1) + tl.program_id(1), best)
    if tl.program_id(1) == 0:
        tl.store(sums + line * _SUMS + tl.arange(0, _SUMS), tl.zeros([_SUMS], tl.int64))


@triton.jit
def bucket_sums(
    logits,  # [B, Q, >= width]
    row_params,  # [B, >= 4] float32
    maxima,  # [B * Q, tiles] int64
    sums,  # [B * Q, _SUMS] int64, added to: the numbers of weights by exponent, then the units from each _unit_edge on
    positions,
    width,
    row_stride,
    position_stride,
    row_params_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Sums that locate the smallest kept weight: counts for top-k, units for top-p alone; without a filter only the sum of all units."""
    line = tl.program_id(0).to(tl.int64)
    row = row_params + (line // positions) * row_params_stride
    if tl.load(row + _TEMPERATURE) > 0:
        bits = _bits(logits, row, maxima, positions, width, row_stride, position_stride, TILE, TILES)
        sums += line * _SUMS
        if _has_top_k(row, width):
            counts = tl.histogram(tl.maximum(bits, 0) >> _EXPONENT, _BUCKETS).to(tl.int64)
            index = tl.arange(0, _BUCKETS)
            tl.atomic_add(sums + index, counts, mask=(index > 0) & (counts > 0), sem="relaxed")
        elif tl.load(row + _MIN_P) <= 0:
            units = tl.where(bits >= 0, _units(bits), 0)
            if tl.load(row + _TOP_P) < 1:
                group = tl.arange(0, _EDGES)
                for start in range(0, _UNIT_BUCKETS, _EDGES):
                    edges = _unit_edge(start + group)[None, :]
                    from_edges = tl.sum(tl.where(bits[:, None] >= edges, units[:, None], 0), 0)
                    tl.atomic_add(sums + _BUCKETS + start + group, from_edges, sem="relaxed")
            else:
                tl.atomic_add(sums + _BUCKETS, tl.sum(units, 0), sem="relaxed")


@triton.jit
def find_least(
    logits,  # [B, Q, >= width]
    row_params,  # [B, >= 4] float32
    maxima,  # [B * Q, tiles] int64
    sums,  # [B * Q, _SUMS] int64; the last sum of a line counts its finished programs
    listed,  # [B * Q, listed_stride] int32, written: of each tile, from its start on, the bits of the weights in the listed range
    listed_counts,  # [B * Q, tiles] int32, written
    found,  # [B * Q, 2] int64, written: the bits of the smallest kept weight, and the units of all kept ones
    positions,
    width,
    row_stride,
    position_stride,
    row_params_stride,
    listed_stride,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Lists the few weights among which the smallest kept one is, tile by tile; the last program of a line then finds it."""
    line, tiles = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    row = row_params + (line // positions) * row_params_stride
    top_p, sums = tl.load(row + _TOP_P), sums + line * _SUMS
    limits_head = _has_top_k(row, width) | (tl.load(row + _MIN_P) > 0)  # top-p is then a share of the kept units
    filters = (tl.load(row + _TEMPERATURE) > 0) & (limits_head | (top_p < 1))
    listed, listed_counts = listed + line * listed_stride, listed_counts + line * tiles
    if filters:
        first, end, _ = _listed_range(row, sums, width)
        bits = _bits(logits, row, maxima, positions, width, row_stride, position_stride, TILE, TILES)
        is_listed = ((bits >= first) & (bits < end)).to(tl.int32)
        count = tl.sum(is_listed, 0)
        if count > 0:
            tl.store(listed + tl.program_id(1) * TILE + tl.cumsum(is_listed, 0) - 1, bits, mask=is_listed != 0)
        tl.store(listed_counts + tl.program_id(1), count)
    tl.debug_barrier()  # all threads have stored their part
    if tl.atomic_add(sums + (_SUMS - 1), 1, sem="acq_rel") == tiles - 1:
        tl.debug_barrier()
        low, kept_units = tl.zeros([], tl.int32), tl.load(sums + _BUCKETS)
        if filters:
            _, _, above = _listed_range(row, sums, width)
            tile = tl.arange(0, TILES)[:, None]
            last = tl.load(listed_counts + tile, mask=tile < tiles, other=0)
            lists = listed, last, tl.max(tl.max(last, 1), 0)
            low = tl.maximum(tl.load(row + _MIN_P), 0.0).to(tl.int32, bitcast=True)
            if _has_top_k(row, width):
                top_k = tl.load(row + _TOP_K).to(tl.float64)
                low = tl.maximum(low, _least_enough(lists, above, top_k, True, BITS, TILE, TILES, WINDOW))
            if limits_head:
                kept_units = tl.max(_sums_from(lists, low + tl.arange(0, 1), False, TILE, TILES, WINDOW), 0)
            if top_p < 1:
                target = tl.maximum(top_p.to(tl.float64) * kept_units.to(tl.float64), 1.0)  # top_p may be 0 in float32
                low = tl.maximum(low, _least_enough(lists, above, target, False, BITS, TILE, TILES, WINDOW))
                kept_units = above + tl.max(_sums_from(lists, low + tl.arange(0, 1), False, TILE, TILES, WINDOW), 0)
        tl.store(found + line * 2, low.to(tl.int64))
        tl.store(found + line * 2 + 1, kept_units)


@triton.jit
def keep(
    logits,  # [B, Q, >= width]
    row_params,  # [B, >= 4] float32
    maxima,  # [B * Q, tiles] int64
    least,  # [B * Q, 2] int64, from find_least
    token_of,  # [width] int64, the index of each probability; None: its own
    rows,  # [B * Q] int64, where the probabilities go; this and the next three only where DRAWS
    seed,  # [B * Q] int64
    position,  # [B * Q] int64
    candidates,  # [B * Q, tiles] int64, written
    probs,  # [B * Q or R, >= width] float32, written
    positions,
    width,
    row_stride,
    position_stride,
    row_params_stride,
    probs_stride,
    DRAWS: tl.constexpr,
    SALT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The probabilities of one tile and, if DRAWS, the winner of its exponential race."""
    line = tl.program_id(0).to(tl.int64)
    low, kept_units = tl.load(least + line * 2), tl.load(least + line * 2 + 1)
    line_maximum, temperature = _line_maximum(maxima, TILES), tl.load(row_params + (line // positions) * row_params_stride + _TEMPERATURE)
    best = value_of(line_maximum)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    rates = tl.zeros([TILE], tl.float32)
    if (best == best) & (tl.abs(best) != float("inf")):
        if temperature <= 0:
            rates = tl.where(ids == ((line_maximum & 0xFFFFFFFF) ^ _LAST_ID), 1.0, rates)
        else:
            weight = _weight(line_tile(logits, positions, width, row_stride, position_stride, TILE), temperature, best)
            kept = tl.where(weight >= low, weight.to(tl.float32, bitcast=True), 0.0)
            rates = tl.math.div_rn(kept, kept_units.to(tl.float32) * _FROM_UNIT)
    tokens = tl.load(token_of + ids, mask=ids < width, other=0).to(tl.int32) if token_of is not None else ids
    target = tl.load(rows + line) if DRAWS else line
    tl.store(probs + target * probs_stride + tokens, rates, mask=ids < width)
    if DRAWS:
        tokens = tl.where(rates > 0, tokens, 0)  # in a row where none can win, the winner is 0
        if tl.max((rates > 0).to(tl.int32), 0) != 0:
            rates = tl.math.div_rn(rates, exponential(tl.load(seed + line), tl.load(position + line), tokens.to(tl.int64), SALT))
        tl.store(candidates + line * tl.num_programs(1) + tl.program_id(1), best_of(rates, tokens))


def distribution(logits: Tensor, params: Tensor, probs: Tensor, *, tile: int = FILTER_TILE, digit_bits: int = DIGIT_BITS) -> None:
    lines = probs.view(-1, probs.shape[2])
    _filter(logits, params, lines, lines.view(torch.int32), None, tile, digit_bits)  # probabilities replace the list


def draw(logits: Tensor, params: Tensor, *others: Any, tile: int = FILTER_TILE, digit_bits: int = DIGIT_BITS) -> None:
    *race, row_probs, ids, token = others
    listed = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
    candidates = _filter(logits[:, None], params, row_probs, listed, (*race, ids), tile, digit_bits)
    store_best(candidates, None, token)


def _filter(
    logits: Tensor,
    params: Tensor,
    probs: Tensor,
    listed: Tensor,  # int32, scratch
    race: tuple[Any, ...] | None,  # seed, position, purpose, rows, ids
    tile: int,
    digit_bits: int,
) -> Tensor:
    """Write the probabilities; return the candidates of the race if there is one."""
    batch, positions, width = logits.shape
    assert width <= 1 << (62 - sampler.UNIT_BITS), f"{width} weights of 2**{sampler.UNIT_BITS} units might not fit an int64"
    lines, tiles = batch * positions, triton.cdiv(width, tile)
    shapes = ((2, lines, tiles), (lines, _SUMS.value), (lines, 2))
    maxima_and_candidates, sums, least = (torch.empty(shape, dtype=torch.int64, device=logits.device) for shape in shapes)
    maxima, candidates = maxima_and_candidates[0], maxima_and_candidates[1]
    counts = torch.empty(lines, tiles, dtype=torch.int32, device=logits.device)
    sizes = (positions, width, *logits.stride()[:2])
    shape = {"TILE": tile, "TILES": triton.next_power_of_2(tiles)}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    grid = lines, tiles
    tile_maxima[grid](logits, maxima, sums, *sizes, TILE=tile, **options)
    inputs, sizes, options = (logits, params, maxima), (*sizes, params.stride(0)), options | shape
    bucket_sums[grid](*inputs, sums, *sizes, **options)
    digits = {"BITS": digit_bits, "WINDOW": max(1, FIND_WINDOW // shape["TILES"]), "maxnreg": FIND_REGISTERS}
    find_least[grid](*inputs, sums, listed, counts, least, *sizes, listed.stride(0), **digits, **options)
    seed, position, purpose, rows, ids = race or (maxima, maxima, 0, maxima, None)
    draws = {"DRAWS": race is not None, "SALT": signed(purpose * GOLDEN), "maxnreg": KEEP_REGISTERS}
    keep[grid](*inputs, least, ids, rows, seed, position, candidates, probs, *sizes, probs.stride(0), **draws, **options)
    return candidates
