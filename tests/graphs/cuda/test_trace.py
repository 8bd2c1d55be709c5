"""Spans from profiler events of graph launches: made by hand, and cut from traces of a GPU (tests/data/graph_launches_h200.jsonl)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.cuda.trace import UNNAMED, Activity, Captured, CudaTracer, activity_of, spans_of, stages_of
from stepgraph.graphs.spans import BETWEEN_ROUNDS, NO_ROUND, GraphNode, RecordedReport, StageRun
from stepgraph.runtime.trace import Timeline

SIDE = "side"
SAMPLE = Path(__file__).parent.parent.parent / "data" / "graph_launches_h200.jsonl"


def event(category: str, name: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": arguments}


def node(kind: str, columns: int = 0) -> GraphNode:
    return GraphNode(kind, (77, columns, 1, 1, 32, 1, 1, 0) if kind == "kernel" else ())


STAGES = (
    StageRun(SIDE, "show verify", "stage", 1),
    StageRun(SIDE, "verify", "host", 1),
    StageRun(SIDE, "place verify", "stage", 2),
    StageRun(MAIN, "target_verify", "stage", 3),
    StageRun(MAIN, "accept", "stage", 2),
)
ROUND = Captured(STAGES, (node("copy"), node("host"), node("copy"), node("copy"), *(node("kernel", 4) for _ in range(5))))


def launched(start: float, correlation: int, kernels: int = 5) -> list[dict[str, Any]]:
    """One graph launch: consecutive kernels on stream 13 and three copies on stream 20."""
    found = [event("cuda_runtime", "cudaGraphLaunch", start, 3, correlation=correlation)]
    kernel = {"correlation": correlation, "stream": 13, "grid": [4, 1, 1], "block": [32, 1, 1]}
    found += [event("kernel", f"k{n}", start + 10 + 4 * n, 3, **kernel) for n in range(kernels)]
    return found + [event("gpu_memcpy", "copy", start + 11 + 4 * n, 1, correlation=correlation, stream=20) for n in range(3)]


def test_activities_have_the_names_of_their_stages() -> None:
    between = event("kernel", "batch in", 90, 5, correlation=99, stream=7)
    late = event("kernel", "other work", 900, 5, correlation=100, stream=7)
    spans = spans_of([*launched(100, 2), between, *launched(0, 1), late, {"ph": "M", "name": "process_name"}], [ROUND, ROUND], 40, 2)
    found = [
        (span.stream, span.name, span.round, span.start_ns, span.end_ns) for span in spans if span.round == 40 and span.kind == "stage"
    ]
    assert found == [
        (MAIN, "target_verify", 40, 10_000, 21_000),
        (SIDE, "show verify", 40, 11_000, 12_000),
        (SIDE, "place verify", 40, 15_000, 20_000),
        (MAIN, "accept", 40, 22_000, 29_000),
    ]
    assert {span.round for span in spans} == {40, 41, NO_ROUND}
    assert [(span.name, span.start_ns) for span in spans if span.round == NO_ROUND] == [(BETWEEN_ROUNDS, 90_000)]
    assert [span.name for span in spans if span.kind == "launch"] == ["launch 40", "launch 41"]


def test_launches_of_prompts_lie_between_rounds() -> None:
    spans = spans_of([*launched(0, 1), *launched(50, 2), *launched(100, 3)], [ROUND, None, ROUND], 40, 2)
    assert [span.name for span in spans if span.kind == "launch"] == ["launch 40", "launch 41"]
    assert {span.name for span in spans if 50_000 <= span.start_ns < 100_000} == {BETWEEN_ROUNDS}


def test_profile_without_graph_launches_has_no_spans() -> None:
    tracer = CudaTracer(3, 1, ProfilerActivity.CPU)
    torch.ones(4).softmax(0)
    tracer.replayed(RecordedReport({}, (), 0, 0.0, STAGES, graph_nodes=tuple(ROUND.nodes)))
    assert tracer.stop() == ()


def test_activities_that_do_not_match_the_recording_are_unnamed() -> None:
    spans = spans_of(launched(0, 1, kernels=6), [ROUND], 0, 1)
    assert {(span.stream, span.name) for span in spans if span.kind == "stage"} == {("stream 13", UNNAMED), ("stream 20", UNNAMED)}
    summary = Timeline(spans, "cuda").summary()
    assert (summary.host_nodes, summary.share_hidden) == (None, None)


def recording(*nodes: tuple[str, str, str, int]) -> Captured:
    """Stream, stage, kind and grid of each node."""
    return Captured([StageRun(stream, name) for stream, name, _, _ in nodes], [node(kind, columns) for _, _, kind, columns in nodes])


def ran(*activities: tuple[int, str, int]) -> list[Activity]:
    """Stream, kind and grid of each activity; 0 for none."""
    return [
        Activity(stream, at, at + 1, kind, (columns, 1, 1, 32, 1, 1) if columns else ())
        for at, (stream, kind, columns) in enumerate(activities)
    ]


LINEAR = recording((MAIN, "a", "kernel", 1), (MAIN, "a", "copy", 0), (MAIN, "b", "fill", 0), (MAIN, "b", "kernel", 2))
FORKED = recording(
    *((MAIN, "read", "kernel", 1), (SIDE, "fill", "kernel", 9), (SIDE, "fill", "copy", 0)),
    *((MAIN, "verify", "kernel", 2), (MAIN, "verify", "kernel", 3), (MAIN, "accept", "kernel", 4)),
)
EQUAL = recording(*((MAIN, name, "kernel", 1) for name in "abc"), *((SIDE, name, "kernel", 1) for name in "st"))


@pytest.mark.parametrize(
    ("captured", "activities", "expected"),
    [
        pytest.param(LINEAR, ran((7, "kernel", 1), (7, "copy", 0), (7, "fill", 0), (7, "kernel", 2)), "a a b b", id="one stream"),
        # The driver may run a copy or a fill as a kernel of its own.
        pytest.param(LINEAR, ran((7, "kernel", 1), (7, "copy", 8), (7, "fill", 8), (7, "kernel", 2)), "a a b b", id="copy as a kernel"),
        pytest.param(
            FORKED,
            ran((7, "kernel", 1), (30, "kernel", 2), (7, "kernel", 9), (30, "kernel", 3), (7, "copy", 0), (7, "kernel", 4)),
            "read verify fill verify fill accept",
            id="the main stream moves at the fork and at the join",
        ),
        pytest.param(
            FORKED,
            ran((7, "kernel", 1), (30, "kernel", 9), (30, "copy", 0), (7, "kernel", 2), (7, "kernel", 3), (31, "kernel", 4)),
            "read fill fill verify verify accept",
            id="the side stream before the main stream",
        ),
        pytest.param(EQUAL, ran(*((stream, "kernel", 1) for stream in (7, 7, 30, 7, 30))), "a b s c t", id="fewest changes"),
        pytest.param(EQUAL, ran(*((stream, "kernel", 1) for stream in (30, 7, 30, 7, 7))), "s a t b c", id="fewest changes, side first"),
        pytest.param(LINEAR, ran((7, "kernel", 1), (7, "fill", 0), (7, "copy", 0), (7, "kernel", 2)), "", id="other order of kinds"),
        pytest.param(LINEAR, ran((7, "kernel", 1), (7, "copy", 0), (7, "fill", 0), (7, "kernel", 3)), "", id="other grid"),
        pytest.param(LINEAR, ran((7, "kernel", 1), (7, "copy", 0), (7, "fill", 0)), "", id="an activity is missing"),
        pytest.param(LINEAR, ran((7, "kernel", 1), (7, "copy", 0), (7, "fill", 0), (7, "kernel", 0)), "", id="a kernel without shape"),
        pytest.param(
            FORKED,
            ran((7, "kernel", 1), (30, "kernel", 3), (7, "kernel", 9), (30, "kernel", 2), (7, "copy", 0), (7, "kernel", 4)),
            "",
            id="nodes of one captured stream in another order",
        ),
    ],
)
def test_stages_follow_from_a_node_order_that_matches(captured: Captured, activities: list[Activity], expected: str) -> None:
    assert " ".join(name for _, name in stages_of(activities, captured)) == expected


def test_kernel_nodes_of_unknown_shape_agree_with_any_kernel() -> None:
    captured = Captured([StageRun(MAIN, "a"), StageRun(MAIN, "b")], [GraphNode("kernel"), node("kernel", 2)])
    assert stages_of(ran((7, "kernel", 5), (7, "kernel", 2)), captured) == [(MAIN, "a"), (MAIN, "b")]
    assert stages_of(ran((7, "kernel", 5), (7, "kernel", 3)), captured) == []


def sampled() -> Iterator[Any]:
    """Of each recording in the sample: its key, its nodes, and the events of its launches with the kernel functions of the nodes."""
    _, kinds, *recordings = map(json.loads, SAMPLE.read_text(encoding="utf-8").splitlines())
    for found in recordings:
        nodes = [
            GraphNode(kind, tuple(launch[0]) if launch else ()) for kind, *launch in (kinds["nodes"][index] for index in found["nodes"])
        ]
        events = []
        for correlation, launch in enumerate(found["launches"]):
            at = launch["start"]
            events.append(event("cuda_runtime", "cudaGraphLaunch", at / 1000, launch["duration"] / 1000, correlation=correlation))
            for index, stream, after, duration in launch["activities"]:
                at += after
                category, name, *shape = kinds["events"][index]
                details = {"correlation": correlation, "stream": stream, **dict(zip(("grid", "block"), shape, strict=False))}
                events.append(event(category, name, at / 1000, duration / 1000, **details))
        captured = Captured([StageRun(*run) for run in found["stages"]], nodes)
        yield pytest.param(captured, events, id=f"{found['model']} {found['key']}")


@pytest.mark.parametrize(("captured", "events"), list(sampled()))
def test_every_activity_of_an_h200_has_its_stage(captured: Captured, events: list[dict[str, Any]]) -> None:
    work = [one for one in events if one["cat"] != "cuda_runtime"]
    labels = stages_of([activity_of(one) for one in work], captured)
    expected: Counter[tuple[str, str]] = Counter()
    for run in captured.stages:
        expected[run.stream, run.name] += run.nodes * (run.kind == "stage")
    assert Counter(labels) == +expected
    # Matching does not use the functions of nodes and the names of kernels, so they check its result: each function has one name.
    nodes = {stream: iter([node for run, node in _labelled(captured) if run.stream == stream]) for stream, _ in labels}
    names: dict[int, set[str]] = {}
    for (stream, _), one in zip(labels, work, strict=True):
        if (found := next(nodes[stream])).kind == "kernel":
            names.setdefault(found.launch[0], set()).add(one["name"])
    assert len(names) > 10 and all(len(found) == 1 for found in names.values())
    spans = [span for span in spans_of(events, [captured], 5, 1) if span.kind == "stage"]
    assert Counter((span.stream, span.name) for span in spans) == {
        (run.stream, run.name): 1 for run in captured.stages if run.kind == "stage"
    }


def _labelled(captured: Captured) -> list[tuple[StageRun, GraphNode]]:
    runs = [run for run in captured.stages for _ in range(run.nodes)]
    return [(run, node) for run, node in zip(runs, captured.nodes, strict=True) if node.kind != "host"]
