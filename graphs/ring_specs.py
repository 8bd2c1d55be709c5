"""The rings in pinned memory that connect rounds with the host, and the integers beside them."""

from __future__ import annotations

from enum import IntEnum

import torch

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.row_layout import ResultLayout

TOP_RINGS = {"ids": torch.int32, "logprobs": torch.float32}  # written by kernels.top_logprobs


class Control(IntEnum):
    """`loop_control_host`: when a launch ends besides the end of all its rows."""

    STOP_BEFORE = 0  # launches with a smaller number end after one more round
    WAITING = 1  # 1: end when a row has finished, as a request waits for one
    READ = 2  # rounds that the host has read: a launch ends while the ring is full


class Counter(IntEnum):
    """`round_counters`, and the header of each slot."""

    LAUNCH = 0  # with loops: number of the launch, from 1 on, which selects the batch
    PUBLISHED = 1  # rounds published so far, in a header the one in the slot included


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
