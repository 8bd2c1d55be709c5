"""The rings of a round in pinned memory: its batch is read from a slot, its results are written to one, both within the graph.

The number of the round, in device memory, selects the slots, so a round is one launch. With `Limits.loops` the device also decides
whether the launch runs another round: the host reads a slot when its header has the number of the round it expects, and controls
running launches by three integers that it may write at any time.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from stepgraph.graphs.buffers import BufferSpec, ResultLayout, StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.kernels.c_kernel import CKernel
from stepgraph.sampling.kernels.operation import Contiguous, operation

TOP_RINGS = {"ids": torch.int32, "logprobs": torch.float32}  # written by kernels.top_logprobs
FINISH = ResultLayout(0).columns["finish"].start  # the column is the same for any number of drafts


class Counter(IntEnum):
    """`round_counters`, and the header of each slot."""

    LAUNCH = 0  # with loops: number of the launch, from 1 on, which selects the batch
    PUBLISHED = 1  # rounds published so far, in a header the one in the slot included


class Control(IntEnum):
    """`loop_control_host`: when a launch ends besides the end of all its rows."""

    STOP_BEFORE = 0  # launches with a smaller number end after one more round
    WAITING = 1  # 1: end when a row has finished, as a request waits for one
    READ = 2  # rounds that the host has read: a launch ends while the ring is full


def ring_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`. Without them `batch_rows` is the batch, and `results` are for the caller to read.

    The host never writes a slot that the device still has to read, and never reads one that the device still writes.
    """
    slots, results = limits.max_rows, ResultLayout(limits.num_speculative_tokens).width
    rings: tuple[BufferSpec, ...] = (
        BufferSpec("round_counters", (len(Counter),), torch.int64),
        BufferSpec("batch_rows_ring_host", (limits.ring_depth, slots), torch.int64, "pinned", fill=limits.dummy_row),
        BufferSpec("results_ring_host", (limits.result_slots, slots, results), torch.int64, "pinned"),
        BufferSpec("logprobs_ring_host", (limits.result_slots, slots, limits.positions, 2), torch.float32, "pinned"),
    )
    if limits.max_top_logprobs:
        shape = (limits.result_slots, slots, limits.positions, 2 * limits.max_top_logprobs)
        rings += tuple(BufferSpec(f"top_{name}_ring_host", shape, dtype, "pinned") for name, dtype in TOP_RINGS.items())
    loops = (
        BufferSpec("loop_done", (1,), torch.int32),  # whether the launch ends after this round
        BufferSpec("loop_control_host", (len(Control),), torch.int64, "pinned"),
        BufferSpec("results_header_ring_host", (limits.result_slots, len(Counter)), torch.int64, "pinned"),
    )
    return (*rings, *loops) if limits.loops else rings


def receive(buffers: StaticBuffers, size: int) -> None:
    """Copy the batch of this round to `batch_rows`."""
    if "round_counters" in buffers:
        number = buffers.round_counters[Counter.LAUNCH if "loop_done" in buffers else Counter.PUBLISHED :]
        take_batch(number, buffers.batch_rows_ring_host, buffers.batch_rows[:size])


def publish(buffers: StaticBuffers, rows: Tensor) -> None:
    """Publish the results of the batch [B]."""
    if "round_counters" not in buffers:
        return
    b, size, published = buffers, len(rows), buffers.round_counters[Counter.PUBLISHED :]
    publish_results(b.results[:size], b.results_logprobs[:size], published, b.results_ring_host, b.logprobs_ring_host)
    if "loop_done" in b:
        headers, dummy_row = b.results_header_ring_host, len(b.row_state) - 1
        capacity = len(headers) - len(b.batch_rows_ring_host)  # launches that follow one with a full ring publish a round each
        end_round(b.results[:size], rows, b.loop_control_host, b.round_counters, b.loop_done, headers, dummy_row, capacity)


def _contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


# On a GPU without Triton the references copy a ring to the device, and back.


@operation(lambda *_: None, writes=("batch_rows",), triton=True, c=CKernel("take_batch", _contiguous), mapped=True)
def take_batch(number: Tensor, ring: Tensor, batch_rows: Tensor) -> None:
    """Read the batch of a round from its slot of the ring.

    number [>= 1] int64, the first counts; ring [S, slots] int64, pinned; batch_rows [B] int64.
    """
    rows = ring.to(number.device, non_blocking=True)[:, : len(batch_rows)]
    batch_rows.copy_(rows.index_select(0, number[:1] % len(ring))[0])


@operation(
    lambda *_: None,
    writes=("published", "ring", "logprobs_ring"),
    triton=True,
    c=CKernel("publish_results", _contiguous),
    mapped=True,
)
def publish_results(results: Contiguous, logprobs: Contiguous, published: Tensor, ring: Tensor, logprobs_ring: Tensor) -> None:
    """Write the results of a round to the next slot of the rings, and count it.

    results [B, width] int64; logprobs [B, Q, 2] float32; published [1] int64. In pinned memory: ring [S, slots, width]; logprobs_ring
    [S, slots, Q, 2].
    """
    slot = published % len(ring)
    for lines, lines_ring in ((results, ring), (logprobs, logprobs_ring)):
        copy = lines_ring.to(lines.device, non_blocking=True)
        copy[:, : len(lines)].index_copy_(0, slot, lines[None])
        lines_ring.copy_(copy, non_blocking=True)
    published.add_(1)


@operation(lambda *_: None, writes=("done", "headers"), triton=True, mapped=True)
def end_round(
    results: Contiguous, rows: Contiguous, control: Tensor, counters: Tensor, done: Tensor, headers: Tensor, dummy_row: int, capacity: int
) -> None:
    """Write the header of the slot that was published, and to `done` whether the launch ends.

    results [B, width] int64; rows [B] int64; counters [Counter] int64; done [1] int32. In pinned memory: control [Control] int64; headers
    [S, Counter] int64.
    """
    live = results[:, FINISH] == FinishCode.RUNNING
    finished = (~live & (rows != dummy_row)).any() & (control[Control.WAITING] != 0)
    stopped = counters[Counter.LAUNCH] < control[Control.STOP_BEFORE]
    full = counters[Counter.PUBLISHED] - control[Control.READ] >= capacity
    done.copy_(~live.any() | finished | stopped | full)
    headers.index_copy_(0, (counters[Counter.PUBLISHED :] - 1) % len(headers), counters[None])
