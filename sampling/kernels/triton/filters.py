"""The Triton programs of race, distribution and draw, and their launches. Imported only where Triton can launch.

One number decides which tokens are kept: the smallest kept weight. It is found without sorting. Weights from 0 to 1 have the order
of their bits, so the number is found digit by digit: first the k-th largest weight by counting, then the smallest weight of the
top-p set by summing units. A pass is one launch with a program per line and tile of the vocabulary. For each value of one digit it sums
the tokens of its tile that are at least that large; in the next pass every program adds up the tiles of its line and continues from
there. Sums are integers, so their order does not matter. The number of passes does not depend on the data; a tile that cannot
contribute, or of a row without the filter, is not read.
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
DIGIT_BITS = 3
WEIGHT_BITS = 30  # of a float32 from 0 to 1: sign and highest exponent bit are 0

_TEMPERATURE = tl.constexpr(int(Param.TEMPERATURE))
_TOP_K = tl.constexpr(int(Param.TOP_K))
_TOP_P = tl.constexpr(int(Param.TOP_P))
_MIN_P = tl.constexpr(int(Param.MIN_P))
_UNIT = tl.constexpr(2.0**sampler.UNIT_BITS)
_FROM_UNIT = tl.constexpr(2.0**-sampler.UNIT_BITS)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_LOW = tl.constexpr(0)  # columns of the state: the smallest weight that may be kept, as bits
_HELD = tl.constexpr(1)  # the units at or above it
_TOTAL = tl.constexpr(2)  # the units before top-p
_COLUMNS = tl.constexpr(3)


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
def _tile_maximum(maxima):
    return value_of(tl.load(maxima + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)))


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
def _has_filter(own, step, width, PASSES: tl.constexpr):
    """Whether a row has the filter that pass `step` works on."""
    top_k = tl.load(own + _TOP_K)
    counts = (top_k > 0) & (top_k < width)
    return ((step < PASSES) & counts) | ((step >= PASSES) & (tl.load(own + _TOP_P) < 1))


@triton.jit
def _state(state, sums, own, line, lines, step, width, PASSES: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """The state of a line at the start of pass `step`: low, held, total. Computed from the state and the sums of the pass before."""
    BINS: tl.constexpr = 1 << BITS
    tiles = tl.num_programs(1)
    if step == 0:
        least = tl.load(own + _MIN_P)
        low, held, total = tl.where(least > 0, least, 0.0).to(tl.int32, bitcast=True), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    else:
        before = step - 1
        earlier = state + (before.to(tl.int64) * lines + line) * _COLUMNS
        low, held, total = tl.load(earlier + _LOW).to(tl.int32), tl.load(earlier + _HELD), tl.load(earlier + _TOTAL)
        active, first = _has_filter(own, before, width, PASSES), before == PASSES
        bins, tile = tl.arange(0, BINS), tl.arange(0, TILES)
        index = ((before & 1).to(tl.int64) * lines + line) * tiles + tile
        written = tl.where(active | first, tiles, 0)
        found = tl.load(sums + index[:, None] * BINS + bins[None, :], mask=(tile < written)[:, None], other=0)
        found = tl.sum(found, 0)
        if first:
            total = tl.sum(tl.where(bins == 0, found, 0), 0)
            held = total
        target = tl.load(own + _TOP_K).to(tl.float64)
        if before >= PASSES:
            target = tl.load(own + _TOP_P).to(tl.float64) * total.to(tl.float64)
        enough = (bins > 0) & (found.to(tl.float64) >= tl.where(active, target, float("inf")))
        digit = tl.sum(enough.to(tl.int32), 0)  # sums fall with the digit: the greatest that is enough
        low += digit << (BITS * (PASSES - 1 - before % PASSES))
        held = tl.where(digit > 0, tl.sum(tl.where(bins == digit, found, 0), 0), held)
    return low, held, total


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


@triton.jit(do_not_specialize=["step"])
def narrow(
    logits,  # [B, Q, >= width]
    row_params,  # [B, >= 4] float32
    maxima,  # [B * Q, tiles] int64
    state,  # [passes + 1, B * Q, 3] int64, line `step` written
    sums,  # [2, B * Q, tiles, 2 ** BITS] int64, half of them written
    step,  # of this pass: the first PASSES count, the others sum units
    positions,
    width,
    row_stride,
    position_stride,
    row_params_stride,
    PASSES: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One digit of the smallest kept weight: the sum that each of its values would keep of one tile. TILES is a power of two >= tiles."""
    BINS: tl.constexpr = 1 << BITS
    line, lines, tiles = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.num_programs(1)
    own = row_params + (line // positions) * row_params_stride
    low, held, total = _state(state, sums, own, line, lines, step, width, PASSES, BITS, TILES)
    if tl.program_id(1) == 0:
        kept = state + (step.to(tl.int64) * lines + line) * _COLUMNS
        tl.store(kept + _LOW, low.to(tl.int64))
        tl.store(kept + _HELD, held)
        tl.store(kept + _TOTAL, total)

    first, temperature = step == PASSES, tl.load(own + _TEMPERATURE)
    if (_has_filter(own, step, width, PASSES) | first) & (temperature > 0):
        shift = BITS * (PASSES - 1 - step % PASSES)
        best = value_of(_line_maximum(maxima, TILES))
        top = _weight(_tile_maximum(maxima), temperature, best)
        half = sums + (((step & 1).to(tl.int64) * lines + line) * tiles + tl.program_id(1)) * BINS
        if top.to(tl.int64) >= low + tl.where(first, 0, tl.full([], 1, tl.int64) << shift):
            values = _logits(logits, positions, width, row_stride, position_stride, TILE)
            weight = _weight(values, temperature, best)
            units = (weight.to(tl.float32, bitcast=True) * _UNIT).to(tl.int64)
            each = tl.where(step < PASSES, 1, units)
            for digit in tl.static_range(BINS):
                edge = tl.minimum(low + (tl.full([], digit, tl.int64) << shift), _LAST_ID)  # above every weight
                tl.store(half + digit, tl.sum(tl.where(weight >= edge.to(tl.int32), each, 0), 0))
        else:
            tl.store(half + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))


