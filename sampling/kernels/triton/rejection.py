"""The Triton programs of exact rejection, and how they are launched. Imported only where Triton is: `register.py` decides.

One program per row and tile of the vocabulary. Each decides for itself how many drafts hold, which costs it a few loads and
saves a launch, then races what is left over in its tile. A tile where nothing is left over races the target's distribution
instead, as a candidate below every other tile's: it wins only where nothing is left over in the whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels.triton.choice import coin, exponential, ordered
from stepgraph.sampling.rng import GOLDEN, Purpose, signed

REJECTION_TILE = 1024  # tokens per program

_OK = tl.constexpr(int(MaskStatus.OK))
_NONE = tl.constexpr(int(MaskStatus.NONE))
_ILLEGAL = tl.constexpr(int(MaskStatus.ILLEGAL))
_ACCEPT = tl.constexpr(signed(int(Purpose.ACCEPT) * GOLDEN))
_TARGET = tl.constexpr(signed(int(Purpose.TARGET) * GOLDEN))
_SECOND_CLASS = tl.constexpr(-(1 << 63))  # the sign bit, which no candidate of a probability has
_LAST_ID = tl.constexpr(0x7FFFFFFF)


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
    target_place_stride,
    draft_row_stride,
    draft_place_stride,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many drafts of a row hold, and the winner of one tile in the race for the token behind them. PLACES is a power of two > K."""
    line = tl.program_id(0)
    row = line.to(tl.int64)
    place = tl.arange(0, PLACES)
    inside = place < count
    offers = tl.load(draft_count + row)
    source = draft_probs + tl.load(rows + row) * draft_row_stride
    truth = target_probs + row * target_row_stride
    own_seed, first = tl.load(seed + row), tl.load(length + row)

    sure = tl.load(certain + row * count + place, mask=inside, other=1).to(tl.int32)
    proposed = tl.maximum(tl.load(drafts + row * count + place, mask=inside, other=0), 0)
    likely = tl.load(truth + place.to(tl.int64) * target_place_stride + proposed, mask=inside, other=0.0)
    offered = tl.load(source + place.to(tl.int64) * draft_place_stride + proposed, mask=inside & (sure == 0), other=1.0)
    sound = tl.load(finite + row * (count + 1) + place, mask=inside, other=0).to(tl.int32) != 0
    state = tl.load(status + row * (count + 1) + place, mask=inside, other=_NONE)
    follows = tl.load(status + row * (count + 1) + place + 1, mask=inside, other=_NONE)
    holds = (coin(own_seed, first + place, _ACCEPT) * offered < likely) & sound & (place < offers) & inside
    holds = holds & (state == _OK) & (follows != _NONE) & (follows != _ILLEGAL)
    held = tl.min(tl.where(holds, PLACES, place), 0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(accepted + row, held)

    refused = tl.where((held < offers) & (count > 0), width, 0)  # where q ends
    judged = tl.minimum(held, count - 1)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    probs = tl.load(truth + held * target_place_stride + ids, mask=ids < width, other=0.0)
    draft, chosen = tl.sum(tl.where(place == judged, proposed, 0), 0), tl.sum(tl.where(place == judged, sure, 0), 0)
    over = tl.load(source + judged * draft_place_stride + ids, mask=ids < tl.where(chosen == 0, refused, 0), other=0.0)
    over = tl.where((ids == draft) & (ids < refused * chosen), 1.0, over)
    rest = tl.maximum(probs - over, 0.0)
    left = tl.max((rest > 0).to(tl.int32), 0) != 0
    rates = tl.where(left, rest, probs)
    if tl.max((rates != 0).to(tl.int32), 0) != 0:
        rates = tl.math.div_rn(rates, exponential(own_seed, first + held, ids.to(tl.int64), _TARGET))
    best = tl.max(ordered(rates, ids), 0)
    tl.store(candidates + row * tl.num_programs(1) + tl.program_id(1), tl.where(left, best, best | _SECOND_CLASS))


@triton.jit
def rejection_tokens(drafts, candidates, accepted, tokens, count, tiles, PLACES: tl.constexpr, TILES: tl.constexpr):
    """The drafts that hold and, from there on, the best candidate. tokens [B, K + 1]; PLACES and TILES as in the others."""
    row = tl.program_id(0).to(tl.int64)
    found = tl.max(tl.load(candidates + row * tiles + tl.minimum(tl.arange(0, TILES), tiles - 1)), 0)
    token = (found & 0xFFFFFFFF) ^ _LAST_ID
    place = tl.arange(0, PLACES)
    proposed = tl.load(drafts + row * count + place, mask=place < count, other=0)
    tl.store(tokens + row * (count + 1) + place, tl.where(place < tl.load(accepted + row), proposed, token), mask=place <= count)


def reject_sample(
    target_probs: Tensor,
    draft_probs: Tensor,
    rows: Tensor,
    certain: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    seed: Tensor,
    length: Tensor,
    tokens: Tensor,
    accepted: Tensor,
    *,
    tile: int = REJECTION_TILE,
) -> None:
    batch, positions, width = target_probs.shape
    candidates = torch.empty(batch, triton.cdiv(width, tile), dtype=torch.int64, device=target_probs.device)
    places = triton.next_power_of_2(positions)
    rejection_candidates[tuple(candidates.shape)](
        target_probs,
        draft_probs,
        rows,
        certain,
        finite,
        drafts,
        draft_count,
        status,
        seed,
        length,
        candidates,
        accepted,
        positions - 1,
        width,
        *target_probs.stride()[:2],
        *draft_probs.stride()[:2],
        PLACES=places,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    rejection_tokens[(batch,)](
        drafts,
        candidates,
        accepted,
        tokens,
        positions - 1,
        candidates.shape[1],
        PLACES=places,
        TILES=triton.next_power_of_2(candidates.shape[1]),
        num_warps=1,
        enable_fp_fusion=False,
    )
