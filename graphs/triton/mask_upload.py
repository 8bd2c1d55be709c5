"""The Triton program of scatter_masks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import TAG_FIELDS

MASK_TILE = 1024


_TAG_FIELDS = tl.constexpr(TAG_FIELDS)


@triton.jit
def scatter_row(rows, tags, masks, row_tags, row_masks, positions, words, TILE: tl.constexpr):
    """A part of one mask, and with the first part its tag. A tag of an unknown position is not written."""
    place, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(tags + place * _TAG_FIELDS + 2)
    known = (position >= 0) & (position < positions)
    to = tl.load(rows + place) * positions + position
    inside = column < tl.where(known, words, 0)
    tl.store(row_masks + to * words + column, tl.load(masks + place * words + column, mask=inside, other=0), mask=inside)
    if tl.program_id(1) == 0:
        field = tl.arange(0, _TAG_FIELDS)
        tag = tl.load(tags + place * _TAG_FIELDS + field)
        tl.store(row_tags + to * _TAG_FIELDS + field, tag, mask=field < tl.where(known, _TAG_FIELDS, 0))


def scatter_masks(rows: Tensor, tags: Tensor, masks: Tensor, row_tags: Tensor, row_masks: Tensor) -> None:
    words = masks.shape[1]
    grid = (len(rows), triton.cdiv(words, MASK_TILE))
    scatter_row[grid](rows, tags, masks, row_tags, row_masks, row_masks.shape[1], words, TILE=MASK_TILE, num_warps=4)