@triton.jit
def keep(
    logits,  # [B, Q, >= width]
    row_params,  # [B, >= 4] float32
    maxima,  # [B * Q, tiles] int64
    state,  # [passes + 1, B * Q, 3] int64
    sums,  # [2, B * Q, tiles, 2 ** BITS] int64
    token_of,  # [width] int64, the index of each probability; not read unless HAS_IDS
    seed,  # [B * Q] int64; this and the next two only where DRAWS
    position,  # [B * Q] int64
    candidates,  # [B * Q, tiles] int64, written
    probs,  # [B * Q, probs_stride] float32, written
    positions,
    width,
    row_stride,
    position_stride,
    row_params_stride,
    probs_stride,
    HAS_IDS: tl.constexpr,
    DRAWS: tl.constexpr,
    SALT: tl.constexpr,
    PASSES: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The probabilities of one tile and, if DRAWS, the winner of its exponential race. A tile without a kept weight is not read."""
    line, lines, tiles = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.num_programs(1)
    own = row_params + (line // positions) * row_params_stride
    step = tl.full([], 2 * PASSES, tl.int32)
    low, held, _ = _state(state, sums, own, line, lines, step, width, PASSES, BITS, TILES)
    found, temperature = _line_maximum(maxima, TILES), tl.load(own + _TEMPERATURE)
    best = value_of(found)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    rates = tl.zeros([TILE], tl.float32)
    if (best == best) & (tl.abs(best) != float("inf")):
        if temperature <= 0:
            rates = tl.where(ids == ((found & 0xFFFFFFFF) ^ _LAST_ID), 1.0, rates)
        else:
            if _weight(_tile_maximum(maxima), temperature, best) >= low:
                values = _logits(logits, positions, width, row_stride, position_stride, TILE)
                weight = _weight(values, temperature, best)
                kept = tl.where(weight >= low, weight.to(tl.float32, bitcast=True), 0.0)
                rates = tl.math.div_rn(kept, held.to(tl.float32) * _FROM_UNIT)
    tokens = tl.load(token_of + ids, mask=ids < width, other=0) if HAS_IDS else ids.to(tl.int64)
    tl.store(probs + line * probs_stride + tokens, rates, mask=ids < width)
    if DRAWS:
        tokens = tl.where(rates > 0, tokens, 0)  # in a row where none can win, the winner is 0
        if tl.max((rates > 0).to(tl.int32), 0) != 0:
            rates = tl.math.div_rn(rates, exponential(tl.load(seed + line), tl.load(position + line), tokens, SALT))
        tl.store(candidates + line * tiles + tl.program_id(1), tl.max(ordered(rates, tokens.to(tl.int32)), 0))


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
    _filter(logits, params, probs, None, tile, digit_bits)


def draw(logits: Tensor, params: Tensor, *others: Any, tile: int = FILTER_TILE, digit_bits: int = DIGIT_BITS) -> None:
    """The arguments and outputs of kernels.filters.draw."""
    seed, position, purpose, ids, _, probs, token = others
    if ids is not None:
        probs.zero_()
    candidates = _filter(logits[:, None], params, probs, (seed, position, purpose, ids), tile, digit_bits)
    store_best(candidates, None, token)


def _filter(
    logits: Tensor, params: Tensor, probs: Tensor, race: tuple[Tensor, Tensor, int, Tensor | None] | None, tile: int, digit_bits: int
) -> Tensor:
    """Write the probabilities; return the candidates of the race if there is one."""
    batch, positions, width = logits.shape
    assert width <= 1 << (62 - sampler.UNIT_BITS), f"{width} weights of 2**{sampler.UNIT_BITS} units might not fit an int64"
    lines, tiles, passes = batch * positions, triton.cdiv(width, tile), triton.cdiv(WEIGHT_BITS, digit_bits)
    shapes = ((2, lines, tiles), (2 * passes + 1, lines, 3), (2, lines, tiles, 1 << digit_bits))
    maxima_and_candidates, state, sums = (torch.empty(shape, dtype=torch.int64, device=logits.device) for shape in shapes)
    maxima, candidates = maxima_and_candidates[0], maxima_and_candidates[1]
    sizes = (positions, width, *logits.stride()[:2])
    digits = {"PASSES": passes, "BITS": digit_bits, "TILE": tile, "TILES": triton.next_power_of_2(tiles)}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    tile_maxima[(lines, tiles)](logits, maxima, *sizes, TILE=tile, **options)
    for step in range(2 * passes):
        narrow[(lines, tiles)](logits, params, maxima, state, sums, step, *sizes, params.stride(0), **digits, **options)
    seed, position, purpose, ids = race or (maxima, maxima, 0, None)
    keep[(lines, tiles)](
        logits,
        params,
        maxima,
        state,
        sums,
        maxima if ids is None else ids,
        seed,
        position,
        candidates,
        probs,
        *sizes,
        params.stride(0),
        probs.shape[-1],
        HAS_IDS=ids is not None,
        DRAWS=race is not None,
        SALT=signed(purpose * GOLDEN),
        **digits,
        **options,
    )
    return candidates
