"""The Triton programs of take_batch and publish_results: one instance each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def take_rows(
    number,  # [1] int64
    ring,  # [S, slots] int64, pinned; the host wrote the slot before the launch
    batch_rows,  # [B] int64, written
    slots,
    line,  # elements of a slot
    batch,
    ROWS: tl.constexpr,  # B, rounded up
):
    index, slot = tl.arange(0, ROWS), tl.load(number) % slots
    rows = tl.load(ring + slot * line + index, mask=index < batch, volatile=True)
    tl.store(batch_rows + index, rows, mask=index < batch)


@triton.jit
def publish_round(
    results,  # [B, width] int64
    logprobs,  # [B, pairs] float32
    published,  # [1] int64, written
    ring,  # [S, ...] int64, pinned, written, as the next
    logprobs_ring,  # [S, ...] float32
    slots,
    numbers,  # elements of results
    line,  # elements of a slot of ring
    pairs,  # elements of logprobs
    pair_line,  # elements of a slot of logprobs_ring
    TILE: tl.constexpr,
):
    count, index = tl.load(published), tl.arange(0, TILE)
    slot = count % slots
    for start in range(0, numbers, TILE):
        inside = start + index < numbers
        tl.store(ring + slot * line + start + index, tl.load(results + start + index, mask=inside), mask=inside)
    for start in range(0, pairs, TILE):
        inside = start + index < pairs
        tl.store(logprobs_ring + slot * pair_line + start + index, tl.load(logprobs + start + index, mask=inside), mask=inside)
    tl.debug_barrier()  # every thread has read the count
    tl.store(published, count + 1)


def take_batch(number: Tensor, ring: Tensor, batch_rows: Tensor) -> None:
    batch = len(batch_rows)
    take_rows[(1,)](number, ring, batch_rows, *ring.shape, batch, ROWS=triton.next_power_of_2(batch), num_warps=1)


def publish_results(*tensors: Tensor) -> None:
    results, logprobs, _, ring, logprobs_ring = tensors
    sizes = (results.numel(), ring.stride(0), logprobs.numel(), logprobs_ring.stride(0))
    publish_round[(1,)](*tensors, len(ring), *sizes, TILE=TILE, num_warps=4)
