"""The Triton programs of process_logits, log_probabilities and top_logprobs, and their launches. Imported only where Triton can launch.

The logits are split into tiles, one program each, so that a few rows fill a GPU. Each tile stores the greatest logit before and after
the request's own processors; a second launch derives from these the status of a whole position. For top_logprobs there is one
instance per position, which ends at once unless its row asks for tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.kernels.triton.choice import _BOTTOM, _DEAD_END, _LAST_ID, _OK, is_finite, rank, table_row_of
from stepgraph.sampling.kernels.triton.filters import line_tile
from stepgraph.sampling.sampler import Param

PROCESS_TILE = 512  # tokens per program
PROCESS_REGISTERS = 48  # per thread; without a bound, ptxas of Triton 3.9 takes 40 on sm_90 and spills
SUM_TILE = 4096

_REPETITION = tl.constexpr(int(Param.REPETITION_PENALTY))
_PRESENCE = tl.constexpr(int(Param.PRESENCE_PENALTY))
_FREQUENCY = tl.constexpr(int(Param.FREQUENCY_PENALTY))
_MIN_NEW_TOKENS = tl.constexpr(int(Param.MIN_NEW_TOKENS))


@triton.jit
def _allowed(mask, covered, closed, words, ids, tokens, inside, token_of):
    """Which logits of a tile a mask of `covered` tokens allows, none if it is closed; and which have a mask word with any bit."""
    if token_of is not None:
        bits = tl.where(closed, 0, tl.load(mask + (tokens >> 5), mask=ids < covered, other=-1))
    else:
        bits = tl.where(closed, 0, tl.load(mask + words, mask=words * 32 < covered, other=-1))[:, None]
    return (((bits >> (tokens & 31)) & 1) != 0) & inside, bits != 0


@triton.jit
def _load_legal(source, legal, marked, whole):
    """Logits as float32, minus infinity where they are not legal. With `whole` words, logits without a bit are not read."""
    if whole:
        values = tl.load(source, mask=marked, other=float("-inf")).to(tl.float32)
    else:
        values = tl.load(source, mask=legal, other=float("-inf")).to(tl.float32)
    return tl.where(legal, values, float("-inf"))


@triton.jit
def _add_biases(values, tokens, ids, amounts, count, BIASES: tl.constexpr):
    """Values plus the amounts of the ids among their tokens. One step per such id if the tokens are consecutive."""
    slot = tl.arange(0, BIASES)
    bias_tokens = tl.load(ids + slot, mask=slot < count, other=-1)
    bias_amounts = tl.load(amounts + slot, mask=slot < count, other=0.0)
    pending = (bias_tokens >= tl.min(tokens)) & (bias_tokens <= tl.max(tokens))
    for _ in range(tl.sum(pending.to(tl.int32), 0)):
        token = tl.min(tl.where(pending, bias_tokens, _LAST_ID), 0).to(tl.int32)
        values += tl.where(tokens == token, tl.sum(tl.where(bias_tokens == token, bias_amounts, 0.0), 0), 0.0)
        pending = pending & (bias_tokens != token)
    return values


@triton.jit
def _ban_stop_tokens(values, tokens, stops, count):
    for column in range(count):
        values = tl.where(tokens == tl.load(stops + column).to(tl.int32), float("-inf"), values)
    return values


@triton.jit
def _count_drafts(counts, tokens, drafts, count, step):
    for draft in range(count):
        counts += (tokens == tl.load(drafts + draft * step).to(tl.int32)).to(tl.float32)
    return counts


@triton.jit
def _apply_penalties(values, counts, seen, inside, repetition, presence, frequency):
    """Values after the penalties of tokens that were emitted `counts` times; `seen` points to whether the prompt has them."""
    emitted = counts > 0
    if repetition != 1:
        known = emitted | (tl.load(seen, mask=inside, other=0).to(tl.int32) != 0)
        repeated = tl.where(values > 0, tl.math.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
        values = tl.where(known, repeated, values)
    return values - frequency * counts - presence * emitted.to(tl.float32)


@triton.jit
def process_tile(
    logits,  # [B, Q, >= width]
    masks,  # [R, Q, words] int32, or None, like the next three
    mask_rows,  # [B] int64; None also where masks are by batch row
    constrained,  # [B] bool
    status,  # [B, Q] int64
    token_of,  # [width] int64, the target's token of each logit; None: its index
    rows,  # [B] int64, the table row of each batch row; None: the same
    row_params,  # [R, columns] float32
    bias_ids,  # [R, biases] int64
    biases,  # [R, biases] float32
    stop_ids,  # [R, stops] int64
    prompt_seen,  # [R, vocabulary] bool
    output_counts,  # [R, vocabulary] int32
    generated,  # [B] int64
    before,  # [B, drafts] int64
    processed,  # [B, Q, width] float32, written
    peaks,  # [B * Q, tiles, 2] int32, written: the rank of the greatest legal logit, and of the greatest processed one
    positions,
    width,
    columns,
    num_biases,
    num_stops,
    vocabulary,
    drafts,
    first,
    logits_row_stride,
    logits_position_stride,
    masks_row_step,
    masks_position_step,
    generated_step,
    before_row_step,
    before_position_step,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
):
    """bitmask.apply and processors.apply_settings for WORDS * 32 logits of one position. Tables that a row does not use are not read."""
    line = tl.program_id(0)
    row, position = (line // positions).to(tl.int64), line % positions
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    ids = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    if token_of is not None:  # one dimension, as in choice.py
        ids = tl.program_id(1) * (WORDS * 32) + tl.arange(0, WORDS * 32)
    inside = ids < width
    whole = (tl.program_id(1) + 1) * WORDS * 32 <= width  # no edge in this tile: wide loads and stores
    tokens = ids
    if token_of is not None:
        tokens = tl.load(token_of + ids, mask=inside, other=0).to(tl.int32)
    legal, marked = inside, inside if token_of is not None else (words >= 0)[:, None]
    if masks is not None:
        mask = masks + table_row_of(row, mask_rows) * masks_row_step + position.to(tl.int64) * masks_position_step
        is_constrained = tl.load(constrained + row).to(tl.int32)
        mask_is_invalid = (is_constrained != 0) & (tl.load(status + line) != _OK)
        legal, marked = _allowed(mask, is_constrained * width, mask_is_invalid, words, ids, tokens, inside, token_of)
    source = logits + row * logits_row_stride + position.to(tl.int64) * logits_position_stride + ids
    values = _load_legal(source, legal, marked, whole & (token_of is None))
    peak = peaks + (line.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(peak, tl.max(rank(values)))

    table_row = table_row_of(row, rows)
    at, params = first + position, row_params + table_row * columns
    if tl.load(bias_ids + table_row * num_biases) >= 0:
        values = _add_biases(values, tokens, bias_ids + table_row * num_biases, biases + table_row * num_biases, num_biases, BIASES)
    if (tl.load(generated + row * generated_step) + at).to(tl.float32) < tl.load(params + _MIN_NEW_TOKENS):
        values = _ban_stop_tokens(values, tokens, stop_ids + table_row * num_stops, num_stops)
    repetition, presence, frequency = tl.load(params + _REPETITION), tl.load(params + _PRESENCE), tl.load(params + _FREQUENCY)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        counts = tl.load(output_counts + table_row * vocabulary + tokens, mask=inside, other=0).to(tl.float32)
        counts = _count_drafts(counts, tokens, before + row * before_row_step, tl.minimum(drafts, at), before_position_step)
        values = _apply_penalties(values, counts, prompt_seen + table_row * vocabulary + tokens, inside, repetition, presence, frequency)
    tl.store(peak + 1, tl.max(tl.where(inside, rank(values), _BOTTOM)))
    target = processed + line.to(tl.int64) * width + ids
    if whole:
        tl.store(target, values)
    else:
        tl.store(target, values, mask=inside)


@triton.jit
def judge_positions(peaks, status, finite, final_status, tiles, TILES: tl.constexpr):
    """processors.mark_dead_ends for one position, and whether its best processed logit is finite. TILES is a power of two >= tiles."""
    line = tl.program_id(0)
    peak = peaks + (line.to(tl.int64) * tiles + tl.minimum(tl.arange(0, TILES), tiles - 1)) * 2
    best_allowed, best_processed = tl.max(tl.load(peak), 0), tl.max(tl.load(peak + 1), 0)
    mask_status = tl.full((), _OK, tl.int64)
    if status is not None:
        mask_status = tl.load(status + line)
    banned = is_finite(best_allowed) & (best_processed == _BOTTOM)
    tl.store(final_status + line, tl.where(banned & (mask_status == _OK), _DEAD_END, mask_status))
    tl.store(finite + line, is_finite(best_processed))


@triton.jit
def sum_tile(logits, parts, positions, width, row_stride, position_stride, TILE: tl.constexpr):
    """The greatest logit of one tile, and the sum of exponentials relative to it, or to 0 if it is infinite. parts [B * Q, tiles, 2]."""
    values = line_tile(logits, positions, width, row_stride, position_stride, TILE)
    best = tl.max(values, 0)
    part = parts + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(part, best)
    tl.store(part + 1, tl.sum(tl.exp(values - tl.where(tl.abs(best) == float("inf"), 0.0, best)), 0))


@triton.jit
def report_token(
    logits,  # [B, Q, >= width]
    probs,  # [B, Q, >= width] float32
    tokens,  # [B, Q] int64
    parts,  # [B * Q, tiles, 2] float32
    found,  # [B, Q, 2] float32, written
    positions,
    tiles,
    row_stride,
    position_stride,
    probs_row_stride,
    probs_position_stride,
    found_row_step,
    TILES: tl.constexpr,
):
    """Both log-probabilities of one token. TILES is a power of two >= tiles."""
    line = tl.program_id(0)
    row, position = (line // positions).to(tl.int64), (line % positions).to(tl.int64)
    tile = tl.arange(0, TILES)
    part = parts + (line.to(tl.int64) * tiles + tile) * 2
    best = tl.load(part, mask=tile < tiles, other=float("-inf"))
    top = tl.max(best, 0)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.sum(tl.load(part + 1, mask=tile < tiles, other=0.0) * tl.exp(best - top), 0)
    token = tl.load(tokens + line)
    logit = tl.load(logits + row * row_stride + position * position_stride + token).to(tl.float32)
    target = found + row * found_row_step + position * 2
    tl.store(target, logit - (top + tl.log(total)))
    tl.store(target + 1, tl.log(tl.load(probs + row * probs_row_stride + position * probs_position_stride + token)))


def process_logits(*arguments: Any, tile: int = PROCESS_TILE) -> None:
    """The arguments and outputs of kernels.processors.process_logits; the program takes the inputs in the same order."""
    logits, masks, _, _, status, _, _, params, bias_ids, _, stop_ids, _, output_counts, *others = arguments
    generated, before, first, processed, finite, final_status = others
    (batch, positions, width), inputs = logits.shape, arguments[:-4]
    lines, tiles = batch * positions, triton.cdiv(width, tile)
    peaks = torch.empty(lines, tiles, 2, dtype=torch.int32, device=logits.device)
    sizes = positions, width, *(each.shape[1] for each in (params, bias_ids, stop_ids, output_counts, before)), first
    mask_steps = (0, 0) if masks is None else masks.stride()[:2]
    strides = *logits.stride()[:2], *mask_steps, generated.stride(0), *before.stride()
    constants = {"WORDS": tile // 32, "BIASES": triton.next_power_of_2(bias_ids.shape[1])}
    options = {"num_warps": 4, "maxnreg": PROCESS_REGISTERS, "enable_fp_fusion": False}
    process_tile[(lines, tiles)](*inputs, processed, peaks, *sizes, *strides, **constants, **options)
    judge_positions[(lines,)](peaks, status, finite, final_status, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1)


def log_probabilities(logits: Tensor, probs: Tensor, tokens: Tensor, found: Tensor, *, tile: int = SUM_TILE) -> None:
    (batch, positions, width), strides = logits.shape, logits.stride()[:2]
    assert found.stride()[1:] == (2, 1), f"found has strides {found.stride()}"
    lines, tiles = batch * positions, triton.cdiv(width, tile)
    parts = torch.empty(lines, tiles, 2, dtype=torch.float32, device=logits.device)
    sum_tile[(lines, tiles)](logits, parts, positions, width, *strides, TILE=tile, num_warps=8)
    sizes = positions, tiles, *strides, *probs.stride()[:2], found.stride(0)
    report_token[(lines,)](logits, probs, tokens, parts, found, *sizes, TILES=triton.next_power_of_2(tiles), num_warps=1)


_TOP_LOGPROBS = tl.constexpr(int(Param.TOP_LOGPROBS))
TOP_TILE = 4096


@triton.jit
def next_best(scores, width, least, value, token, TILE: tl.constexpr):
    """The greatest score after (value, token) in falling order, the lower id first among equal ones; `least` and -1 where there is none."""
    best, best_id = least, -1
    for start in range(0, width, TILE):
        ids = start + tl.arange(0, TILE)
        scored = tl.load(scores + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
        scored = tl.where((scored < value) | ((scored == value) & (ids > token)), scored, float("-inf"))
        peak = tl.max(scored, 0)
        if peak > best:
            best, best_id = peak, tl.min(tl.where(scored == peak, ids, width), 0)
    return best, best_id


@triton.jit
def log_total(scores, width, best, TILE: tl.constexpr):
    """The logarithm of the sum of exponentials, relative to the greatest score."""
    sums = tl.zeros((TILE,), tl.float32)
    for start in range(0, width, TILE):
        ids = start + tl.arange(0, TILE)
        sums += tl.exp(tl.load(scores + ids, mask=ids < width, other=float("-inf")).to(tl.float32) - best)
    return best + tl.log(tl.sum(sums, 0))


@triton.jit
def rank_tokens(
    logits,  # [B, Q, >= width]
    probs,  # [B, Q, >= width] float32
    rows,  # [B] int64
    row_params,  # [R, columns] float32
    published,  # [1] int64
    ids_ring,  # [S, slots, Q', 2 * most] int32, pinned, written
    values_ring,  # float32, likewise
    positions,
    width,
    columns,
    slots,
    most,
    row_stride,
    position_stride,
    probs_row_stride,
    probs_position_stride,
    slot_line,  # elements of a slot of a ring
    row_line,
    position_line,
    TILE: tl.constexpr,
):
    row, position = (tl.program_id(0) // positions).to(tl.int64), (tl.program_id(0) % positions).to(tl.int64)
    requested = tl.minimum(tl.load(row_params + tl.load(rows + row) * columns + _TOP_LOGPROBS).to(tl.int32), most)
    at = (tl.load(published) % slots) * slot_line + row * row_line + position * position_line
    if requested > 0:
        row_logits = logits + row * row_stride + position * position_stride
        row_probs = probs + row * probs_row_stride + position * probs_position_stride
        value, token = float("inf"), -1
        last, last_token = float("inf"), -1
        total = 0.0
        for index in range(requested):
            value, token = next_best(row_logits, width, float("-inf"), value, token, TILE)
            if index == 0:
                total = log_total(row_logits, width, value, TILE)
            tl.store(ids_ring + at + index, token)
            tl.store(values_ring + at + index, value - total)
            last, last_token = next_best(row_probs, width, 0.0, last, last_token, TILE)
            tl.store(ids_ring + at + most + index, last_token)
            tl.store(values_ring + at + most + index, tl.log(last))


def top_logprobs(*tensors: Tensor, tile: int = TOP_TILE) -> None:
    """The arguments of kernels.processors.top_logprobs, in the order of the program."""
    logits, probs, _, params, _, ids_ring, _ = tensors
    batch, positions, width = logits.shape
    sizes = positions, width, params.shape[1], len(ids_ring), ids_ring.shape[3] // 2
    strides = *logits.stride()[:2], *probs.stride()[:2], *ids_ring.stride()[:3]
    rank_tokens[(batch * positions,)](*tensors, *sizes, *strides, TILE=tile, num_warps=8)
