"""The Triton programs of select_draft and store_drafts: one instance per row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus

_OK = tl.constexpr(int(MaskStatus.OK))
_BITS = tl.constexpr(BITS_PER_WORD)


@triton.jit
def select_row(
    tokens,  # [B] int64
    finite,  # [B] bool
    alive,  # [B] bool
    limit,  # [B] int64
    step,
    looked_up,  # [B] int64, or None
    forced,  # [B] int64, or None
    masks,  # [R, words] int32, or None, as the next three
    constrained,  # [B] bool
    status,  # [B] int64
    rows,  # [B] int64
    selected,  # [B] int64, written
    took_found,  # [B] bool, written with looked_up
    took_forced,  # [B] bool, written with forced
    words,
    limit_step,
    found_step,
    mask_step,
):
    row = tl.program_id(0).to(tl.int64)
    token, usable = tl.load(tokens + row), tl.load(finite + row).to(tl.int32)
    if masks is not None:
        masked = tl.load(constrained + row).to(tl.int32)
        valid = tl.load(status + row) == _OK
    if looked_up is not None:
        candidate = tl.load(looked_up + row * found_step)
        taken = candidate >= 0
        if masks is not None:
            mask_row = row
            if rows is not None:
                mask_row = tl.load(rows + row)
            known = tl.maximum(candidate, 0)
            word = tl.load(masks + mask_row * mask_step + known // _BITS, mask=known // _BITS < words, other=0)
            taken = taken & (((((word >> (known % _BITS).to(tl.int32)) & 1) != 0) & valid) | (masked == 0))
        token, usable = tl.where(taken, candidate, token), tl.where(taken, 1, usable)
        tl.store(took_found + row, taken)
    if forced is not None:
        only = tl.load(forced + row)
        taken = (only >= 0) & (masked != 0) & valid
        token, usable = tl.where(taken, only, token), tl.where(taken, 1, usable)
        tl.store(took_forced + row, taken)
    goes_on = (tl.load(alive + row).to(tl.int32) != 0) & (usable != 0) & (tl.load(limit + row * limit_step) >= step)
    tl.store(selected + row, tl.where(goes_on, token, -1))


def select_draft(*arguments: Any) -> None:
    """The arguments and outputs of drafting.select_draft, in the order of the program."""
    tokens, _, _, limit, _, looked_up, _, masks, *_ = arguments
    select_row[(len(tokens),)](
        *arguments,
        0 if masks is None else masks.shape[1],
        limit.stride(0),
        0 if looked_up is None else looked_up.stride(0),
        0 if masks is None else masks.stride(0),
        num_warps=1,
    )


@triton.jit
def store_row(rows, chain, row_drafts, row_counts, drafts, row_step, draft_step, count_step, WIDTH: tl.constexpr):
    """rows [B], chain [B, K], row_drafts [R, K], row_counts [R], all int64. WIDTH: K, rounded up."""
    place = tl.program_id(0).to(tl.int64)
    row, index = tl.load(rows + place), tl.arange(0, WIDTH)
    inside = index < drafts
    tokens = tl.load(chain + place * row_step + index * draft_step, mask=inside, other=-1)
    tl.store(row_drafts + row * drafts + index, tokens, mask=inside)
    tl.store(row_counts + row * count_step, tl.sum((tokens >= 0).to(tl.int64), 0))


def store_drafts(rows: Tensor, chain: Tensor, row_drafts: Tensor, row_counts: Tensor) -> None:
    drafts = chain.shape[1]
    width = triton.next_power_of_2(drafts)
    strides = (*chain.stride(), row_counts.stride(0))
    store_row[(len(rows),)](rows, chain, row_drafts, row_counts, drafts, *strides, WIDTH=width, num_warps=1)
