"""The Triton programs of reject_sample, and their launches. Imported only where Triton can launch.

One program per row and tile of the vocabulary. Each computes by itself how many drafts are accepted, which costs a few loads and saves
a launch, then races the residual max(p - q, 0) of its tile. A tile whose residual is zero races the target's distribution instead, as a
candidate below those of all other tiles: it wins only if the residual of the whole row is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels.triton.choice import _LAST_ID, best_of
from stepgraph.sampling.kernels.triton.numeric import coin, exponential
from stepgraph.sampling.rng import GOLDEN, Purpose, signed

REJECTION_TILE = 1024  # tokens per program

_OK = tl.constexpr(int(MaskStatus.OK))
_NONE = tl.constexpr(int(MaskStatus.NONE))
_ILLEGAL = tl.constexpr(int(MaskStatus.ILLEGAL))
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
    candidates,  # [B, tiles] int64, written
    accepted,  # [B] int64, written
    count,  # K
    width,
    target_row_stride,
    target_position_stride,
    draft_row_stride,
    draft_position_stride,
    POSITIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many drafts of a row are accepted, and the winner of one tile in the race for the next token. POSITIONS is a power of two > K."""
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
    is_accepted = (coin(row_seed, first + position, _ACCEPT) * q < p) & is_finite & (position < num_drafts) & inside
    is_accepted = is_accepted & (state == _OK) & (next_status != _NONE) & (next_status != _ILLEGAL)
    count_accepted = tl.min(tl.where(is_accepted, POSITIONS, position), 0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(accepted + row, count_accepted)

    residual_end = tl.where((count_accepted < num_drafts) & (count > 0), width, 0)  # the end of q: 0 without a rejected draft
    rejected = tl.minimum(count_accepted, count - 1)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    probs = tl.load(target + count_accepted * target_position_stride + ids, mask=ids < width, other=0.0)
    draft, was_certain = tl.sum(tl.where(position == rejected, proposed, 0), 0), tl.sum(tl.where(position == rejected, is_certain, 0), 0)
    draft_prob = tl.load(source + rejected * draft_position_stride + ids, mask=ids < tl.where(was_certain == 0, residual_end, 0), other=0.0)
    draft_prob = tl.where((ids == draft) & (ids < residual_end * was_certain), 1.0, draft_prob)
    residual = tl.maximum(probs - draft_prob, 0.0)
    has_residual = tl.max((residual > 0).to(tl.int32), 0) != 0
    rates = tl.where(has_residual, residual, probs)
    if tl.max((rates != 0).to(tl.int32), 0) != 0:
        rates = tl.math.div_rn(rates, exponential(row_seed, first + count_accepted, ids.to(tl.int64), _TARGET))
    best = best_of(rates, ids)
    tl.store(candidates + row * tl.num_programs(1) + tl.program_id(1), tl.where(has_residual, best, best | _FALLBACK))


@triton.jit
def rejection_tokens(drafts, candidates, accepted, tokens, count, tiles, POSITIONS: tl.constexpr, TILES: tl.constexpr):
    """The accepted drafts, then the best candidate. tokens [B, K + 1]; POSITIONS and TILES are powers of two."""
    row = tl.program_id(0).to(tl.int64)
    found = tl.max(tl.load(candidates + row * tiles + tl.minimum(tl.arange(0, TILES), tiles - 1)), 0)
    token = (found & 0xFFFFFFFF) ^ _LAST_ID
    position = tl.arange(0, POSITIONS)
    proposed = tl.load(drafts + row * count + position, mask=position < count, other=0)
    tl.store(tokens + row * (count + 1) + position, tl.where(position < tl.load(accepted + row), proposed, token), mask=position <= count)


def reject_sample(*tensors: Any, tile: int = REJECTION_TILE) -> None:
    """The arguments of kernels.rejection.reject_sample, in the order of the program, and its outputs."""
    *inputs, tokens, accepted = tensors
    target_probs, draft_probs, _, _, _, drafts, *_ = inputs
    batch, positions, width = target_probs.shape
    candidates = torch.empty(batch, triton.cdiv(width, tile), dtype=torch.int64, device=target_probs.device)
    constants = {"POSITIONS": triton.next_power_of_2(positions), "enable_fp_fusion": False}
    sizes = positions - 1, width, *target_probs.stride()[:2], *draft_probs.stride()[:2]
    rejection_candidates[tuple(candidates.shape)](*inputs, candidates, accepted, *sizes, TILE=tile, num_warps=4, **constants)
    tiles = candidates.shape[1]
    constants |= {"TILES": triton.next_power_of_2(tiles), "num_warps": 1}
    rejection_tokens[(batch,)](drafts, candidates, accepted, tokens, positions - 1, tiles, **constants)
