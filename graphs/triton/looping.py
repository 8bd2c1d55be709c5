"""The Triton program of end_round: one instance."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from stepgraph.graphs.looping import FINISH
from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.sampling.grammar.status import FinishCode

_RUNNING, _FINISH = tl.constexpr(int(FinishCode.RUNNING)), tl.constexpr(FINISH)
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
    tl.debug_barrier()  # the stores of all threads are before the release of one, which the host acquires with the slot
    tl.atomic_xchg(header + _PUBLISHED, published, sem="release", scope="sys")


def end_round(*given: Any) -> None:
    results, *_, headers, _, _ = given
    batch, width = results.shape
    decide_end[(1,)](*given, batch, width, len(headers), ROWS=triton.next_power_of_2(batch), num_warps=1)
