"""The Triton programs of mask_status and chain_accept, and their launches. Imported only where Triton can launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from stepgraph.sampling.grammar.status import FinishCode, MaskStatus

_OK = tl.constexpr(int(MaskStatus.OK))
_NONE = tl.constexpr(int(MaskStatus.NONE))
_ILLEGAL = tl.constexpr(int(MaskStatus.ILLEGAL))
_COMPLETE = tl.constexpr(int(MaskStatus.COMPLETE))
_TERMINATED = tl.constexpr(int(MaskStatus.TERMINATED))
_DEAD_END = tl.constexpr(int(MaskStatus.DEAD_END))
_RUNNING = tl.constexpr(int(FinishCode.RUNNING))
_STOP = tl.constexpr(int(FinishCode.STOP))
_LENGTH = tl.constexpr(int(FinishCode.LENGTH))
_FINISHED_COMPLETE = tl.constexpr(int(FinishCode.CONSTRAINT_COMPLETE))
_FINISHED_DEAD_END = tl.constexpr(int(FinishCode.DEAD_END))
_MASK_FAULT = tl.constexpr(int(FinishCode.MASK_FAULT))
_LOGITS_FAULT = tl.constexpr(int(FinishCode.LOGITS_FAULT))


@triton.jit
def check_tags(
    tags,  # [R, N, 4] int64
    owner,  # [B] int64
    generated,  # [B] int64
    constrained,  # [B] int64
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
    tag_row = row
    if rows is not None:
        tag_row = tl.load(rows + row)
    position = tl.arange(0, POSITIONS)
    inside = position < positions
    source = tags + tag_row * tags_row_step + position * tags_position_step
    mine = tl.load(source, mask=inside, other=0) == tl.load(owner + row * owner_step)
    mine = mine & (tl.load(source + 1, mask=inside, other=0) == tl.load(generated + row * generated_step))
    mine = mine & (tl.load(source + 2, mask=inside, other=0) == position + first)
    tag_status = tl.where(mine, tl.load(source + 3, mask=inside, other=_NONE), _NONE)
    has_mask = tl.load(constrained + row * constrained_step) != 0
    tl.store(flags + row, has_mask)
    tl.store(status + row * positions + position, tl.where(has_mask, tag_status, _OK), mask=inside)


def mask_status(*arguments: Any) -> None:
    """The arguments and outputs of kernels.chain.mask_status, in the order of the program."""
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
        held = tl.load(known + row)
    else:
        proposed = tl.load(drafts + row * (positions - 1) + position, mask=before_last, other=-1)
        follows = tl.load(status + row * positions + position + 1, mask=before_last, other=_NONE)
        holds = before_last & (tokens == proposed) & is_finite & (state == _OK) & (position < tl.load(draft_count + row))
        holds = holds & (follows != _NONE) & (follows != _ILLEGAL)
        held = tl.min(tl.where(holds, POSITIONS, position), 0).to(tl.int64)
    last = tl.sum(tl.where(position == held, state, 0), 0)
    last_finite = tl.sum(tl.where((position == held) & is_finite, 1, 0), 0) != 0
    ready = last == _OK
    offered = held + (ready & last_finite).to(tl.int64)
    column = tl.arange(0, STOPS)
    ends = tl.load(stop_ids + row * stops + column, mask=column < stops, other=-1)
    meets = (tokens[:, None] == ends[None, :]) & (column < stops)[None, :]
    is_stop = (tl.max(meets.to(tl.int32), 1) != 0) & inside & (position < offered)
    first_stop = tl.min(tl.where(is_stop, position, positions), 0).to(tl.int64)
    space = tl.load(room + row)
    count = tl.minimum(tl.minimum(offered, first_stop + 1), space)
    code = tl.where(last == _DEAD_END, _FINISHED_DEAD_END, _MASK_FAULT)
    code = tl.where(last == _TERMINATED, _STOP, code)
    code = tl.where(last == _COMPLETE, _FINISHED_COMPLETE, code)
    code = tl.where(ready, tl.where(last_finite, _RUNNING, _LOGITS_FAULT), code)
    code = tl.where(count == space, _LENGTH, code)
    code = tl.where(first_stop < count, _STOP, code)
    tl.store(emitted + row, count)
    tl.store(accepted + row, tl.minimum(held, count))
    tl.store(finish + row, code.to(tl.int64))


def chain_accept(*tensors: Any) -> None:
    """The arguments and outputs of kernels.chain.chain_accept, in the order of the program."""
    sampled, _, _, _, _, stop_ids, *_ = tensors
    (rows, positions), stops = sampled.shape, stop_ids.shape[1]
    constants = {"POSITIONS": triton.next_power_of_2(positions), "STOPS": triton.next_power_of_2(max(stops, 1))}
    accept_chain[(rows,)](*tensors, positions, stops, **constants, num_warps=1, enable_fp_fusion=False)
