"""Converts profiler activities to spans: the stage of each graph node, and the times of host nodes.

A stage's name comes from the NVTX ranges around a node's creation if the profiler saw the capture, otherwise from the order of
the nodes, which is that of the capture. If neither is available the node is UNKNOWN, with a note.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.profiling.sidecar import Sidecar
from tools.profiling.spans import MAIN, NO_ROUND, Span

UNKNOWN = "unknown stage"
BETWEEN_ROUNDS = "between rounds"
SIDE = "side"


class Activity(NamedTuple):
    """One device activity: a kernel, a copy or a fill."""

    start_ns: int
    end_ns: int
    stream: int
    round: int
    node: int | None  # graph node; None if not launched by a graph


class HostRun(NamedTuple):
    """One run of a host node; the name is empty if the profiler does not have it."""

    start_ns: int
    end_ns: int
    round: int
    name: str


@dataclass
class NamedSpans:
    """Spans with stages, and notes on unknown ones."""

    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def named_spans(activities: Sequence[Activity], stage_of: Mapping[int, str], sidecar: Sidecar) -> NamedSpans:
    """One span per activity. `stage_of`: stages that the profiler recorded for nodes; empty if it missed the capture.

    CUDA runs branches of a graph on internal streams, so the stream of a node is the one of its stage in the recording, and main if that is
    unknown. Other work is on the main stream if nodes ran on its stream too.
    """
    found = NamedSpans()
    graph_streams = {activity.stream for activity in activities if activity.node is not None}
    inside = [activity for activity in activities if activity.node is not None and activity.round != NO_ROUND]
    names = dict(stage_of)
    streams: dict[int, str] = {}
    if not all(activity.node in names for activity in inside):
        by_order, streams = _by_order(inside, sidecar, found.notes)
        names = {**by_order, **names}
    stream_of = sidecar.stream_of
    for activity in activities:
        if activity.node is None:
            name, stream = BETWEEN_ROUNDS, MAIN if activity.stream in graph_streams else SIDE
            span = Span(stream, name, "stage", NO_ROUND, activity.start_ns, activity.end_ns)
        else:
            name = names.get(activity.node, UNKNOWN)
            stream = streams.get(activity.node) or stream_of.get(name, MAIN)
            span = Span(stream, name, "stage", activity.round, activity.start_ns, activity.end_ns)
        found.spans.append(span)
    return found


def _by_order(inside: Iterable[Activity], sidecar: Sidecar, notes: list[str]) -> tuple[dict[int, str], dict[int, str]]:
    """Stage and stream of every node, if the round has as many nodes as the recording without host nodes."""
    keys = {launch.round: launch.key for launch in sidecar.launches}
    nodes: dict[int, set[int]] = defaultdict(set)
    for activity in inside:
        assert activity.node is not None
        nodes[activity.round].add(activity.node)
    names: dict[int, str] = {}
    streams: dict[int, str] = {}
    reported: set[str] = set()
    for number, found in sorted(nodes.items()):
        key = keys.get(number, "")
        runs = [run for run in sidecar.stages.get(key, ()) if run.kind == "stage"]
        labels = [(run.name, run.stream) for run in runs for _ in range(run.nodes)]
        if len(labels) == len(found):
            for node, (name, stream) in zip(sorted(found), labels, strict=True):
                names[node], streams[node] = name, stream
        elif key not in reported:
            reported.add(key)
            why = (
                f"the profile shows {len(found)} of its nodes, the recording has {len(labels)}"
                if labels
                else "the list of the engine is missing"
            )
            notes.append(f"stages of round {number} ({key or 'no key'}) are unknown: the capture was not profiled, and {why}")
    return names, streams


def host_spans(runs: Sequence[HostRun], sidecar: Sidecar, clock_offset_ns: int | None) -> list[Span]:
    """Host-node runs from the profiler, otherwise from the engine's file."""
    if runs:
        names = {key: [run.name for run in stages if run.kind == "host"] for key, stages in sidecar.stages.items()}
        keys = {launch.round: launch.key for launch in sidecar.launches}
        positions: Counter[int] = Counter()
        spans = []
        for run in sorted(runs):
            known = names.get(keys.get(run.round, ""), [])
            by_order = known[positions[run.round]] if positions[run.round] < len(known) else "host node"
            positions[run.round] += 1
            spans.append(Span(SIDE, run.name or by_order, "host", run.round, run.start_ns, run.end_ns))
        return spans
    if clock_offset_ns is None:
        return []
    return [
        Span(SIDE, name, "host", number, start + clock_offset_ns, end + clock_offset_ns) for name, number, start, end in sidecar.host_nodes
    ]


def with_host_nodes(spans: Sequence[Span], sidecar: Sidecar) -> tuple[Span, ...]:
    """Adds host nodes from the engine's file, since torch's profiler does not record them."""
    if any(span.kind == "host" for span in spans):
        return tuple(spans)
    launch_start_ns = {span.round: span.start_ns for span in spans if span.kind == "launch"}
    return (*spans, *host_spans((), sidecar, clock_offset(launch_start_ns, sidecar)))


def clock_offset(launch_start_ns: Mapping[int, int], sidecar: Sidecar) -> int | None:
    """Offset of the profiler's clock from the engine's: median over rounds whose launch both recorded."""
    both = [launch_start_ns[launch.round] - launch.launched_ns for launch in sidecar.launches if launch.round in launch_start_ns]
    return round(statistics.median(both)) if both else None
