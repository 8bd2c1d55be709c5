"""The Triton program of scatter_masks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import TAG_FIELDS

MASK_TILE = 1024
_TAG_FIELDS = tl.constexpr(TAG_FIELDS)


@triton.jit
def scatter_row(
    rows,  # [B] int64
    tags,  # [B, TAG_FIELDS] int64, pinned, as masks: a host node before this launch wrote them
    masks,  # [B, words] int32
    row_tags,  # [R, positions, TAG_FIELDS] int64, written, as the next
    row_masks,  # [R, positions, words] int32
    forced,  # [B] int64, pinned, or None, as the next
    batch_forced,  # [B] int64, written
    positions,
    words,
    TILE: tl.constexpr,
):
    """A part of one mask; the first part also copies the tag. If the tag's position is out of range, neither is written to a row."""
    batch_row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(tags + batch_row * _TAG_FIELDS + 2, volatile=True)
    in_range = (position >= 0) & (position < positions)
    to = tl.load(rows + batch_row) * positions + position
    mask = tl.load(masks + batch_row * words + column, mask=column < words, other=0, volatile=True)
    tl.store(row_masks + to * words + column, mask, mask=column < tl.where(in_range, words, 0))
    if tl.program_id(1) == 0:
        field = tl.arange(0, _TAG_FIELDS)
        tag = tl.load(tags + batch_row * _TAG_FIELDS + field, volatile=True)
        tl.store(row_tags + to * _TAG_FIELDS + field, tag, mask=field < tl.where(in_range, _TAG_FIELDS, 0))
        if forced is not None:
            tl.store(batch_forced + batch_row, tl.load(forced + batch_row, volatile=True))


def scatter_masks(*tensors: Tensor | None) -> None:
    """The arguments of host_nodes.scatter_masks, in the order of the program."""
    _, _, masks, _, row_masks, *_ = tensors
    assert masks is not None and row_masks is not None
    (batch, words), positions = masks.shape, row_masks.shape[1]
    scatter_row[(batch, triton.cdiv(words, MASK_TILE))](*tensors, positions, words, TILE=MASK_TILE, num_warps=4)
