"""Spans from synthetic profiler events of graph launches on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.cuda.trace import UNNAMED, CudaTracer, spans_of
from stepgraph.graphs.spans import BETWEEN, OUTSIDE, StageRun
from stepgraph.runtime.trace import Timeline

SIDE = "side"


def event(category: str, name: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": arguments}


STAGES = (
    StageRun(SIDE, "show head", "stage", 1),
    StageRun(SIDE, "head", "host", 1),
    StageRun(SIDE, "place head", "stage", 2),
    StageRun(MAIN, "target_verify", "stage", 3),
    StageRun(MAIN, "accept", "stage", 2),
)


def launched(start: float, correlation: int, kernels: int = 5) -> list[dict[str, Any]]:
    """One graph launch: consecutive kernels on stream 13 and three copies on stream 20."""
    found = [event("cuda_runtime", "cudaGraphLaunch", start, 3, correlation=correlation)]
    found += [event("kernel", f"k{n}", start + 10 + 4 * n, 3, correlation=correlation, stream=13) for n in range(kernels)]
    return found + [event("gpu_memcpy", "copy", start + 11 + 4 * n, 1, correlation=correlation, stream=20) for n in range(3)]


def test_activities_have_the_names_of_their_stages() -> None:
    between = event("kernel", "batch in", 90, 5, correlation=99, stream=7)
    late = event("kernel", "other work", 900, 5, correlation=100, stream=7)
    spans = spans_of([*launched(100, 2), between, *launched(0, 1), late, {"ph": "M", "name": "process_name"}], [STAGES, STAGES], 40, 2)
    found = [
        (span.stream, span.name, span.round, span.start_ns, span.end_ns) for span in spans if span.round == 40 and span.kind == "stage"
    ]
    assert found == [
        (MAIN, "target_verify", 40, 10_000, 21_000),
        (SIDE, "show head", 40, 11_000, 12_000),
        (SIDE, "place head", 40, 15_000, 20_000),
        (MAIN, "accept", 40, 22_000, 29_000),
    ]
    assert {span.round for span in spans} == {40, 41, OUTSIDE}
    assert [(span.name, span.start_ns) for span in spans if span.round == OUTSIDE] == [(BETWEEN, 90_000)]
    assert [span.name for span in spans if span.kind == "launch"] == ["launch 40", "launch 41"]


def test_launches_of_prompts_lie_between_rounds() -> None:
    spans = spans_of([*launched(0, 1), *launched(50, 2), *launched(100, 3)], [STAGES, None, STAGES], 40, 2)
    assert [span.name for span in spans if span.kind == "launch"] == ["launch 40", "launch 41"]
    assert {span.name for span in spans if 50_000 <= span.start_ns < 100_000} == {BETWEEN}


def test_profile_without_graph_launches_has_no_spans() -> None:
    tracer = CudaTracer(3, 1, ProfilerActivity.CPU)
    torch.ones(4).softmax(0)
    tracer.replayed(STAGES)
    assert tracer.stop() == ()


def test_activities_that_do_not_match_the_recording_are_unnamed() -> None:
    spans = spans_of(launched(0, 1, kernels=6), [STAGES], 0, 1)
    assert {span.name for span in spans if span.stream == "stream 13"} == {UNNAMED}
    assert {span.name for span in spans if span.stream == SIDE} == {"show head", "place head"}
    summary = Timeline(spans, "cuda").summary()
    assert (summary.host_nodes, summary.share_hidden) == (None, None)
