"""The Triton programs of masked_argmax, and their launches. Imported only where Triton can launch.

The vocabulary of up to hundreds of thousands of tokens is split into tiles, one program each, so that a few rows fill a GPU; a second
launch takes the best of a row's tiles. A candidate is one int64: the value as an ordered integer in the upper half, the inverted id in
the lower, so that the greatest candidate has the greatest value, and among equals the lowest id. NaN is above everything, as for
torch.max.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus

CHOICE_TILE = 4096  # tokens per program

_OK = tl.constexpr(int(MaskStatus.OK))
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FC00000)
_TOP = tl.constexpr(0x7F800000)  # the rank of plus infinity; a NaN is above
_BOTTOM = tl.constexpr(-0x7F800001)  # minus infinity


@triton.jit
def rank(values):
    """Float32 values as int32 that order like them, NaN above everything."""
    bits = tl.where(values == values, values.to(tl.int32, bitcast=True), _NAN)
    return bits ^ ((bits >> 31) & _LAST_ID)


@triton.jit
def best_of(values, ids):
    """The candidate of the greatest of these values, of all dimensions. Two reductions of int32: one of int64 takes more instructions."""
    ranks = rank(tl.where(values == 0, 0.0, values))  # both zeros are equal
    best = tl.max(ranks)
    return (best.to(tl.int64) << 32) | (tl.min(tl.where(ranks == best, ids, _LAST_ID)) ^ _LAST_ID).to(tl.int64)


@triton.jit
def value_of(candidate):
    """The value of a candidate."""
    rising = (candidate >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & _LAST_ID)).to(tl.float32, bitcast=True)


@triton.jit
def masked_candidates(
    logits,  # [B, Q, >= width]
    masks,  # [R, Q, words] int32, or None, as `constrained`
    rows,  # [B] int64, or None
    constrained,  # [B] bool
    bit_of,  # [width] int64, the mask bit of each logit, or None
    status,  # [B, Q] int64, or None
    candidates,  # [B * Q, tiles] int64
    positions,
    width,
    logits_row_stride,
    logits_position_stride,
    masks_row_stride,
    masks_position_stride,
    WORDS: tl.constexpr,
):
    """The best legal token of one tile of WORDS mask words. Logits under a mask word without a bit are not read."""
    line = tl.program_id(0)
    row, position = line // positions, line % positions
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bit_index = tl.arange(0, 32)
    ids = words[:, None] * 32 + bit_index[None, :]
    line_logits = logits + row.to(tl.int64) * logits_row_stride + position.to(tl.int64) * logits_position_stride
    if masks is not None:
        masked = tl.load(constrained + row).to(tl.int32) * width  # where the mask ends: 0 in a row that has none
        closed = False
        if status is not None:
            closed = (masked > 0) & (tl.load(status + line) != _OK)
        mask_row = row.to(tl.int64)
        if rows is not None:
            mask_row = tl.load(rows + row)
        source = masks + mask_row * masks_row_stride + position.to(tl.int64) * masks_position_stride
    whole = (tl.program_id(1) + 1) * WORDS * 32 <= width  # a mask per word, or none, leaves wide loads
    if masks is None:
        legal = ids < width
        if whole:
            values = tl.load(line_logits + ids).to(tl.float32)
        else:
            values = tl.load(line_logits + ids, mask=legal, other=float("-inf")).to(tl.float32)
    elif bit_of is not None:
        bit = tl.load(bit_of + ids, mask=ids < width, other=0)
        bits = tl.where(closed, 0, tl.load(source + (bit >> 5), mask=ids < masked, other=-1))
        legal = (((bits >> (bit & 31).to(tl.int32)) & 1) != 0) & (ids < width)
        values = tl.load(line_logits + ids, mask=legal, other=float("-inf")).to(tl.float32)
    else:
        bits = tl.where(closed, 0, tl.load(source + words, mask=words * 32 < masked, other=-1))
        legal = (((bits[:, None] >> bit_index[None, :]) & 1) != 0) & (ids < width)
        if whole:
            values = tl.load(line_logits + ids, mask=(bits != 0)[:, None], other=float("-inf")).to(tl.float32)
        else:
            values = tl.load(line_logits + ids, mask=legal, other=float("-inf")).to(tl.float32)
    values = tl.where(legal, values, float("-inf"))
    tl.store(candidates + line.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), best_of(values, ids))


@triton.jit
def is_finite(ranked):
    return (ranked > _BOTTOM) & (ranked < _TOP)


@triton.jit
def take_best(candidates, finite, token, tiles, TILES: tl.constexpr):
    """A row's best candidate: its id and, unless `finite` is None, whether its value is finite. candidates [N, tiles]; TILES is a power of
    two >= tiles."""
    row = tl.program_id(0)
    index = tl.minimum(tl.arange(0, TILES), tiles - 1)
    found = tl.max(tl.load(candidates + row.to(tl.int64) * tiles + index), 0)
    tl.store(token + row, (found & 0xFFFFFFFF) ^ _LAST_ID)
    if finite is not None:
        tl.store(finite + row, is_finite((found >> 32).to(tl.int32)))


def masked_argmax(*tensors: Any, tile: int = CHOICE_TILE) -> None:
    """The arguments of kernels.choice.masked_argmax, in the order of the program, and its outputs."""
    *inputs, finite, token = tensors
    logits, masks, *_ = inputs
    batch, positions, width = logits.shape
    candidates = torch.empty(batch * positions, triton.cdiv(width, tile), dtype=torch.int64, device=logits.device)
    sizes = positions, width, *logits.stride()[:2], *(masks.stride()[:2] if masks is not None else (0, 0))
    grid = tuple(candidates.shape)
    masked_candidates[grid](*inputs, candidates, *sizes, WORDS=tile // 32, num_warps=8, enable_fp_fusion=False)
    store_best(candidates, finite, token)


def store_best(candidates: Tensor, finite: Tensor | None, token: Tensor) -> None:
    rows, tiles = candidates.shape
    width = triton.next_power_of_2(tiles)
    take_best[(rows,)](candidates, finite, token, tiles, TILES=width, num_warps=1, enable_fp_fusion=False)
