"""The Triton programs of masked_argmax, mask_status and chain_accept, and their launches. Imported only where Triton can launch.

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

from stepgraph.sampling.grammar.status import FinishCode, MaskStatus

CHOICE_TILE = 4096  # tokens per program
MANY_PROGRAMS = 2048  # from which a program has 4 warps: a thread with 32 logits executes a fifth fewer instructions for each

_OK = tl.constexpr(int(MaskStatus.OK))
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FC00000)
_TOP = tl.constexpr(0x7F800000)  # the rank of plus infinity; a NaN is above
_BOTTOM = tl.constexpr(-0x7F800001)  # minus infinity
_WIDE = tl.constexpr(16)  # logits
_FREE_BITS = tl.constexpr(0x1FFF)  # of a float32, that no bfloat16 and no float16 has


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
def best_of_narrow(values, index, first):
    """As best_of, of 16-bit values as float32, with the id `first` + index. The bits that such a value lacks hold the index, so that one
    reduction finds both, with half as many instructions."""
    bits = tl.where(values == values, (values + 0.0).to(tl.int32, bitcast=True), _NAN)  # the sum is never the negative zero
    best = tl.max((bits ^ ((bits >> 31) & (_LAST_ID ^ _FREE_BITS))) | (index ^ _FREE_BITS))
    rising = tl.where(best < 0, best | _FREE_BITS, best & ~_FREE_BITS)
    return (rising.to(tl.int64) << 32) | ((first + ((best & _FREE_BITS) ^ _FREE_BITS)) ^ _LAST_ID).to(tl.int64)


@triton.jit
def value_of(candidate):
    rising = (candidate >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & _LAST_ID)).to(tl.float32, bitcast=True)


@triton.jit
def table_row_of(row, rows):
    if rows is not None:
        row = tl.load(rows + row)
    return row


@triton.jit
def masked_candidates(
    logits,  # [B, Q, >= width]
    masks,  # [R, Q, words] int32, or None, as `constrained`
    rows,  # [B] int64, or None
    constrained,  # [B] bool
    bit_of,  # [width] int64, the mask bit of each logit, or None
    status,  # [B, Q] int64, or None
    candidates,  # [B * Q, tiles] int64
    width,
    logits_row_stride,
    logits_position_stride,
    masks_row_stride,
    masks_position_stride,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,  # `width` is a multiple of 16
):
    """The best legal token of one tile of WORDS mask words. Logits are loaded before the mask, not after it: even if half of the mask words
    have no bit, reading fewer logits saves less than waiting for the mask costs."""
    row, position, first_word = tl.program_id(0), tl.program_id(1), tl.program_id(2) * WORDS
    line = row * tl.num_programs(1) + position
    word, bit_index = tl.arange(0, WORDS), tl.arange(0, 32)
    index, words = word[:, None] * 32 + bit_index[None, :], first_word + word
    if bit_of is not None:  # one dimension: with two, Triton 3.6 moves logits and pointers between layouts before the load of mask bits
        index = tl.arange(0, WORDS * 32)
    ids = first_word * 32 + index
    line_logits = logits + row.to(tl.int64) * logits_row_stride + position.to(tl.int64) * logits_position_stride
    if masks is not None:  # these loads are issued before the logits, on whose arrival a branch may wait
        masked, table_row = tl.load(constrained + row).to(tl.int32), table_row_of(row.to(tl.int64), rows)
        closed = masked < 0
        if status is not None:
            closed = (masked != 0) & (tl.load(status + line) != _OK)
    if ALIGNED:  # shows the compiler the alignment, for wide loads without a branch
        width = width // _WIDE * _WIDE
        values = tl.load(line_logits + ids, mask=ids < width, other=float("-inf"))
    elif (first_word + WORDS) * 32 <= width:
        values = tl.load(line_logits + ids)
    else:
        values = tl.load(line_logits + ids, mask=ids < width, other=float("-inf"))
    wide = values.to(tl.float32)
    if masks is not None:
        mask_end = masked * width  # no id of a row without a mask is below it
        source = masks + table_row * masks_row_stride + position.to(tl.int64) * masks_position_stride
        if bit_of is not None:
            bit = tl.load(bit_of + ids, mask=ids < width, other=0)
            bits = tl.load(source + (bit >> 5), mask=ids < mask_end, other=-1) >> (bit & 31).to(tl.int32)
            bits = tl.where(closed, 0, bits)
        else:
            bits = tl.where(closed, 0, tl.load(source + words, mask=words * 32 < mask_end, other=-1))[:, None]
            bits = (bits >> (bit_index & 24)[None, :]) >> (bit_index & 7)[None, :]  # a thread has eight tokens: their bits are constants
        wide = tl.where((bits & 1) != 0, wide, float("-inf"))
    candidate = candidates + line.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    if values.dtype.primitive_bitwidth == 16 and WORDS * 32 <= _FREE_BITS + 1:
        tl.store(candidate, best_of_narrow(wide, index, first_word * 32))
    else:
        tl.store(candidate, best_of(wide, ids))


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
    grid = batch, positions, triton.cdiv(width, tile)
    candidates = torch.empty(batch * positions, grid[2], dtype=torch.int64, device=logits.device)
    sizes = width, *logits.stride()[:2], *(masks.stride()[:2] if masks is not None else (0, 0))
    constants = {"WORDS": tile // 32, "ALIGNED": width % _WIDE.value == 0, "num_warps": 4 if candidates.numel() >= MANY_PROGRAMS else 8}
    masked_candidates[grid](*inputs, candidates, *sizes, **constants, enable_fp_fusion=False)
    store_best(candidates, finite, token)


def store_best(candidates: Tensor, finite: Tensor | None, token: Tensor) -> None:
    rows, tiles = candidates.shape
    width = triton.next_power_of_2(tiles)
    take_best[(rows,)](candidates, finite, token, tiles, TILES=width, num_warps=1, enable_fp_fusion=False)


_NONE = tl.constexpr(int(MaskStatus.NONE))
_ILLEGAL = tl.constexpr(int(MaskStatus.ILLEGAL))
_COMPLETE = tl.constexpr(int(MaskStatus.COMPLETE))
_TERMINATED = tl.constexpr(int(MaskStatus.TERMINATED))
_DEAD_END = tl.constexpr(int(MaskStatus.DEAD_END))
_RUNNING, _STOP, _LENGTH, _FINISHED_COMPLETE, _FINISHED_DEAD_END, _MASK_FAULT, _LOGITS_FAULT = (
    tl.constexpr(int(FinishCode[name]))
    for name in ("RUNNING", "STOP", "LENGTH", "CONSTRAINT_COMPLETE", "DEAD_END", "MASK_FAULT", "LOGITS_FAULT")
)


@triton.jit
def check_tags(
    tags,  # [R, N, 4] int64
    owner,  # [R] int64
    generated,  # [R] int64
    constrained,  # [R] int64
    first,
    rows,  # [B] int64, or None
    status,  # [B, N] int64, written
    flags,  # [B] bool, written
    positions,
    tags_row_step,
    tags_position_step,
    owner_step,
    generated_step,
    constrained_step,
    POSITIONS: tl.constexpr,
):
    """mask_status for one row. POSITIONS is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    table_row = table_row_of(row, rows)
    position = tl.arange(0, POSITIONS)
    inside = position < positions
    source = tags + table_row * tags_row_step + position * tags_position_step
    is_valid = tl.load(source, mask=inside, other=0) == tl.load(owner + table_row * owner_step)
    is_valid = is_valid & (tl.load(source + 1, mask=inside, other=0) == tl.load(generated + table_row * generated_step))
    is_valid = is_valid & (tl.load(source + 2, mask=inside, other=0) == position + first)
    tag_status = tl.where(is_valid, tl.load(source + 3, mask=inside, other=_NONE), _NONE)
    has_mask = tl.load(constrained + table_row * constrained_step) != 0
    tl.store(flags + row, has_mask)
    tl.store(status + row * positions + position, tl.where(has_mask, tag_status, _OK), mask=inside)


