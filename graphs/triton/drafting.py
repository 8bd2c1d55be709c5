"""The Triton programs of select_draft and store_drafts: one instance per row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus

_OK = tl.constexpr(int(MaskStatus.OK))
_BITS_PER_WORD = tl.constexpr(BITS_PER_WORD)


@triton.jit
def select_row(
    tokens,  # [B] int64
    finite,  # [B] bool
    alive,  # [B] bool
    limit,  # [B] int64
    step,
    rows,  # [B] int64
    drafts,  # [K, >= B] int64, written
    chain,  # [B, K] int64, or None; written
    forced,  # [B] int64, or None
    masks,  # [R, words] int32, or None, as the next two
    constrained,  # [B] bool
    status,  # [B] int64
    row_looked_up,  # [R, K] bool, written with chain
    row_forced,  # [R, K] bool, written with forced
    row_certain,  # [R, K] bool, or None; written
    selected,  # [B] int64, written
    words,
    limit_step,
    drafts_step,
    chain_drafts,
    chain_step,
    mask_step,
    flag_step,
    WIDTH: tl.constexpr,
):
    """All flags have the same strides, 1 within a row. WIDTH: K, rounded up."""
    batch_row = tl.program_id(0).to(tl.int64)
    token, usable = tl.load(tokens + batch_row), tl.load(finite + batch_row).to(tl.int32)
    row, is_certain = tl.load(rows + batch_row), usable * 0
    flag = row * flag_step + step - 1
    if masks is not None:
        masked = tl.load(constrained + batch_row).to(tl.int32)
        valid = tl.load(status + batch_row) == _OK
    if chain is not None:
        candidate = tl.load(chain + batch_row * chain_step + step - 1)
        taken = candidate >= 0
        if masks is not None:
            candidate_id = tl.maximum(candidate, 0)
            word = tl.load(masks + row * mask_step + candidate_id // _BITS_PER_WORD, mask=candidate_id // _BITS_PER_WORD < words, other=0)
            taken = taken & (((((word >> (candidate_id % _BITS_PER_WORD).to(tl.int32)) & 1) != 0) & valid) | (masked == 0))
        token, is_certain = tl.where(taken, candidate, token), tl.where(taken, 1, is_certain)
        tl.store(row_looked_up + flag, taken)
    if forced is not None:
        forced_token = tl.load(forced + batch_row)
        taken = (forced_token >= 0) & (masked != 0) & valid
        token, is_certain = tl.where(taken, forced_token, token), tl.where(taken, 1, is_certain)
        tl.store(row_forced + flag, taken)
    if row_certain is not None:
        tl.store(row_certain + flag, is_certain != 0)
    is_drafting = (tl.load(alive + batch_row).to(tl.int32) != 0) & (tl.load(limit + batch_row * limit_step) >= step)
    token = tl.where(is_drafting & ((usable | is_certain) != 0), token, -1)
    tl.store(selected + batch_row, token)
    tl.store(drafts + (step - 1) * drafts_step + batch_row, token)
    if chain is not None:
        tl.debug_barrier()  # all threads have read the candidate
        index, num_dropped = tl.arange(0, WIDTH), tl.where(token != candidate, chain_drafts, 0)
        tl.store(chain + batch_row * chain_step + index, index.to(tl.int64) * 0 - 1, mask=index < num_dropped)


def select_draft(*arguments: Any) -> None:
    """The arguments and outputs of drafting.select_draft, in the order of the program."""
    tokens, _, _, limit, _, _, drafts, chain, _, masks, *_, looked_up, forced, certain, _ = arguments
    flags = next((each for each in (looked_up, forced, certain) if each is not None), None)
    of_chain = (0, 0) if chain is None else (chain.shape[1], chain.stride(0))
    sizes = 0 if masks is None else masks.shape[1], limit.stride(0), drafts.stride(0), *of_chain
    strides = 0 if masks is None else masks.stride(0), 0 if flags is None else flags.shape[1]
    width = triton.next_power_of_2(drafts.shape[0])
    select_row[(len(tokens),)](*arguments, *sizes, *strides, WIDTH=width, num_warps=1)


@triton.jit
def store_row(rows, chain, row_drafts, row_counts, drafts, row_step, draft_step, count_step, WIDTH: tl.constexpr):
    """rows [B], chain [B, K], row_drafts [R, K], row_counts [R], all int64. WIDTH: K, rounded up."""
    batch_row = tl.program_id(0).to(tl.int64)
    row, index = tl.load(rows + batch_row), tl.arange(0, WIDTH)
    inside = index < drafts
    tokens = tl.load(chain + batch_row * row_step + index * draft_step, mask=inside, other=-1)
    tl.store(row_drafts + row * drafts + index, tokens, mask=inside)
    tl.store(row_counts + row * count_step, tl.sum((tokens >= 0).to(tl.int64), 0))


def store_drafts(rows: Tensor, chain: Tensor, row_drafts: Tensor, row_counts: Tensor) -> None:
    drafts = chain.shape[1]
    width = triton.next_power_of_2(drafts)
    strides = (*chain.stride(), row_counts.stride(0))
    store_row[(len(rows),)](rows, chain, row_drafts, row_counts, drafts, *strides, WIDTH=width, num_warps=1)
