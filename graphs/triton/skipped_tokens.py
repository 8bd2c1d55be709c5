"""The Triton program of keep_skipped: one instance per token and tile of its features."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FEATURE_TILE = 1024


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
    place, position, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, before = tl.load(rows + place), tl.load(skipped + place * skipped_step)
    column = row * room + before + position
    if before + position < room:
        index = part * TILE + tl.arange(0, TILE)
        source = features + place * features_row_stride + position.to(tl.int64) * features_position_stride
        values = tl.load(source + index, mask=index < width)
        tl.store(row_features + column * width + index, values, mask=index < width)
        if part == 0:
            tl.store(row_tokens + column, tl.load(tokens + place * tl.num_programs(1) + position))
    if (position == 0) & (part == 0):
        tl.store(row_skipped + row * row_step, before + tl.load(emitted + place))


def keep_skipped(*tensors: Tensor) -> None:
    _, skipped, _, _, features, row_tokens, _, row_skipped = tensors
    batch, positions, width = features.shape
    keep_tile[(batch, positions, triton.cdiv(width, FEATURE_TILE))](
        *tensors,
        row_tokens.shape[1],
        width,
        skipped.stride(0),
        *features.stride()[:2],
        row_skipped.stride(0),
        TILE=FEATURE_TILE,
        num_warps=4,
    )