def mask_status(*arguments: Any) -> None:
    """The arguments and outputs of kernels.choice.mask_status, in the order of the program."""
    tags, owner, generated, constrained, _, _, status, _ = arguments
    batch, positions = status.shape
    strides = *tags.stride()[:2], owner.stride(0), generated.stride(0), constrained.stride(0)
    check_tags[(batch,)](*arguments, positions, *strides, POSITIONS=triton.next_power_of_2(positions), num_warps=1)


@triton.jit
def accept_chain(
    sampled,  # [B, Q] int64
    finite,  # [B, Q] bool
    drafts,  # [B, Q - 1] int64
    draft_count,  # [B] int64
    status,  # [B, Q] int64
    stop_ids,  # [B, S] int64
    room,  # [B] int64
    known,  # [B] int64, accepted drafts, or None
    emitted,  # [B] int64 each, written
    accepted,
    finish,
    positions,
    stops,
    POSITIONS: tl.constexpr,
    STOPS: tl.constexpr,
):
    """acceptance.count_accepted and acceptance.emit for one row. POSITIONS and STOPS are powers of two."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, POSITIONS)
    inside, before_last = position < positions, position < positions - 1
    tokens = tl.load(sampled + row * positions + position, mask=inside, other=-1)
    is_finite = tl.load(finite + row * positions + position, mask=inside, other=0).to(tl.int32) != 0
    state = tl.load(status + row * positions + position, mask=inside, other=_NONE)
    if known is not None:
        num_accepted = tl.load(known + row)
    else:
        proposed = tl.load(drafts + row * (positions - 1) + position, mask=before_last, other=-1)
        next_status = tl.load(status + row * positions + position + 1, mask=before_last, other=_NONE)
        is_accepted = before_last & (tokens == proposed) & is_finite & (state == _OK) & (position < tl.load(draft_count + row))
        is_accepted = is_accepted & (next_status != _NONE) & (next_status != _ILLEGAL)
        num_accepted = tl.min(tl.where(is_accepted, POSITIONS, position), 0).to(tl.int64)
    last_status = tl.sum(tl.where(position == num_accepted, state, 0), 0)
    last_finite = tl.sum(tl.where((position == num_accepted) & is_finite, 1, 0), 0) != 0
    mask_is_ok = last_status == _OK
    num_valid = num_accepted + (mask_is_ok & last_finite).to(tl.int64)
    column = tl.arange(0, STOPS)
    stop_tokens = tl.load(stop_ids + row * stops + column, mask=column < stops, other=-1)
    is_stop_token = (tokens[:, None] == stop_tokens[None, :]) & (column < stops)[None, :]
    is_stop = (tl.max(is_stop_token.to(tl.int32), 1) != 0) & inside & (position < num_valid)
    first_stop = tl.min(tl.where(is_stop, position, positions), 0).to(tl.int64)
    free_tokens = tl.load(room + row)
    count = tl.minimum(tl.minimum(num_valid, first_stop + 1), free_tokens)
    code = tl.where(last_status == _DEAD_END, _FINISHED_DEAD_END, _MASK_FAULT)
    code = tl.where(last_status == _TERMINATED, _STOP, code)
    code = tl.where(last_status == _COMPLETE, _FINISHED_COMPLETE, code)
    code = tl.where(mask_is_ok, tl.where(last_finite, _RUNNING, _LOGITS_FAULT), code)
    code = tl.where(count == free_tokens, _LENGTH, code)
    code = tl.where(first_stop < count, _STOP, code)
    tl.store(emitted + row, count)
    tl.store(accepted + row, tl.minimum(num_accepted, count))
    tl.store(finish + row, code.to(tl.int64))


def chain_accept(*tensors: Any) -> None:
    """The arguments and outputs of kernels.choice.chain_accept, in the order of the program."""
    sampled, _, _, _, _, stop_ids, *_ = tensors
    (rows, positions), stops = sampled.shape, stop_ids.shape[1]
    constants = {"POSITIONS": triton.next_power_of_2(positions), "STOPS": triton.next_power_of_2(max(stops, 1))}
    accept_chain[(rows,)](*tensors, positions, stops, **constants, num_warps=1, enable_fp_fusion=False)
