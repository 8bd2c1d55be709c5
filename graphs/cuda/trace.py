"""Spans of graph launches from torch's profiler, with the names of the stages in which the nodes were captured.

The profiler reports kernels, copies and fills of a launch, with the launch shape of kernels, but neither nodes nor host nodes. CUDA
runs the branches of a graph on internal streams of its own, and nodes of one captured stream may move between them. The nodes of a
captured stream run in capture order, so the activities of a launch are an interleaving of the captured streams: names come from one
that agrees in kind and launch shape. If none agrees, the activities of the launch are UNNAMED.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.spans import BETWEEN_ROUNDS, LAUNCHING_THREAD, NO_ROUND, GraphNode, RecordedReport, Span, StageRun

UNNAMED = "unnamed"
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
_DRIVER_KERNELS = {"memcpy": "copy", "memset": "fill"}  # by the start of the kernel's name: some copies and fills run as kernels
_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_MAX_STATES = 64  # the search keeps those with the fewest changes; traces of an H200 need 3
# A state of the search: how many nodes of each captured stream have run, and the last captured stream of each internal one. Its value is
# the number of changes, and the captured streams of the activities as nested pairs, the last one first.
_State = tuple[tuple[int, ...], tuple[int, ...]]


class Activity(NamedTuple):
    """One kernel, copy or fill. A copy or fill that the driver runs as a kernel has a launch shape."""

    stream: int
    start_ns: int
    end_ns: int
    kind: str = "kernel"
    shape: tuple[int, ...] = ()  # grid and block of a kernel


class Captured(NamedTuple):
    """What a launch runs. The nodes are in capture order, like the stages."""

    stages: Sequence[StageRun]
    nodes: Sequence[GraphNode]


class CudaTracer:
    """Profiles launches until `stop`. `replayed` must be called for each launch, in order: with None if it is not a round."""

    def __init__(self, first_round: int, rounds: int, activity: ProfilerActivity = ProfilerActivity.CUDA) -> None:
        self._first, self._rounds = first_round, rounds
        self._launched: list[RecordedReport | None] = []
        self._profiler = profile(activities=[activity])
        self._profiler.start()

    def replayed(self, report: RecordedReport | None) -> None:
        self._launched.append(report)

    def stop(self) -> tuple[Span, ...]:
        """The device must be idle."""
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        launched = [None if report is None else Captured(report.stages, report.graph_nodes) for report in self._launched]
        return spans_of(events, launched, self._first, self._rounds)


def spans_of(events: Iterable[Mapping[str, Any]], launched: Sequence[Captured | None], first_round: int, rounds: int) -> tuple[Span, ...]:
    """Spans of the first `rounds` rounds. The n-th graph launch runs `launched[n]`; if that is None, it is between rounds."""
    launches: list[tuple[int, int, int]] = []
    activities: dict[int, list[Activity]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        details = event.get("args", {})
        if event.get("cat") in _DEVICE:
            activities.setdefault(details["correlation"], []).append(activity_of(event))
        elif event["name"] in _LAUNCHES and "correlation" in details:
            launches.append((*_times(event), details["correlation"]))
    launches.sort()
    spans: list[Span] = []
    of_rounds = [(launch, captured) for launch, captured in zip(launches, launched, strict=False) if captured is not None]
    for number, ((start, end, correlation), captured) in enumerate(of_rounds[:rounds], first_round):
        spans.append(Span(LAUNCHING_THREAD, f"launch {number}", "launch", number, start, end))
        spans += launch_spans(sorted(activities.pop(correlation, ()), key=lambda activity: activity.start_ns), captured, number)
    window = (min((span.start_ns for span in spans), default=0), max((span.end_ns for span in spans), default=0))
    others = [one for found in activities.values() for one in found if window[0] <= one.start_ns < window[1]]
    spans += [Span(MAIN, BETWEEN_ROUNDS, "stage", NO_ROUND, one.start_ns, one.end_ns) for one in others]
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def activity_of(event: Mapping[str, Any]) -> Activity:
    kind, details = _DEVICE[event["cat"]], event["args"]
    if kind == "kernel":
        kind = _DRIVER_KERNELS.get(event["name"][:6], kind)
    return Activity(details["stream"], *_times(event), kind, (*details.get("grid", ()), *details.get("block", ())))


def _times(event: Mapping[str, Any]) -> tuple[int, int]:
    start = round(float(event["ts"]) * 1000)
    return start, start + round(float(event.get("dur", 0)) * 1000)


def launch_spans(activities: Sequence[Activity], captured: Captured, number: int) -> list[Span]:
    """Spans of one launch from its activities in time order: one span per consecutive run of a stage on a captured stream."""
    spans: list[Span] = []
    latest: dict[str, int] = {}  # by stream, the position of its last span
    labels = stages_of(activities, captured) or [(f"stream {activity.stream}", UNNAMED) for activity in activities]
    for (stream, name), activity in zip(labels, activities, strict=True):
        at = latest.get(stream)
        if at is not None and spans[at].name == name:
            spans[at] = spans[at]._replace(end_ns=max(spans[at].end_ns, activity.end_ns))
        else:
            latest[stream] = len(spans)
            spans.append(Span(stream, name, "stage", number, activity.start_ns, activity.end_ns))
    return spans


def stages_of(activities: Sequence[Activity], captured: Captured) -> list[tuple[str, str]]:
    """Captured stream and stage of each activity of a launch, in time order; empty if no interleaving of the nodes agrees."""
    names: dict[str, list[str]] = {}
    nodes: dict[str, list[GraphNode]] = {}
    runs = (run for run in captured.stages for _ in range(run.nodes))
    for run, node in zip(runs, captured.nodes, strict=False):
        if node.kind in _DEVICE.values():
            names.setdefault(run.stream, []).append(run.name)
            nodes.setdefault(run.stream, []).append(node)
    remaining = {stream: iter(found) for stream, found in names.items()}
    return [(stream, next(remaining[stream])) for stream in _interleaving(activities, nodes)]


def _interleaving(activities: Sequence[Activity], nodes: Mapping[str, Sequence[GraphNode]]) -> list[str]:
    """The captured stream of each activity; empty if no interleaving of the nodes agrees.

    If several agree, the one in which the internal streams change captured streams least often. Nodes of equal kind and shape
    that run at the same time on two streams may be confused.
    """
    if len(activities) != sum(map(len, nodes.values())):
        return []
    internal = {stream: index for index, stream in enumerate(dict.fromkeys(activity.stream for activity in activities))}
    states: dict[_State, tuple[int, Any]] = {((0,) * len(nodes), (-1,) * len(internal)): (0, ())}
    for activity in activities:
        at, reached = internal[activity.stream], dict[_State, tuple[int, Any]]()
        for (positions, last), (changes, path) in states.items():
            for index, (stream, position) in enumerate(zip(nodes, positions, strict=True)):
                if position < len(nodes[stream]) and _agree(nodes[stream][position], activity):
                    state = _changed(positions, index, position + 1), _changed(last, at, index)
                    cost = changes + (last[at] not in (-1, index))
                    if state not in reached or cost < reached[state][0]:
                        reached[state] = cost, (stream, path)
        states = dict(sorted(reached.items(), key=lambda item: item[1][0])[:_MAX_STATES])
    _, path = min(states.values(), key=lambda found: found[0], default=(0, ()))
    chosen: list[str] = []
    while path:
        stream, path = path
        chosen.append(stream)
    return chosen[::-1]


def _agree(node: GraphNode, activity: Activity) -> bool:
    if node.kind == "kernel":  # the shape of some is unknown
        return bool(activity.shape) and node.launch[1:7] in (activity.shape, ())
    return node.kind == activity.kind


def _changed(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
