"""The Triton programs of race, distribution and draw, and their launches. Imported only where Triton can launch.

One number decides which tokens are kept: the smallest kept weight. Weights from 0 to 1 have the order of their bits, so the number is
found digit by digit: first the k-th largest weight by counting, then the smallest weight of the top-p set by summing units. One launch
sorts the weights of every tile of the vocabulary and keeps running sums; then one program per line finds both numbers by searches in
its sorted tiles. Sums are integers, so their order does not matter. The number of steps does not depend on the data. A row without a
filter is not sorted.
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
DIGIT_BITS = 4  # of the smallest kept weight, found at a time
WEIGHT_BITS = 30  # of a float32 from 0 to 1: sign and highest exponent bit are 0

_TEMPERATURE = tl.constexpr(int(Param.TEMPERATURE))
_TOP_K = tl.constexpr(int(Param.TOP_K))
_TOP_P = tl.constexpr(int(Param.TOP_P))
_MIN_P = tl.constexpr(int(Param.MIN_P))
_UNIT = tl.constexpr(2.0**sampler.UNIT_BITS)
_FROM_UNIT = tl.constexpr(2.0**-sampler.UNIT_BITS)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_BLOCK = tl.constexpr(8)  # sorted weights per running sum


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
def _counts_from(weights, edges, width, TILE: tl.constexpr, TILES: tl.constexpr):
    """How many of the sorted weights of each tile are at least each edge, [TILES, edges]."""
    start = tl.arange(0, TILES) * TILE
    length, start = tl.minimum(width - start, TILE)[:, None], start[:, None]
    found = tl.zeros([TILES, edges.shape[0]], tl.int32)
    for step in tl.static_range(32):
        if TILE >> step > 0:
            probe = found + (TILE >> step)
            bits = tl.load(weights + start + probe - 1, mask=probe <= length, other=-1)
            found = tl.where(bits >= edges[None, :], probe, found)
    return found


@triton.jit
def _units_from(weights, running, edges, width, TILE: tl.constexpr, TILES: tl.constexpr):
    """The units of all weights of a line that are at least each edge."""
    count = _counts_from(weights, edges, width, TILE, TILES)
    tile = tl.arange(0, TILES)[:, None]
    block = tl.minimum(count, TILE - 1) // _BLOCK  # of a whole tile the last one
    total = tl.load(running + tile * (TILE // _BLOCK) + block, mask=count > 0, other=0)
    for index in tl.static_range(_BLOCK):
        offset = block * _BLOCK + index
        total += _units(tl.load(weights + tile * TILE + offset, mask=offset < count, other=0))
    return tl.sum(total, 0)


@triton.jit
def _raised(low, sums, target, shift):
    """`low` plus the greatest digit at this shift whose sum is enough. Sums fall with the digit."""
    digit = tl.arange(0, sums.shape[0])
    enough = (digit > 0) & (sums.to(tl.float64) >= target)
    return low + (tl.sum(enough.to(tl.int64), 0) << shift)


@triton.jit
def _edges(low, shift, BITS: tl.constexpr):
    """The weights' bits at which a digit begins. Beyond the int32, above every weight."""
    return tl.minimum(low + (tl.arange(0, 1 << BITS).to(tl.int64) << shift), _LAST_ID).to(tl.int32)


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
    running,  # [B * Q, tiles, TILE / _BLOCK] int64, written: the units before each block of these
    positions,
    width,
    row_stride,
    position_stride,
    row_params_stride,
    weights_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The weights of one tile in falling order, where a row has a filter, and their running sums. TILES is a power of two >= tiles."""
    line = tl.program_id(0).to(tl.int64)
    own = row_params + (line // positions) * row_params_stride
    temperature, top_k, least = tl.load(own + _TEMPERATURE), tl.load(own + _TOP_K), tl.load(own + _MIN_P)
    if temperature > 0:
        best = value_of(_line_maximum(maxima, TILES))
        values = _logits(logits, positions, width, row_stride, position_stride, TILE)
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        bits = tl.where(ids < width, _weight(values, temperature, best), -1)
        if ((top_k > 0) & (top_k < width)) | (tl.load(own + _TOP_P) < 1) | (least > 0):
            bits = tl.sort(bits, descending=True)
        tl.store(weights + line * weights_stride + ids, bits, mask=ids < width)
        sums = tl.sum(tl.reshape(tl.where(bits >= 0, _units(bits), 0), [TILE // _BLOCK, _BLOCK]), 1)
        block = (line * tl.num_programs(1) + tl.program_id(1)) * (TILE // _BLOCK) + tl.arange(0, TILE // _BLOCK)
        tl.store(running + block, tl.cumsum(sums, 0) - sums)


@triton.jit
def find_least(
    row_params,  # [B, >= 4] float32
    weights,  # [B * Q, weights_stride] int32
    running,  # [B * Q, tiles, TILE / _BLOCK] int64
    found,  # [B * Q, 2] int64, written: the bits of the smallest kept weight, and the units of all kept ones
    positions,
    width,
    tiles,
    row_params_stride,
    weights_stride,
    PASSES: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The smallest weight of a line that is kept. TILES is a power of two >= tiles."""
    line = tl.program_id(0).to(tl.int64)
    own = row_params + (line // positions) * row_params_stride
    top_k, top_p, least = tl.load(own + _TOP_K), tl.load(own + _TOP_P), tl.load(own + _MIN_P)
    weights += line * weights_stride
    running += line * tiles * (TILE // _BLOCK)
    low = tl.where(least > 0, least, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    held = tl.zeros([], tl.int64)
    if tl.load(own + _TEMPERATURE) > 0:
        if (top_k > 0) & (top_k < width):
            for step in range(PASSES):
                shift = BITS * (PASSES - 1 - step)
                counts = tl.sum(_counts_from(weights, _edges(low, shift, BITS), width, TILE, TILES), 0)
                low = _raised(low, counts, top_k.to(tl.float64), shift)
        held = tl.max(_units_from(weights, running, _edges(low, 0, 0), width, TILE, TILES), 0)
        if top_p < 1:
            target = top_p.to(tl.float64) * held.to(tl.float64)
            for step in range(PASSES):
                shift = BITS * (PASSES - 1 - step)
                low = _raised(low, _units_from(weights, running, _edges(low, shift, BITS), width, TILE, TILES), target, shift)
            held = tl.max(_units_from(weights, running, _edges(low, 0, 0), width, TILE, TILES), 0)
    tl.store(found + line * 2, low)
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
    lines, tiles, blocks = batch * positions, triton.cdiv(width, tile), tile // _BLOCK.value
    shapes = ((2, lines, tiles), (lines, tiles, blocks), (lines, 2))
    maxima_and_candidates, running, least = (torch.empty(shape, dtype=torch.int64, device=logits.device) for shape in shapes)
    maxima, candidates = maxima_and_candidates[0], maxima_and_candidates[1]
    sizes = (positions, width, *logits.stride()[:2])
    shape = {"TILE": tile, "TILES": triton.next_power_of_2(tiles)}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    tile_maxima[(lines, tiles)](logits, maxima, *sizes, TILE=tile, **options)
    sort_tile[(lines, tiles)](logits, params, maxima, weights, running, *sizes, params.stride(0), weights.stride(0), **shape, **options)
    find_least[(lines,)](
        params,
        weights,
        running,
        least,
        positions,
        width,
        tiles,
        params.stride(0),
        weights.stride(0),
        PASSES=triton.cdiv(WEIGHT_BITS, digit_bits),
        BITS=digit_bits,
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
