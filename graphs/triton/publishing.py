"""The Triton program of publish_results: one instance, since the header of a slot follows all of its contents."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.publishing import FINISH, Control, Counter
from stepgraph.sampling.grammar.status import FinishCode

_RUNNING, _FINISH = tl.constexpr(int(FinishCode.RUNNING)), tl.constexpr(FINISH)
_LAUNCH, _PUBLISHED = tl.constexpr(int(Counter.LAUNCH)), tl.constexpr(int(Counter.PUBLISHED))
_STOP, _WAITING, _READ = (tl.constexpr(int(each)) for each in (Control.STOP_BEFORE, Control.WAITING, Control.READ))
TILE = 1024


@triton.jit
def publish_round(
    results,  # [B, width] int64
    logprobs,  # [B, pairs] float32
    rows,  # [B] int64
    control,  # [Control] int64, pinned; the host writes it at any time
    counters,  # [Counter] int64, written
    done,  # [1] int32, written
    ring,  # [S, ...] int64, pinned, written, as the next two
    logprobs_ring,  # [S, ...] float32
    headers,  # [S, Counter] int64
    dummy_row,
    capacity,
    batch,
    width,
    pairs,
    slots,
    line,  # elements of a slot of ring
    pair_line,  # elements of a slot of logprobs_ring
    ROWS: tl.constexpr,  # B, rounded up
    TILE: tl.constexpr,
):
    launch, published = tl.load(counters + _LAUNCH), tl.load(counters + _PUBLISHED)
    slot, index, row = published % slots, tl.arange(0, TILE), tl.arange(0, ROWS)
    for start in range(0, batch * width, TILE):
        inside = start + index < batch * width
        tl.store(ring + slot * line + start + index, tl.load(results + start + index, mask=inside), mask=inside)
    for start in range(0, batch * pairs, TILE):
        inside = start + index < batch * pairs
        tl.store(logprobs_ring + slot * pair_line + start + index, tl.load(logprobs + start + index, mask=inside), mask=inside)

    finish = tl.load(results + row * width + _FINISH, mask=row < batch, other=0)
    used = tl.load(rows + row, mask=row < batch, other=dummy_row) != dummy_row
    live = tl.max((finish == _RUNNING).to(tl.int32), 0) != 0
    finished = tl.max((used & (finish != _RUNNING)).to(tl.int32), 0) != 0
    ended = ~live | (finished & (tl.load(control + _WAITING, volatile=True) != 0))
    ended = ended | (launch < tl.load(control + _STOP, volatile=True))
    ended = ended | (published + 1 - tl.load(control + _READ, volatile=True) >= capacity)
    tl.store(done, ended.to(tl.int32))
    tl.store(counters + _PUBLISHED, published + 1)
    tl.store(headers + slot * 2 + _LAUNCH, launch)
    tl.debug_barrier()  # the stores of all threads are before the release of one, which the host acquires with the slot
    tl.atomic_xchg(headers + slot * 2 + _PUBLISHED, published + 1, sem="release", scope="sys")


def publish_results(
    results: Tensor,
    logprobs: Tensor,
    rows: Tensor,
    control: Tensor,
    counters: Tensor,
    done: Tensor,
    ring: Tensor,
    logprobs_ring: Tensor,
    headers: Tensor,
    dummy_row: int,
    capacity: int,
) -> None:
    publish_round[(1,)](
        results,
        logprobs,
        rows,
        control,
        counters,
        done,
        ring,
        logprobs_ring,
        headers,
        dummy_row,
        capacity,
        len(rows),
        results.shape[1],
        logprobs[0].numel(),
        len(ring),
        ring.stride(0),
        logprobs_ring.stride(0),
        ROWS=triton.next_power_of_2(len(rows)),
        TILE=TILE,
        num_warps=4,
    )
