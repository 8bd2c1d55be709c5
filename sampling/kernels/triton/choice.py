"""The Triton programs of masked_argmax and race, and their launches. Imported only where Triton can launch.

The vocabulary of up to hundreds of thousands of tokens is split into tiles, one program each, so that a few rows fill a GPU; a second
launch takes the best of a row's tiles. A candidate is one int64: the value as an ordered integer in the upper half, the inverted id in
the lower, so that the greatest candidate has the greatest value, and among equals the lowest id. NaN is above everything, as for
torch.max.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.rng import BELOW_ONE, GOLDEN, MIX_1, MIX_2, signed

CHOICE_TILE = 4096  # tokens per program
RACE_TILE = 1024

_OK = tl.constexpr(int(MaskStatus.OK))
_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_BELOW_ONE = tl.constexpr(BELOW_ONE)
_TINY = tl.constexpr(2.0**-63)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_LAST_POSITIVE = tl.constexpr((1 << 63) - 1)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def ordered(values, ids):
    """Float32 values and their ids as int64 in the order of (value, -id)."""
    values = tl.where(values == 0, 0.0, values)  # both zeros are equal
    bits = tl.where(values == values, values.to(tl.int32, bitcast=True), _NAN)
    rising = bits ^ ((bits >> 31) & _LAST_ID)
    return (rising.to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)


@triton.jit
def masked_candidates(
    logits,  # [B, Q, >= width]
    masks,  # [R, Q, words] int32
    rows,  # [B] int64; not read unless HAS_ROWS
    constrained,  # [B] bool
    status,  # [B, Q] int64; not read unless HAS_STATUS
    bit_of,  # [width] int64, the mask bit of each logit; not read unless HAS_BITS
    candidates,  # [B * Q, tiles] int64
    positions,
    width,
    logits_row_stride,
    logits_position_stride,
    masks_row_stride,
    masks_position_stride,
    HAS_ROWS: tl.constexpr,
    HAS_STATUS: tl.constexpr,
    HAS_BITS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The best legal token of one tile of WORDS mask words. Logits under a mask word without a bit are not read."""
    line = tl.program_id(0)
    row, position = line // positions, line % positions
    masked = tl.load(constrained + row).to(tl.int32) * width  # where the mask ends: 0 in a row that has none
    closed = False
    if HAS_STATUS:
        closed = (masked > 0) & (tl.load(status + line) != _OK)
    mask_row = row.to(tl.int64)
    if HAS_ROWS:
        mask_row = tl.load(rows + row)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source = masks + mask_row * masks_row_stride + position.to(tl.int64) * masks_position_stride
    bit_index = tl.arange(0, 32)
    ids = words[:, None] * 32 + bit_index[None, :]
    line_logits = logits + row.to(tl.int64) * logits_row_stride + position.to(tl.int64) * logits_position_stride
    if HAS_BITS:
        bit = tl.load(bit_of + ids, mask=ids < width, other=0)
        bits = tl.where(closed, 0, tl.load(source + (bit >> 5), mask=ids < masked, other=-1))
        legal = (((bits >> (bit & 31).to(tl.int32)) & 1) != 0) & (ids < width)
        values = tl.load(line_logits + ids, mask=legal, other=float("-inf")).to(tl.float32)
    else:
        bits = tl.where(closed, 0, tl.load(source + words, mask=words * 32 < masked, other=-1))
        legal = (((bits[:, None] >> bit_index[None, :]) & 1) != 0) & (ids < width)
        if (tl.program_id(1) + 1) * WORDS * 32 <= width:  # whole words at a time: wide loads
            values = tl.load(line_logits + ids, mask=(bits != 0)[:, None], other=float("-inf")).to(tl.float32)
        else:
            values = tl.load(line_logits + ids, mask=legal, other=float("-inf")).to(tl.float32)
    values = tl.where(legal, values, float("-inf"))
    best = tl.max(tl.max(ordered(values, ids), 1), 0)
    tl.store(candidates + line.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def _mix(value):
    """As rng._mix."""
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _chance(key):
    """The upper 63 bits of a key as a number between 0 and 1."""
    return tl.minimum((((key >> 1) & _LAST_POSITIVE).to(tl.float32) + 0.5) * _TINY, _BELOW_ONE)


@triton.jit
def uniform(seed, position, index, SALT: tl.constexpr):
    """As rng.uniform, bit for bit. All int64."""
    return _chance(_mix(_mix(_mix(seed + SALT) + position * _GOLDEN) + index * _GOLDEN))


@triton.jit
def coin(seed, position, SALT: tl.constexpr):
    """As rng.uniform without an index, bit for bit."""
    return _chance(_mix(_mix(seed + SALT) + position * _GOLDEN))


@triton.jit
def exponential(seed, position, index, SALT: tl.constexpr):
    """As rng.exponential but for the last bit: log1p is made of log, corrected for the rounding of 1 - u."""
    chance = uniform(seed, position, index, SALT)
    rest = 1.0 - chance
    rounded = 1.0 - rest  # the number that was subtracted, after rounding
    corrected = -tl.log(rest) * tl.math.div_rn(chance, tl.where(rounded == 0, 1.0, rounded))
    return tl.where(rounded == 0, chance, corrected)


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
def take_best(candidates, best, token, tiles, HAS_BEST: tl.constexpr, TILES: tl.constexpr):
    """A row's best candidate: its id and, if HAS_BEST, its value. candidates [N, tiles]; TILES is a power of two >= tiles."""
    row = tl.program_id(0)
    index = tl.minimum(tl.arange(0, TILES), tiles - 1)
    found = tl.max(tl.load(candidates + row.to(tl.int64) * tiles + index), 0)
    tl.store(token + row, (found & 0xFFFFFFFF) ^ _LAST_ID)
    if HAS_BEST:
        rising = (found >> 32).to(tl.int32)
        tl.store(best + row, (rising ^ ((rising >> 31) & _LAST_ID)).to(tl.float32, bitcast=True))


def masked_argmax(
    logits: Tensor,
    masks: Tensor,
    rows: Tensor | None,
    constrained: Tensor,
    ids: Tensor | None,
    status: Tensor | None,
    best: Tensor,
    token: Tensor,
    *,
    tile: int = CHOICE_TILE,
) -> None:
    batch, positions, width = logits.shape
    candidates = torch.empty(batch * positions, triton.cdiv(width, tile), dtype=torch.int64, device=logits.device)
    masked_candidates[tuple(candidates.shape)](
        logits,
        masks,
        constrained if rows is None else rows,
        constrained,
        constrained if status is None else status,
        constrained if ids is None else ids,
        candidates,
        positions,
        width,
        *logits.stride()[:2],
        *masks.stride()[:2],
        HAS_ROWS=rows is not None,
        HAS_STATUS=status is not None,
        HAS_BITS=ids is not None,
        WORDS=tile // 32,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _take_best(candidates, best, token)


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
    _take_best(candidates, None, token)


def _take_best(candidates: Tensor, best: Tensor | None, token: Tensor) -> None:
    rows, tiles = candidates.shape
    take_best[(rows,)](
        candidates,
        token if best is None else best,
        token,
        tiles,
        HAS_BEST=best is not None,
        TILES=triton.next_power_of_2(tiles),
        num_warps=1,
        enable_fp_fusion=False,
    )
