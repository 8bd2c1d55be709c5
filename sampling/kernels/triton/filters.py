"""The Triton programs of race, distribution and draw, and their launches. Imported only where Triton can launch.

One number decides which tokens are kept: the smallest kept weight. Weights from 0 to 1 have the order of their bits, so the number is
found as two: the k-th largest weight by counting, then the smallest weight of the top-p set by summing units. One launch sorts the
weights of every tile of the vocabulary and sums its buckets, one per exponent; then one program per line finds the bucket of each
number, and in the few weights of that bucket its other bits, digit by digit. Sums are integers, so their order does not matter. A row
without a filter is not sorted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling import sampler
from stepgraph.sampling.kernels.triton.choice import ordered, store_best, value_of
from stepgraph.sampling.kernels.triton.numeric import exponential, portable_exp
from stepgraph.sampling.rng import GOLDEN, signed
from stepgraph.sampling.sampler import Param

FILTER_TILE = 2048  # tokens per program
RACE_TILE = 1024
FIND_WARPS = 16  # a line has one program
KEEP_REGISTERS = 64  # no spills; sm_100 would take more
FIND_WINDOW = 1024  # weights of a bucket at a time
DIGIT_BITS = 4  # of the smallest kept weight, found at a time

_TEMPERATURE = tl.constexpr(int(Param.TEMPERATURE))
_TOP_K = tl.constexpr(int(Param.TOP_K))
_TOP_P = tl.constexpr(int(Param.TOP_P))
_MIN_P = tl.constexpr(int(Param.MIN_P))
_UNIT = tl.constexpr(2.0**sampler.UNIT_BITS)
_FROM_UNIT = tl.constexpr(2.0**-sampler.UNIT_BITS)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_BLOCK = tl.constexpr(8)  # sorted weights per sum of units
_BUCKETS = tl.constexpr(128)  # of weights from 0 to 1, by exponent
_BUCKET_SHIFT = tl.constexpr(23)  # a weight's bits without its exponent


@triton.jit
def race_candidates(weights, seed, position, candidates, width, weights_stride, SALT: tl.constexpr, TILE: tl.constexpr):
    """The winner of an exponential race among one tile of tokens. The noise is computed here, if any weight is not 0, and never stored."""
    row = tl.program_id(0)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    rates = tl.load(weights + row.to(tl.int64) * weights_stride + ids, mask=ids < width, other=0.0)
    if tl.max((rates != 0).to(tl.int32), 0) != 0:
        noise = exponential(tl.load(seed + row), tl.load(position + row), ids.to(tl.int64), SALT)
        rates = tl.math.div_rn(rates, noise)
    best = tl.max(ordered(rates, ids), 0)
    tl.store(candidates + row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def _line_maximum(maxima, TILES: tl.constexpr):
    """The greatest candidate of this program's line."""
    tiles = tl.num_programs(1)
    return tl.max(tl.load(maxima + tl.program_id(0).to(tl.int64) * tiles + tl.minimum(tl.arange(0, TILES), tiles - 1)), 0)


