"""The rings of a round in pinned memory: its batch is read from a slot, its results are written to one, both within the graph.

The number of the round, in device memory, selects the slots, so a round is one launch. With `Limits.loops` the device also decides whether
a launch runs another round: the host reads a slot of the results ring when its header has the number of the round it expects, and controls
running launches by three integers that it may write at any time.
"""

from __future__ import annotations

from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.graphs.row_layout import ResultLayout
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.kernels.operation import Contiguous, Float32s, Longs, operation


def receive_batch(buffers: StaticBuffers, size: int) -> None:
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
        capacity = len(headers) - len(b.batch_rows_ring_host)  # with a full ring, each queued launch still publishes a round
        end_round(b.results[:size], rows, b.loop_control_host, b.round_counters, b.loop_done, headers, dummy_row, capacity)


# On a GPU without Triton the references copy a ring to the device, and back.


@operation(lambda *_: None, writes=("batch_rows",), triton=True, c=True, mapped=True)
def take_batch(number: Longs, ring: Longs, batch_rows: Longs) -> None:
    """Read the batch of a round from its slot of the ring.

    number [>= 1], of which the first is read; ring [S, max_rows], pinned; batch_rows [B].
    """
    rows = ring.to(number.device, non_blocking=True)[:, : len(batch_rows)]
    batch_rows.copy_(rows.index_select(0, number[:1] % len(ring))[0])


@operation(lambda *_: None, writes=("published", "ring", "logprobs_ring"), triton=True, c=True, mapped=True)
def publish_results(results: Longs, logprobs: Float32s, published: Longs, ring: Longs, logprobs_ring: Float32s) -> None:
    """Write the results of a round to the next slot of the rings, and count it.

    results [B, width]; logprobs [B, Q, 2]; published [1]. In pinned memory: ring [S, max_rows, width]; logprobs_ring [S, max_rows, Q, 2].
    """
    slot = published % len(ring)
    for lines, lines_ring in ((results, ring), (logprobs, logprobs_ring)):
        copy = lines_ring.to(lines.device, non_blocking=True)
        copy[:, : len(lines)].index_copy_(0, slot, lines[None])
        lines_ring.copy_(copy, non_blocking=True)
    published.add_(1)


FINISH_COLUMN = ResultLayout(0).columns["finish"].start  # the column is the same for any number of drafts


@operation(lambda *_: None, writes=("done", "headers"), triton=True, mapped=True)
def end_round(
    results: Contiguous, rows: Contiguous, control: Tensor, counters: Tensor, done: Tensor, headers: Tensor, dummy_row: int, capacity: int
) -> None:
    """Write the header of the slot that was published, and to `done` whether the launch ends.

    results [B, width] int64; rows [B] int64; counters [Counter] int64; done [1] int32. In pinned memory: control [Control] int64; headers
    [S, Counter] int64.
    """
    live = results[:, FINISH_COLUMN] == FinishCode.RUNNING
    finished = (~live & (rows != dummy_row)).any() & (control[Control.WAITING] != 0)
    stopped = counters[Counter.LAUNCH] < control[Control.STOP_BEFORE]
    full = counters[Counter.PUBLISHED] - control[Control.READ] >= capacity
    done.copy_(~live.any() | finished | stopped | full)
    headers.index_copy_(0, (counters[Counter.PUBLISHED :] - 1) % len(headers), counters[None])
