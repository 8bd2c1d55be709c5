"""The Triton program of top_logprobs: one instance per position, which ends at once unless its row asks for tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.sampler import Param

_ASKED = tl.constexpr(int(Param.TOP_LOGPROBS))
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
    asked = tl.minimum(tl.load(row_params + tl.load(rows + row) * columns + _ASKED).to(tl.int32), most)
    at = (tl.load(published) % slots) * slot_line + row * row_line + position * position_line
    if asked > 0:
        own = logits + row * row_stride + position * position_stride
        kept = probs + row * probs_row_stride + position * probs_position_stride
        value, token = float("inf"), -1
        last, last_token = float("inf"), -1
        total = 0.0
        for index in range(asked):
            value, token = next_best(own, width, float("-inf"), value, token, TILE)
            if index == 0:
                total = log_total(own, width, value, TILE)
            tl.store(ids_ring + at + index, token)
            tl.store(values_ring + at + index, value - total)
            last, last_token = next_best(kept, width, 0.0, last, last_token, TILE)
            tl.store(ids_ring + at + most + index, last_token)
            tl.store(values_ring + at + most + index, tl.log(last))


def top_logprobs(*tensors: Tensor, tile: int = TOP_TILE) -> None:
    """The arguments of kernels.alternatives.top_logprobs, in the order of the program."""
    logits, probs, _, params, _, ids_ring, _ = tensors
    batch, positions, width = logits.shape
    sizes = positions, width, params.shape[1], len(ids_ring), ids_ring.shape[3] // 2
    strides = *logits.stride()[:2], *probs.stride()[:2], *ids_ring.stride()[:3]
    rank_tokens[(batch * positions,)](*tensors, *sizes, *strides, TILE=tile, num_warps=8)
