"""The Triton program of rope_and_write_kv: one instance per token and head, each number is read and written once.

Products and sums are rounded as torch rounds them, so that both give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.attention.triton.float8 import as_written


@triton.jit
def rotate_head(source, target, cosines, sines, half, column, inside, place, others, PARTIAL: tl.constexpr):
    """Write a head rotated; each product is rounded before the sum. others: which numbers stay."""
    if PARTIAL:
        tl.store(target + place, as_written(tl.load(source + place, mask=others, other=0.0), target), mask=others)
    first, second = tl.load(source + column, mask=inside, other=0.0), tl.load(source + half + column, mask=inside, other=0.0)
    cosine = tl.load(cosines + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + column, mask=inside, other=0.0).to(tl.float32)
    low = (first.to(tl.float32) * cosine).to(first.dtype).to(tl.float32) - (second.to(tl.float32) * sine).to(first.dtype).to(tl.float32)
    cosine = tl.load(cosines + half + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + half + column, mask=inside, other=0.0).to(tl.float32)
    high = (second.to(tl.float32) * cosine).to(first.dtype).to(tl.float32) + (first.to(tl.float32) * sine).to(first.dtype).to(tl.float32)
    tl.store(target + column, as_written(low.to(first.dtype), target), mask=inside)
    tl.store(target + half + column, as_written(high.to(first.dtype), target), mask=inside)


@triton.jit
def rotate_heads(
    query,  # [N, heads, size], tokens `query_stride` apart
    key,  # [N, kv_heads, size]
    value,
    cosines,  # [N, 2 * half]
    sines,
    slots,  # [N] int64
    keys,  # [slots, kv_heads, size], entries `cache_stride` apart
    values,
    output,  # [N, heads, size]
    query_stride,
    key_stride,
    value_stride,
    cache_stride,
    heads,
    size,  # of a head
    half,  # of the numbers that are rotated
    HALF: tl.constexpr,  # rounded up
    SIZE: tl.constexpr,  # rounded up
    PARTIAL: tl.constexpr,  # not all numbers are rotated
):
    """One token's query head, or its key and value of one cache head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, place = tl.arange(0, HALF), tl.arange(0, SIZE)
    inside, others = column < half, (place >= half * 2) & (place < size)
    cosines, sines = cosines + token * half * 2, sines + token * half * 2
    if head < heads:
        rotated = output + (token * heads + head) * size
        rotate_head(query + token * query_stride + head * size, rotated, cosines, sines, half, column, inside, place, others, PARTIAL)
    else:
        within = (head - heads) * size
        entry = tl.load(slots + token) * cache_stride + within
        rotate_head(key + token * key_stride + within, keys + entry, cosines, sines, half, column, inside, place, others, PARTIAL)
        own = tl.load(value + token * value_stride + within + place, mask=place < size, other=0.0)
        tl.store(values + entry + place, as_written(own, values), mask=place < size)


def rope_and_write_kv(*tensors: Tensor) -> None:
    """The arguments and the output of rope_kv.rope_and_write_kv, in the order of the program."""
    query, key, value, cosines, _, _, keys, values, _ = tensors
    (tokens, heads, size), rotated = query.shape, cosines.shape[2]
    assert rotated % 2 == 0 and keys.stride() == values.stride() and keys.stride()[1:] == (size, 1), f"keys {keys.stride()}"
    strides, half = [each.stride(0) for each in (query, key, value, keys)], rotated // 2
    constants = {"HALF": triton.next_power_of_2(half), "SIZE": triton.next_power_of_2(size), "PARTIAL": rotated < size}
    rotate_heads[(tokens, heads + key.shape[1])](*tensors, *strides, heads, size, half, **constants, num_warps=1, enable_fp_fusion=False)
