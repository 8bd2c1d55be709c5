"""Times of calls on a device, alone or interleaved, and their ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from tools.gpu.checks.context import Context, Figures, summary

SHORT_US = 20.0
Call = Callable[[], object]
Watch = Callable[[], float]


def wall_us(call: Call) -> float:
    """Microseconds of one call by the clock."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def wait_us(context: Context, call: Call) -> float:
    """Microseconds until the device has ended one call."""

    def wait() -> None:
        call()
        if not context.on_tape:
            torch.cuda.synchronize()

    return wall_us(wait)


def stopwatch(context: Context, call: Call) -> Watch:
    """A function that times one call, in microseconds: on a GPU as one of several in a CUDA graph, on the tape by the clock."""
    if context.on_tape:
        return partial(wait_us, context, call)
    calls_per_graph = 1 if context.rehearsal else 10
    graph = _graph_of(call, calls_per_graph)
    micros = min(device_seconds(graph.replay) for _ in range(2)) * 1e6 / calls_per_graph  # the first replay takes longer
    if not context.rehearsal and micros < SHORT_US:  # the start of a graph takes as long as several such calls
        calls_per_graph = 100
        graph = _graph_of(call, calls_per_graph)
        graph.replay()
    return lambda: device_seconds(graph.replay) * 1e6 / calls_per_graph


def _graph_of(call: Call, times: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def device_seconds(call: Call) -> float:
    """Time between two events around the work of `call`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def device_us(context: Context, call: Call) -> dict[str, float]:
    """Time of one call."""
    watch = stopwatch(context, call)
    return summary([watch() for _ in context.turns(2 if context.rehearsal else context.count(20, 3))])


def times_of(context: Context, kernel: Call, reference: Call) -> Figures:
    return {"kernel_us": device_us(context, kernel)["median"], "reference_us": device_us(context, reference)["median"]}


def percentiles(values: Sequence[float], shares: Sequence[float], digits: int = 1) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share:g}": round(ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))], digits) for share in shares}


def ratio_of(above: Sequence[float], below: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Quartiles of the ratios of measurements that were taken in the same turn."""
    ratios = [over / under for over, under in zip(above, below, strict=True)]
    low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
    return {"p25": round(low, digits), "p50": round(middle, digits), "p75": round(high, digits)}
