"""The Triton programs of reject_sample, and their launches. Imported only where Triton can launch.

One program per row and tile of the vocabulary. Each computes by itself which drafts the random numbers accept, which costs a few loads and
saves a launch. For each certain draft among these, and for the position after them, it races its tile of the target's distribution, or
after a rejection the residual max(p - q, 0). A tile whose residual is zero races the target's distribution instead, as a candidate below
those of all other tiles: it wins only if the residual of the whole row is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stepgraph.sampling.kernels.triton.choice import _ILLEGAL, _LAST_ID, _NONE, _OK, best_of
from stepgraph.sampling.kernels.triton.numeric import coin, exponential
from stepgraph.sampling.rng import GOLDEN, Purpose, signed

REJECTION_TILE = 1024  # tokens per program

_ACCEPT = tl.constexpr(signed(int(Purpose.ACCEPT) * GOLDEN))
_TARGET = tl.constexpr(signed(int(Purpose.TARGET) * GOLDEN))
_FALLBACK = tl.constexpr(-(1 << 63))  # the sign bit, which no candidate of a probability has


@triton.jit
def rejection_candidates(
    target_probs,  # [B, K + 1, >= width] float32
    draft_probs,  # [R, K, >= width] float32
    rows,  # [B] int64
    certain,  # [B, K] bool
    finite,  # [B, K + 1] bool
    drafts,  # [B, K] int64
    draft_count,  # [B] int64
    status,  # [B, K + 1] int64
    seed,  # [B] int64
    length,  # [B] int64
    candidates,  # [B, K + 1, tiles] int64, written
    ends,  # [B] int64, written: drafts before the first that is rejected, where each certain one equals its candidate
    count,  # K
    width,
    target_row_stride,
    target_position_stride,
    draft_row_stride,
    draft_position_stride,
    POSITIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The winners of one tile in the races of a row. POSITIONS is a power of two > K."""
    line = tl.program_id(0)
    row = line.to(tl.int64)
    position = tl.arange(0, POSITIONS)
    inside = position < count
    num_drafts = tl.load(draft_count + row)
    source = draft_probs + tl.load(rows + row) * draft_row_stride
    target = target_probs + row * target_row_stride
    row_seed, first = tl.load(seed + row), tl.load(length + row)

    is_certain = tl.load(certain + row * count + position, mask=inside, other=1).to(tl.int32)
    proposed = tl.maximum(tl.load(drafts + row * count + position, mask=inside, other=0), 0)
    p = tl.load(target + position.to(tl.int64) * target_position_stride + proposed, mask=inside, other=0.0)
    q = tl.load(source + position.to(tl.int64) * draft_position_stride + proposed, mask=inside & (is_certain == 0), other=1.0)
    is_finite = tl.load(finite + row * (count + 1) + position, mask=inside, other=0).to(tl.int32) != 0
    state = tl.load(status + row * (count + 1) + position, mask=inside, other=_NONE)
    next_status = tl.load(status + row * (count + 1) + position + 1, mask=inside, other=_NONE)
    holds = (is_certain != 0) | (coin(row_seed, first + position, _ACCEPT) * q < p)
    holds = holds & is_finite & (position < num_drafts) & inside & (state == _OK) & (next_status != _NONE) & (next_status != _ILLEGAL)
    end = tl.min(tl.where(holds, POSITIONS, position), 0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(ends + row, end)

    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    for index in range(end + 1):
        was_certain = tl.sum(tl.where(position == index, is_certain, 0), 0) != 0  # after the last draft, too
        if (index == end) | was_certain:
            probs = tl.load(target + index * target_position_stride + ids, mask=ids < width, other=0.0)
            residual_end = tl.where((index < num_drafts) & (was_certain == 0), width, 0)  # the end of q: 0 without a rejected draft
            residual = tl.maximum(probs - tl.load(source + index * draft_position_stride + ids, mask=ids < residual_end, other=0.0), 0.0)
            has_residual = tl.max((residual > 0).to(tl.int32), 0) != 0
            rates = tl.where(has_residual, residual, probs)
            if tl.max((rates != 0).to(tl.int32), 0) != 0:
                rates = tl.math.div_rn(rates, exponential(row_seed, first + index, ids.to(tl.int64), _TARGET))
            best = best_of(rates, ids)
            candidate = candidates + (row * (count + 1) + index) * tl.num_programs(1) + tl.program_id(1)
            tl.store(candidate, tl.where(has_residual, best, best | _FALLBACK))


@triton.jit
def rejection_tokens(drafts, certain, candidates, ends, tokens, accepted, count, tiles, POSITIONS: tl.constexpr, TILES: tl.constexpr):
    """The accepted drafts, then the best candidate. tokens [B, K + 1], accepted [B]; POSITIONS and TILES are powers of two."""
    row = tl.program_id(0).to(tl.int64)
    position, tile = tl.arange(0, POSITIONS), tl.minimum(tl.arange(0, TILES), tiles - 1)
    inside, end = position < count, tl.load(ends + row)
    line = candidates + (row * (count + 1) + position.to(tl.int64)) * tiles
    found = tl.max(tl.load(line[:, None] + tile[None, :], mask=(position <= end)[:, None], other=0), 1)
    token = (found & 0xFFFFFFFF) ^ _LAST_ID
    proposed = tl.load(drafts + row * count + position, mask=inside, other=0)
    is_certain = tl.load(certain + row * count + position, mask=inside, other=1).to(tl.int32) != 0
    holds = (position < end) & ((is_certain == 0) | (token == proposed))
    num_accepted = tl.min(tl.where(holds, POSITIONS, position), 0).to(tl.int64)
    last = tl.sum(tl.where(position == num_accepted, token, 0), 0)
    tl.store(tokens + row * (count + 1) + position, tl.where(position < num_accepted, proposed, last), mask=position <= count)
    tl.store(accepted + row, num_accepted)


def reject_sample(*tensors: Any, tile: int = REJECTION_TILE) -> None:
    """The arguments of kernels.rejection.reject_sample, in the order of the program, and its outputs."""
    *inputs, tokens, accepted = tensors
    target_probs, draft_probs, _, certain, _, drafts, *_ = inputs
    batch, positions, width = target_probs.shape
    tiles, ends = triton.cdiv(width, tile), torch.empty_like(accepted)
    candidates = torch.empty(batch, positions, tiles, dtype=torch.int64, device=target_probs.device)
    constants = {"POSITIONS": triton.next_power_of_2(positions), "num_warps": 8}
    sizes = positions - 1, width, *target_probs.stride()[:2], *draft_probs.stride()[:2]
    rejection_candidates[(batch, tiles)](*inputs, candidates, ends, *sizes, TILE=tile, enable_fp_fusion=False, **constants)
    constants["TILES"] = triton.next_power_of_2(tiles)
    rejection_tokens[(batch,)](drafts, certain, candidates, ends, tokens, accepted, positions - 1, tiles, **constants)
