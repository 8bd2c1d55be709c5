"""The Triton programs of look_up, append_tokens and choose_chain, one instance per row, and of keep_skipped."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs import row_layout
from stepgraph.sampling.grammar.status import BITS_PER_WORD, FinishCode, MaskStatus

_RUNNING = tl.constexpr(int(FinishCode.RUNNING))
_OK = tl.constexpr(int(MaskStatus.OK))
_BITS_PER_WORD = tl.constexpr(BITS_PER_WORD)
_REFUSED = tl.constexpr(row_layout.REFUSED)
SEARCHED = 512  # columns of a text at a time
FEATURE_TILE = 1024


@triton.jit
def search(row_text, begin, size, start, longest, shortest, expected, width, best, column, SEARCHED: tl.constexpr):
    """The best score and its column in each lane, after the columns from `begin` on; and whether one of them has a given token."""
    columns = begin + tl.arange(0, SEARCHED)
    token = tl.load(row_text + columns, mask=columns < width, other=-1)
    given = (columns >= start) & (token >= 0)
    usable = (columns < size) | given
    matching, matched = usable, tl.zeros((SEARCHED,), tl.int32)
    for number in range(longest):
        last = tl.load(row_text + size - 1 - number, mask=number < size, other=-2)
        before = tl.load(row_text + columns - 1 - number, mask=usable & (columns > number), other=-1)  # does not wait for the one before
        matching = matching & (before == last)
        matched += matching.to(tl.int32)
    given_score = 3 * width - 2 * tl.abs(columns - expected) - (columns < expected).to(tl.int32)
    score = tl.where(usable & (matched >= shortest), matched * 4 * width + tl.where(columns < start, columns, given_score), -1)
    better = score > best
    return tl.where(better, score, best), tl.where(better, columns, column), tl.max(given.to(tl.int32), 0) > 0


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
    """SEARCHED and COUNT are powers of two, COUNT at least `count`. No two columns of a text have the same score.

    Columns between the end of the text and `start`, and after the given text, are not searched: few texts are as long as they may be.
    """
    batch_row = tl.program_id(0).to(tl.int64)
    row_text, size = text + batch_row * width, tl.load(length + batch_row * length_step).to(tl.int32)
    expected = (start + tl.load(generated + batch_row * generated_step)).to(tl.int32)
    best, column = tl.full((SEARCHED,), -1, tl.int32), tl.zeros((SEARCHED,), tl.int32)
    for begin in range(0, size, SEARCHED):
        best, column, _ = search(row_text, begin, size, start, longest, shortest, expected, width, best, column, SEARCHED)
    begin, is_given = start // SEARCHED * SEARCHED, size >= 0
    while is_given & (begin < width):
        best, column, is_given = search(row_text, begin, size, start, longest, shortest, expected, width, best, column, SEARCHED)
        begin += SEARCHED
    top = tl.max(best, 0)
    match_column = tl.max(tl.where(best == top, column, 0), 0)
    index = tl.arange(0, COUNT)
    copied = match_column + tl.where(match_column < start, index % tl.maximum(size - match_column, 1), index)
    tokens = tl.load(row_text + tl.minimum(copied, width - 1)).to(tl.int64)
    tl.store(chain + batch_row * count + index, tl.where(top >= 0, tokens, -1), mask=index < count)


def look_up(*arguments: Any) -> None:
    """The arguments and outputs of proposing.look_up, in the order of the program."""
    text, length, generated, _, count, _, _, _ = arguments
    strides = length.stride(0), generated.stride(0)
    tiles = {"SEARCHED": min(SEARCHED, triton.next_power_of_2(text.shape[1])), "COUNT": triton.next_power_of_2(count)}
    look_up_row[(len(text),)](*arguments, text.shape[1], *strides, **tiles, num_warps=4)


@triton.jit
def append_row(rows, tokens, emitted, length, row_text, count, width, length_step, COUNT: tl.constexpr):
    """rows [B], tokens [B, count], emitted [B], length [B] int64; row_text [R, width] int32. COUNT: count, rounded up."""
    batch_row = tl.program_id(0).to(tl.int64)
    index, begin = tl.arange(0, COUNT), tl.load(length + batch_row * length_step)
    token = tl.load(tokens + batch_row * count + index, mask=index < count, other=0)
    tl.store(row_text + tl.load(rows + batch_row) * width + begin + index, token.to(tl.int32), mask=index < tl.load(emitted + batch_row))


def append_tokens(rows: Tensor, tokens: Tensor, emitted: Tensor, length: Tensor, row_text: Tensor) -> None:
    sizes = tokens.shape[1], row_text.shape[1], length.stride(0)
    append_row[(len(rows),)](rows, tokens, emitted, length, row_text, *sizes, COUNT=triton.next_power_of_2(sizes[0]), num_warps=1)


@triton.jit
def choose_row(
    proposed,  # [B, K] int64
    finish,  # [B] int64
    limit,  # [B] int64
    num_tokens,
    rows,  # [B] int64
    masks,  # [R, positions, words] int32, or None, as the next two
    constrained,  # [B] bool
    status,  # [B, K] int64
    forced,  # [K, B] int64, or None, as the next one
    row_forced,  # [R, most] bool, written
    chosen,  # [B, K] int64, written
    drafts,
    words,
    finish_step,
    limit_step,
    mask_row_step,
    mask_step,
    status_row_step,
    status_step,
    forced_step,
    flag_row_step,
    flag_step,
    BLOCK: tl.constexpr,
):
    """All drafts at once: a loop would wait for the loads of each. BLOCK: `drafts`, rounded up."""
    batch_row, index = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, max_drafts, inside = tl.load(rows + batch_row), tl.load(limit + batch_row * limit_step), index < drafts
    candidate = tl.load(proposed + batch_row * drafts + index, mask=inside, other=-1)
    token, unguided = tl.where((candidate >= 0) & (candidate < num_tokens), candidate, -1), tl.full((BLOCK,), -1, tl.int64)
    if masks is not None:
        masked = tl.load(constrained + batch_row).to(tl.int32)
        valid = tl.load(status + batch_row * status_row_step + index * status_step, mask=inside, other=0) == _OK
        bit = tl.maximum(candidate, 0)
        word = bit // _BITS_PER_WORD
        mask_word = tl.load(masks + row * mask_row_step + index * mask_step + word, mask=inside & (word < words), other=0)
        legal = (valid & (((mask_word >> (bit % _BITS_PER_WORD).to(tl.int32)) & 1) != 0)) | (masked == 0)
        token = tl.where(legal | (token < 0), token, _REFUSED)
        if forced is not None:
            forced_token = tl.load(forced + index * forced_step + batch_row, mask=inside, other=-1)
            taken = (forced_token >= 0) & (masked != 0) & valid
            token, unguided = tl.where(taken, forced_token, token), tl.where(taken, forced_token, unguided)
            tl.store(row_forced + row * flag_row_step + index * flag_step, taken, mask=inside)
    leaves = (token != candidate).to(tl.int32)
    token = tl.where(tl.cumsum(leaves, 0) > leaves, unguided, token)  # after the first draft that is not the proposed one
    token = tl.where(max_drafts > index, token, -1)
    alive = tl.load(finish + batch_row * finish_step) == _RUNNING
    ends = (token < 0).to(tl.int32)
    token = tl.where(alive & (tl.cumsum(ends, 0) == ends), token, -1)  # nothing follows the first draft that is no token
    tl.store(chosen + batch_row * drafts + index, token, mask=inside)


def choose_chain(*arguments: Any) -> None:
    """The arguments and outputs of proposing.choose_chain, in the order of the program."""
    proposed, finish, limit, _, _, masks, _, status, forced, row_forced, _ = arguments
    sizes = proposed.shape[1], 0 if masks is None else masks.shape[2], finish.stride(0), limit.stride(0)
    of_masks = (0, 0, 0, 0) if masks is None else (*masks.stride()[:2], *status.stride())
    of_forced = (0, 0, 0) if forced is None else (forced.stride(0), *row_forced.stride())
    block = triton.next_power_of_2(proposed.shape[1])
    choose_row[(len(proposed),)](*arguments, *sizes, *of_masks, *of_forced, BLOCK=block, num_warps=1)


@triton.jit
def keep_tile(
    rows,  # [B] int64
    skipped,  # [B]
    tokens,  # [B, Q]
    emitted,  # [B]
    features,  # [B, Q, width]
    row_tokens,  # [R, room]
    row_features,  # [R, room, width]
    row_skipped,  # [R]
    room,
    width,
    skipped_step,
    features_row_stride,
    features_position_stride,
    row_step,
    TILE: tl.constexpr,
):
    """One token and tile of its features."""
    batch_row, position, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, before = tl.load(rows + batch_row), tl.load(skipped + batch_row * skipped_step)
    column = row * room + before + position
    if before + position < room:
        index = part * TILE + tl.arange(0, TILE)
        source = features + batch_row * features_row_stride + position.to(tl.int64) * features_position_stride
        values = tl.load(source + index, mask=index < width)
        tl.store(row_features + column * width + index, values, mask=index < width)
        if part == 0:
            tl.store(row_tokens + column, tl.load(tokens + batch_row * tl.num_programs(1) + position))
    if (position == 0) & (part == 0):
        tl.store(row_skipped + row * row_step, before + tl.load(emitted + batch_row))


def keep_skipped(*tensors: Tensor) -> None:
    _, skipped, _, _, features, row_tokens, _, row_skipped = tensors
    batch, positions, width = features.shape
    sizes = row_tokens.shape[1], width, skipped.stride(0), *features.stride()[:2], row_skipped.stride(0)
    keep_tile[(batch, positions, triton.cdiv(width, FEATURE_TILE))](*tensors, *sizes, TILE=FEATURE_TILE, num_warps=4)
