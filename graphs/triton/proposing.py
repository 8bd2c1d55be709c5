"""The Triton programs of look_up and choose_chain: one instance per row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from stepgraph.graphs import row_layout
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus

_OK = tl.constexpr(int(MaskStatus.OK))
_BITS = tl.constexpr(BITS_PER_WORD)
_REFUSED = tl.constexpr(row_layout.REFUSED)


SEARCHED = 1024  # columns of a text at a time


@triton.jit
def look_up_row(
    text,  # [B, width] int32
    length,  # [B] int64
    generated,  # [B] int64
    start,
    count,
    longest,
    shortest,
    chain,  # [B, count] int64, written
    width,
    length_step,
    generated_step,
    SEARCHED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """SEARCHED and COUNT are powers of two, COUNT at least `count`. The scores of a text's columns differ."""
    place = tl.program_id(0).to(tl.int64)
    line, size = text + place * width, tl.load(length + place * length_step).to(tl.int32)
    expected = (start + tl.load(generated + place * generated_step)).to(tl.int32)
    best, column = tl.full((SEARCHED,), -1, tl.int32), tl.zeros((SEARCHED,), tl.int32)
    for begin in range(0, width, SEARCHED):
        at = begin + tl.arange(0, SEARCHED)
        own = tl.load(line + at, mask=at < width, other=-1)
        holds = (at < width) & ((at < size) | ((at >= start) & (own >= 0)))
        usable, matched = holds, tl.zeros((SEARCHED,), tl.int32)
        for number in range(longest):
            last = tl.load(line + size - 1 - number, mask=number < size, other=-2)
            holds = holds & (tl.load(line + at - 1 - number, mask=holds & (at > number), other=-1) == last)
            matched += holds.to(tl.int32)
        given = 3 * width - 2 * tl.abs(at - expected) - (at < expected).to(tl.int32)
        score = tl.where(usable & (matched >= shortest), matched * 4 * width + tl.where(at < start, at, given), -1)
        better = score > best
        best, column = tl.where(better, score, best), tl.where(better, at, column)
    top = tl.max(best, 0)
    found = tl.max(tl.where(best == top, column, 0), 0)
    index = tl.arange(0, COUNT)
    copied = found + tl.where(found < start, index % tl.maximum(size - found, 1), index)
    tokens = tl.load(line + tl.minimum(copied, width - 1)).to(tl.int64)
    tl.store(chain + place * count + index, tl.where(top >= 0, tokens, -1), mask=index < count)


def look_up(*arguments: Any) -> None:
    """The arguments and outputs of proposing.look_up, in the order of the program."""
    text, length, generated, _, count, _, _, _ = arguments
    strides = length.stride(0), generated.stride(0)
    tiles = {"SEARCHED": min(SEARCHED, triton.next_power_of_2(text.shape[1])), "COUNT": triton.next_power_of_2(count)}
    look_up_row[(len(text),)](*arguments, text.shape[1], *strides, **tiles, num_warps=4)


@triton.jit
def choose_row(
    proposed,  # [B, K] int64
    alive,  # [B] bool
    limit,  # [B] int64
    rows,  # [B] int64
    masks,  # [R, positions, words] int32
    constrained,  # [B] bool
    status,  # [B, K] int64
    forced,  # [K, B] int64, or None
    row_forced,  # [R, most] bool, written with forced
    chosen,  # [B, K] int64, written
    drafts,
    words,
    limit_step,
    mask_row_step,
    mask_step,
    status_row_step,
    status_step,
    forced_step,
    flag_row_step,
    flag_step,
):
    place = tl.program_id(0).to(tl.int64)
    row, most = tl.load(rows + place), tl.load(limit + place * limit_step)
    goes_on, masked = tl.load(alive + place).to(tl.int32), tl.load(constrained + place).to(tl.int32)
    follows = goes_on * 0 + 1
    for index in range(drafts):
        candidate = tl.load(proposed + place * drafts + index)
        valid = tl.load(status + place * status_row_step + index * status_step) == _OK
        word = tl.maximum(candidate, 0) // _BITS
        bits = tl.load(masks + row * mask_row_step + index * mask_step + word, mask=word < words, other=0)
        legal = (valid & (((bits >> (candidate % _BITS).to(tl.int32)) & 1) != 0)) | (masked == 0)
        found = tl.where(follows != 0, candidate, -1)
        token = tl.where(found < 0, -1, tl.where(legal, found, _REFUSED))
        if forced is not None:
            only = tl.load(forced + index * forced_step + place)
            taken = (only >= 0) & (masked != 0) & valid
            token = tl.where(taken, only, token)
            tl.store(row_forced + row * flag_row_step + index * flag_step, taken)
        token = tl.where((goes_on != 0) & (most > index), token, -1)
        tl.store(chosen + place * drafts + index, token)
        goes_on, follows = (token >= 0).to(tl.int32), follows & (token == found).to(tl.int32)


def choose_chain(*arguments: Any) -> None:
    """The arguments and outputs of proposing.choose_chain, in the order of the program."""
    proposed, _, limit, _, masks, _, status, forced, row_forced, _ = arguments
    choose_row[(len(proposed),)](
        *arguments,
        proposed.shape[1],
        masks.shape[2],
        limit.stride(0),
        *masks.stride()[:2],
        *status.stride(),
        0 if forced is None else forced.stride(0),
        *((0, 0) if row_forced is None else row_forced.stride()),
        num_warps=1,
    )
