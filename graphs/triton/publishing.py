"""The Triton programs of take_batch, publish_results and end_round: one instance each."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.publishing import FINISH_COLUMN
from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.sampling.grammar.status import FinishCode

TILE = 1024


@triton.jit
def take_rows(
    number,  # [1] int64
    ring,  # [S, max_rows] int64, pinned; the host wrote the slot before the launch
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


_RUNNING, _FINISH = tl.constexpr(int(FinishCode.RUNNING)), tl.constexpr(FINISH_COLUMN)
_LAUNCH, _PUBLISHED = tl.constexpr(int(Counter.LAUNCH)), tl.constexpr(int(Counter.PUBLISHED))
_STOP, _WAITING, _READ = (tl.constexpr(int(each)) for each in (Control.STOP_BEFORE, Control.WAITING, Control.READ))


@triton.jit
def decide_end(
    results,  # [B, width] int64
    rows,  # [B] int64
    control,  # [Control] int64, pinned; the host writes it at any time
    counters,  # [Counter] int64
    done,  # [1] int32, written
    headers,  # [S, Counter] int64, pinned, written
    dummy_row,
    capacity,
    batch,
    width,
    slots,
    ROWS: tl.constexpr,  # B, rounded up
):
    launch, published, row = tl.load(counters + _LAUNCH), tl.load(counters + _PUBLISHED), tl.arange(0, ROWS)
    finish = tl.load(results + row * width + _FINISH, mask=row < batch, other=0)
    used = tl.load(rows + row, mask=row < batch, other=dummy_row) != dummy_row
    live = tl.max((finish == _RUNNING).to(tl.int32), 0) != 0
    finished = tl.max((used & (finish != _RUNNING)).to(tl.int32), 0) != 0
    ended = ~live | (finished & (tl.load(control + _WAITING, volatile=True) != 0))
    ended = ended | (launch < tl.load(control + _STOP, volatile=True))
    ended = ended | (published - tl.load(control + _READ, volatile=True) >= capacity)
    tl.store(done, ended.to(tl.int32))
    header = headers + (published - 1) % slots * 2
    tl.store(header + _LAUNCH, launch)
    tl.debug_barrier()  # the stores of all threads precede the release by one thread, which the host acquires with the slot
    tl.atomic_xchg(header + _PUBLISHED, published, sem="release", scope="sys")


def end_round(*arguments: Any) -> None:
    results, *_, headers, _, _ = arguments
    batch, width = results.shape
    decide_end[(1,)](*arguments, batch, width, len(headers), ROWS=triton.next_power_of_2(batch), num_warps=1)
