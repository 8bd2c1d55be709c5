"""The Triton program of slot_product: one instance per row of slots, part of its states and part of the output."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.attention.triton.paged import product as matrix_product

STATES_TILE, OUTER_TILE, INNER_TILE = 32, 32, 64


@triton.jit
def multiply_by_slot(
    states,  # [B * Q, inner]
    slots,  # [B] int64
    weights,  # [slots, outer, inner]
    base,  # [B * Q, outer], or None
    output,  # [B * Q, outer], written
    count,  # Q
    inner,
    outer,
    state_stride,
    slot_stride,
    COUNT: tl.constexpr,  # states of one instance
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: Triton's interpreter treats bfloat16 as integers
):
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2) * COUNT + tl.arange(0, COUNT)
    column = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    token = row * count + index
    slot = tl.load(slots + row * slot_stride)
    used = tl.where(slot > 0, inner, 0)  # slot 0 is all zeros
    total = tl.zeros([COUNT, OUTER], tl.float32)
    for start in range(0, used, INNER):
        place = start + tl.arange(0, INNER)
        state = tl.load(states + token[:, None] * state_stride + place, mask=(index < count)[:, None] & (place < inner), other=0.0)
        in_weight = (column < outer)[:, None] & (place < inner)
        weight = tl.load(weights + (slot * outer + column[:, None]) * inner + place, mask=in_weight, other=0.0)
        total += matrix_product(state, tl.trans(weight), WIDE)
    inside = (index < count)[:, None] & (column < outer)
    result = total.to(output.dtype.element_ty)
    if base is not None:
        before = tl.load(base + token[:, None] * outer + column, mask=inside, other=0.0)
        result = (before.to(tl.float32) + result.to(tl.float32)).to(output.dtype.element_ty)
    tl.store(output + token[:, None] * outer + column, result, mask=inside)


def slot_product(*tensors: Tensor) -> None:
    """The arguments and the output of lora.slot_product, in the order of the program."""
    states, slots, weights, *_ = tensors
    count, (_, outer, inner) = len(states) // len(slots), weights.shape
    sizes = count, inner, outer, states.stride(0), slots.stride(0)
    tiles = {"COUNT": STATES_TILE, "OUTER": OUTER_TILE, "INNER": INNER_TILE, "WIDE": states.device.type == "cpu"}
    grid = triton.cdiv(outer, OUTER_TILE), len(slots), triton.cdiv(count, STATES_TILE)
    multiply_by_slot[grid](*tensors, *sizes, **tiles, num_warps=4)