@triton.jit
def _weight(logit, temperature, best):
    """The weight's bits."""
    return portable_exp(tl.math.div_rn(logit - best, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _logits(logits, positions, width, row_stride, position_stride, TILE: tl.constexpr):
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
def _filters(own, width):
    """Whether the row of these parameters keeps some of its tokens only."""
    top_k = tl.load(own + _TOP_K)
    return ((top_k > 0) & (top_k < width)) | (tl.load(own + _TOP_P) < 1) | (tl.load(own + _MIN_P) > 0)


@triton.jit
def _counts_from(weights, edges, length, TILE: tl.constexpr):
    """How many of the first `length` of these falling weights are at least each edge."""
    found = tl.zeros(edges.shape, tl.int32)
    for step in tl.static_range(32):
        if TILE >> step > 0:
            probe = found + (TILE >> step)
            found = tl.where(tl.load(weights + probe - 1, mask=probe <= length, other=-1) >= edges, probe, found)
    return found


@triton.jit
def _units_of(weights, blocks, counts):
    """The units of the first weights of a tile, of as many as each count says."""
    block = tl.maximum(counts - 1, 0) // _BLOCK
    total = tl.load(blocks + block)
    for index in tl.static_range(_BLOCK):
        offset = block * _BLOCK + index
        total += _units(tl.load(weights + offset, mask=offset < counts, other=0))
    return total


@triton.jit
def _last_enough(sums, target):
    """The index of the last sum that is enough, 0 if none is. Sums fall with the index."""
    index = tl.arange(0, sums.shape[0])
    return tl.max(tl.where(sums.to(tl.float64) >= target, index, 0), 0)


@triton.jit
def _line_sums(table, tiles, TILES: tl.constexpr):
    """The sums over the tiles of a line, [_BUCKETS] int64."""
    tile = tl.arange(0, TILES)[:, None]
    return tl.sum(tl.load(table + tile * _BUCKETS + tl.arange(0, _BUCKETS)[None, :], mask=tile < tiles, other=0).to(tl.int64), 0)


@triton.jit
def _at(sums, index):
    """This one of the sums, 0 beyond them."""
    return tl.sum(tl.where(tl.arange(0, sums.shape[0]) == index, sums, 0), 0)


@triton.jit
def _bucket_sums(
    weights, counts, bucket, edges, tiles, COUNTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WINDOW: tl.constexpr
):
    """The units, or if COUNTS the number, of the weights of one bucket of a line that are at least each edge. Bucket 0 has only zeros."""
    tile = tl.arange(0, TILES)[:, None]
    ends = counts + tile * _BUCKETS + bucket
    first = tl.load(ends + 1, mask=tile < tl.where(bucket < _BUCKETS - 1, tiles, 0), other=0)
    last = tl.load(ends, mask=tile < tl.where(bucket > 0, tiles, 0), other=0)
    most = tl.max(tl.max(last - first, 1), 0)
    sums = tl.zeros([edges.shape[0]], tl.int64)
    while most > 0:
        at = first + tl.arange(0, WINDOW)[None, :]
        bits = tl.reshape(tl.load(weights + tile * TILE + at, mask=at < last, other=-1), [TILES * WINDOW])
        amounts = tl.full([TILES * WINDOW], 1, tl.int64) if COUNTS else _units(bits)
        sums += tl.sum(tl.where(bits[:, None] >= edges[None, :], amounts[:, None], 0), 0)
        first += WINDOW
        most -= WINDOW
    return sums


@triton.jit
def _least_enough(
    weights,
    counts,
    totals,
    target,
    tiles,
    COUNTS: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The greatest weight of a line from which on the sum is enough, as bits. `totals`: of the weights from each bucket on."""
    bucket = _last_enough(totals, target)
    above, low = _at(totals, bucket + 1), bucket << _BUCKET_SHIFT
    digits = tl.arange(0, 1 << BITS)
    for step in range((_BUCKET_SHIFT + BITS - 1) // BITS):
        shift = (_BUCKET_SHIFT + BITS - 1) // BITS * BITS - BITS * (step + 1)
        sums = above + _bucket_sums(weights, counts, bucket, low + (digits << shift), tiles, COUNTS, TILE, TILES, WINDOW)
        low += _last_enough(sums, target) << shift
    return low


@triton.jit
def _held(weights, counts, totals, low, tiles, TILE: tl.constexpr, TILES: tl.constexpr, WINDOW: tl.constexpr):
    """The units of the weights of a line that are at least `low`."""
    bucket, edge = low >> _BUCKET_SHIFT, low + tl.arange(0, 1)
    return _at(totals, bucket + 1) + tl.max(_bucket_sums(weights, counts, bucket, edge, tiles, False, TILE, TILES, WINDOW), 0)


@triton.jit
def tile_maxima(
    logits,  # [B, Q, >= width]
    maxima,  # [B * Q, tiles] int64, written
    positions,
    width,
    row_stride,
    position_stride,
    TILE: tl.constexpr,
):
    """The greatest logit of each tile and its index, as a candidate of choice.py."""
    line = tl.program_id(0)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    best = tl.max(ordered(_logits(logits, positions, width, row_stride, position_stride, TILE), ids), 0)
    tl.store(maxima + line.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def sort_tile(
    logits,  # [B, Q, >= width]
    row_params,  # [B, >= 4] float32
    maxima,  # [B * Q, tiles] int64
    weights,  # [B * Q, weights_stride] int32, written: the bits of the weights of each tile, the largest first
    blocks,  # [B * Q, tiles, TILE / _BLOCK] int64, written: the units up to the end of each block of these before it
    counts,  # [B * Q, tiles, _BUCKETS] int32, written: how many of these are in each bucket or a higher one
    units,  # [B * Q, tiles, _BUCKETS] int64, written: the units of these
    positions,
    width,
    row_stride,
    position_stride,
    row_params_stride,
    weights_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The weights of one tile in falling order and the sums of its buckets; of a row without a filter the units only, in place of those of
    bucket 0. TILES is a power of two >= tiles."""
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    own = row_params + (line // positions) * row_params_stride
    temperature = tl.load(own + _TEMPERATURE)
    if temperature > 0:
        best = value_of(_line_maximum(maxima, TILES))
        values = _logits(logits, positions, width, row_stride, position_stride, TILE)
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        bits = tl.where(ids < width, _weight(values, temperature, best), -1)
        amounts = tl.where(bits >= 0, _units(bits), 0)
        units += tile * _BUCKETS
        if _filters(own, width):
            bits = tl.sort(bits, descending=True)
            weights += line * weights_stride
            tl.store(weights + ids, bits, mask=ids < width)
            sums = tl.sum(tl.reshape(tl.where(bits >= 0, _units(bits), 0), [TILE // _BLOCK, _BLOCK]), 1)
            blocks += tile * (TILE // _BLOCK)
            tl.store(blocks + tl.arange(0, TILE // _BLOCK), tl.cumsum(sums, 0) - sums)
            tl.debug_barrier()  # what other threads stored is read
            bucket, start = tl.arange(0, _BUCKETS), tl.program_id(1) * TILE
            found = _counts_from(weights + start, bucket << _BUCKET_SHIFT, tl.minimum(width - start, TILE), TILE)
            tl.store(counts + tile * _BUCKETS + bucket, found)
            tl.store(units + bucket, _units_of(weights + start, blocks, found))
        else:
            tl.store(units, tl.sum(amounts, 0))


@triton.jit
def find_least(
    row_params,  # [B, >= 4] float32
    weights,  # [B * Q, weights_stride] int32
    counts,  # [B * Q, tiles, _BUCKETS] int32
    units,  # [B * Q, tiles, _BUCKETS] int64
    found,  # [B * Q, 2] int64, written: the bits of the smallest kept weight, and the units of all kept ones
    positions,
    width,
    tiles,
    row_params_stride,
    weights_stride,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The smallest weight of a line that is kept. TILES is a power of two >= tiles."""
    line = tl.program_id(0).to(tl.int64)
    own = row_params + (line // positions) * row_params_stride
    top_k, top_p = tl.load(own + _TOP_K), tl.load(own + _TOP_P)
    weights += line * weights_stride
    counts += line * tiles * _BUCKETS
    units += line * tiles * _BUCKETS
    low, held = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    if tl.load(own + _TEMPERATURE) > 0:
        if _filters(own, width):
            totals = _line_sums(units, tiles, TILES)
            low = tl.maximum(tl.load(own + _MIN_P), 0.0).to(tl.int32, bitcast=True)
            if (top_k > 0) & (top_k < width):
                numbers = _line_sums(counts, tiles, TILES)
                enough = _least_enough(weights, counts, numbers, top_k.to(tl.float64), tiles, True, BITS, TILE, TILES, WINDOW)
                low = tl.maximum(low, enough)
            held = _held(weights, counts, totals, low, tiles, TILE, TILES, WINDOW)
            if top_p < 1:
                target = top_p.to(tl.float64) * held.to(tl.float64)
                low = tl.maximum(low, _least_enough(weights, counts, totals, target, tiles, False, BITS, TILE, TILES, WINDOW))
                held = _held(weights, counts, totals, low, tiles, TILE, TILES, WINDOW)
        else:
            tile = tl.arange(0, TILES)
            held = tl.sum(tl.load(units + tile * _BUCKETS, mask=tile < tiles, other=0), 0)
    tl.store(found + line * 2, low.to(tl.int64))
    tl.store(found + line * 2 + 1, held)


@triton.jit
def keep(
    logits,  # [B, Q, >= width]
    row_params,  # [B, >= 4] float32
    maxima,  # [B * Q, tiles] int64
    least,  # [B * Q, 2] int64, of find_least
    token_of,  # [width] int64, the index of each probability; not read unless HAS_IDS
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
    HAS_IDS: tl.constexpr,
    DRAWS: tl.constexpr,
    SALT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The probabilities of one tile and, if DRAWS, the winner of its exponential race."""
    line = tl.program_id(0).to(tl.int64)
    low, held = tl.load(least + line * 2), tl.load(least + line * 2 + 1)
    found, temperature = _line_maximum(maxima, TILES), tl.load(row_params + (line // positions) * row_params_stride + _TEMPERATURE)
    best = value_of(found)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    rates = tl.zeros([TILE], tl.float32)
    if (best == best) & (tl.abs(best) != float("inf")):
        if temperature <= 0:
            rates = tl.where(ids == ((found & 0xFFFFFFFF) ^ _LAST_ID), 1.0, rates)
        else:
            weight = _weight(_logits(logits, positions, width, row_stride, position_stride, TILE), temperature, best)
            kept = tl.where(weight >= low, weight.to(tl.float32, bitcast=True), 0.0)
            rates = tl.math.div_rn(kept, held.to(tl.float32) * _FROM_UNIT)
    tokens = tl.load(token_of + ids, mask=ids < width, other=0).to(tl.int32) if HAS_IDS else ids
    target = tl.load(rows + line) if DRAWS else line
    tl.store(probs + target * probs_stride + tokens, rates, mask=ids < width)
    if DRAWS:
        tokens = tl.where(rates > 0, tokens, 0)  # in a row where none can win, the winner is 0
        if tl.max((rates > 0).to(tl.int32), 0) != 0:
            rates = tl.math.div_rn(rates, exponential(tl.load(seed + line), tl.load(position + line), tokens.to(tl.int64), SALT))
        tl.store(candidates + line * tl.num_programs(1) + tl.program_id(1), tl.max(ordered(rates, tokens), 0))


def race(weights: Tensor, seed: Tensor, position: Tensor, purpose: int, token: Tensor, *, tile: int = RACE_TILE) -> None:
    rows, width = weights.shape
    candidates = torch.empty(rows, triton.cdiv(width, tile), dtype=torch.int64, device=weights.device)
    race_candidates[tuple(candidates.shape)](
        weights,
        seed,
        position,
        candidates,
        width,
        weights.stride(0),
        SALT=signed(purpose * GOLDEN),
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    store_best(candidates, None, token)


def distribution(logits: Tensor, params: Tensor, probs: Tensor, *, tile: int = FILTER_TILE, digit_bits: int = DIGIT_BITS) -> None:
    lines = probs.view(-1, probs.shape[2])
    _filter(logits, params, lines, lines.view(torch.int32), None, tile, digit_bits)  # probabilities replace the sorted weights


def draw(logits: Tensor, params: Tensor, *others: Any, tile: int = FILTER_TILE, digit_bits: int = DIGIT_BITS) -> None:
    """The arguments and outputs of kernels.filters.draw."""
    *race, row_probs, ids, token = others
    weights = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
    candidates = _filter(logits[:, None], params, row_probs, weights, (*race, ids), tile, digit_bits)
    store_best(candidates, None, token)


def _filter(
    logits: Tensor,
    params: Tensor,
    probs: Tensor,
    weights: Tensor,
    race: tuple[Any, ...] | None,  # seed, position, purpose, rows, ids
    tile: int,
    digit_bits: int,
) -> Tensor:
    """Write the probabilities; return the candidates of the race if there is one."""
    batch, positions, width = logits.shape
    assert width <= 1 << (62 - sampler.UNIT_BITS), f"{width} weights of 2**{sampler.UNIT_BITS} units might not fit an int64"
    lines, tiles = batch * positions, triton.cdiv(width, tile)
    shapes = ((2, lines, tiles), (lines, tiles, tile // _BLOCK.value), (lines, tiles, _BUCKETS.value), (lines, 2))
    maxima_and_candidates, blocks, units, least = (torch.empty(shape, dtype=torch.int64, device=logits.device) for shape in shapes)
    counts = torch.empty(units.shape, dtype=torch.int32, device=logits.device)
    maxima, candidates = maxima_and_candidates[0], maxima_and_candidates[1]
    sizes = (positions, width, *logits.stride()[:2])
    shape = {"TILE": tile, "TILES": triton.next_power_of_2(tiles)}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    tile_maxima[(lines, tiles)](logits, maxima, *sizes, TILE=tile, **options)
    sums = weights, blocks, counts, units
    sort_tile[(lines, tiles)](logits, params, maxima, *sums, *sizes, params.stride(0), weights.stride(0), **shape, **options)
    find_least[(lines,)](
        params,
        weights,
        counts,
        units,
        least,
        positions,
        width,
        tiles,
        params.stride(0),
        weights.stride(0),
        BITS=digit_bits,
        WINDOW=max(1, FIND_WINDOW // shape["TILES"]),
        **shape,
        num_warps=FIND_WARPS,
    )
    seed, position, purpose, rows, ids = race or (maxima, maxima, 0, maxima, None)
    keep[(lines, tiles)](
        logits,
        params,
        maxima,
        least,
        maxima if ids is None else ids,
        rows,
        seed,
        position,
        candidates,
        probs,
        *sizes,
        params.stride(0),
        probs.stride(0),
        HAS_IDS=ids is not None,
        DRAWS=race is not None,
        SALT=signed(purpose * GOLDEN),
        maxnreg=KEEP_REGISTERS,
        **shape,
        **options,
    )
    return candidates
