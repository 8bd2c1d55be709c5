"""Results of a round, written to pinned memory by the device, which also decides whether the launch runs another round.

Only in engines with `Limits.loops`. The host reads a slot of the rings when its header has the number of the round it expects, and
controls running launches by three integers that it may write at any time.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from stepgraph.graphs.buffers import BufferSpec, ResultLayout, StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.kernels.operation import Contiguous, operation

FINISH = ResultLayout(0).columns["finish"].start  # the column is the same for any number of drafts


class Counter(IntEnum):
    """`loop_counters`, and the header of each slot."""

    LAUNCH = 0  # number of the launch, from 1 on
    PUBLISHED = 1  # rounds published so far, the one in the slot included


class Control(IntEnum):
    """`loop_control_host`: when a launch ends besides the end of all its rows."""

    STOP_BEFORE = 0  # launches with a smaller number end after one more round
    WAITING = 1  # 1: end when a row has finished, as a request waits for one
    READ = 2  # rounds that the host has read: a launch ends while the ring is full


def loop_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for launches of many rounds."""
    return (
        BufferSpec("loop_counters", (len(Counter),), torch.int64),
        BufferSpec("loop_done", (1,), torch.int32),  # whether the launch ends after this round
        BufferSpec("loop_control_host", (len(Control),), torch.int64, "pinned"),
        BufferSpec("results_header_ring_host", (limits.result_slots, len(Counter)), torch.int64, "pinned"),
    )


def publish(buffers: StaticBuffers, rows: Tensor) -> None:
    """Publish the results of the batch [B]."""
    size, ring_depth = len(rows), len(buffers.batch_rows_ring_host)
    publish_results(
        buffers.results[:size],
        buffers.results_logprobs[:size],
        rows,
        buffers.loop_control_host,
        buffers.loop_counters,
        buffers.loop_done,
        buffers.results_ring_host,
        buffers.logprobs_ring_host,
        buffers.results_header_ring_host,
        len(buffers.row_state) - 1,
        len(buffers.results_ring_host) - ring_depth,  # launches that follow one with a full ring publish a round each
    )


@operation(lambda *_: None, writes=("counters", "done", "ring", "logprobs_ring", "headers"), triton=True, mapped=True)
def publish_results(
    results: Contiguous,
    logprobs: Contiguous,
    rows: Contiguous,
    control: Tensor,
    counters: Tensor,
    done: Tensor,
    ring: Tensor,
    logprobs_ring: Tensor,
    headers: Tensor,
    dummy_row: int,
    capacity: int,
) -> None:
    """Write a round to the next slot of the rings, its header last, and to `done` whether the launch ends.

    results [B, width] int64; logprobs [B, Q, 2] float32; rows [B] int64; counters [Counter] int64; done [1] int32. In pinned memory:
    control [Control] int64; ring [S, slots, width]; logprobs_ring [S, slots, Q, 2]; headers [S, Counter] int64.
    """
    slot = counters[Counter.PUBLISHED :] % len(ring)
    ring[:, : len(rows)].index_copy_(0, slot, results[None])
    logprobs_ring[:, : len(rows)].index_copy_(0, slot, logprobs[None])
    counters[Counter.PUBLISHED].add_(1)
    live = results[:, FINISH] == FinishCode.RUNNING
    finished = (~live & (rows != dummy_row)).any() & (control[Control.WAITING] != 0)
    stopped = counters[Counter.LAUNCH] < control[Control.STOP_BEFORE]
    full = counters[Counter.PUBLISHED] - control[Control.READ] >= capacity
    done.copy_(~live.any() | finished | stopped | full)
    headers.index_copy_(0, slot, counters[None])
