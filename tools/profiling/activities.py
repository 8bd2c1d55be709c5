"""From what a profiler records of a GPU to spans: which stage a graph node belongs to, and when host nodes ran.

A stage's name comes from the ranges around a node's creation where the profiler saw the capture, else from the order of the
nodes, which is that of the capture. Where neither holds the node is told as UNKNOWN, with a note, and never as a stage.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.profiling.sidecar import Sidecar
from tools.profiling.spans import MAIN, OUTSIDE, Span

UNKNOWN = "unknown stage"
BETWEEN = "between rounds"
SIDE = "side"


class Activity(NamedTuple):
    """One thing that the device did: a kernel, a copy or a fill."""

    start_ns: int
    end_ns: int
    stream: int
    round: int
    node: int | None  # of the graph; None where no graph launched it


class HostRun(NamedTuple):
    """One run of a host node. The name is empty where the profiler does not know it."""

    start_ns: int
    end_ns: int
    round: int
    name: str


@dataclass
class Named:
    """Activities with stages, and what could not be named."""

    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def named_spans(activities: Sequence[Activity], stage_of: Mapping[int, str], sidecar: Sidecar) -> Named:
    """One span per activity. `stage_of` is what the profiler itself knows of the nodes; empty where it missed the capture."""
    found = Named()
    main = _main_stream(activities)
    inside = [activity for activity in activities if activity.node is not None and activity.round != OUTSIDE]
    names = dict(stage_of)
    streams: dict[int, str] = {}
    if not all(activity.node in names for activity in inside):
        by_order, streams = _by_order(inside, sidecar, found.notes)
        names = {**by_order, **names}
    stream_of = sidecar.stream_of
    for activity in activities:
        by_number = MAIN if activity.stream == main else SIDE
        if activity.node is None:
            span = Span(by_number, BETWEEN, "stage", OUTSIDE, activity.start_ns, activity.end_ns)
        else:
            name = names.get(activity.node, UNKNOWN)
            stream = streams.get(activity.node) or stream_of.get(name) or by_number
            span = Span(stream, name, "stage", activity.round, activity.start_ns, activity.end_ns)
        found.spans.append(span)
    return found


def _main_stream(activities: Iterable[Activity]) -> int:
    """The one with the most work; a graph's branches may go by numbers of their own."""
    times: Counter[int] = Counter()
    for activity in activities:
        times[activity.stream] += activity.end_ns - activity.start_ns
    return max(times, key=lambda stream: (times[stream], -stream), default=0)


def _by_order(inside: Iterable[Activity], sidecar: Sidecar, notes: list[str]) -> tuple[dict[int, str], dict[int, str]]:
    """Stage and stream of every node, if a round's nodes are as many as its recording has beside host nodes."""
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
                else "the engine's own list is missing"
            )
            notes.append(f"stages of round {number} ({key or 'no key'}) are unknown: the capture was not profiled, and {why}")
    return names, streams


def host_spans(runs: Sequence[HostRun], sidecar: Sidecar, clock_offset_ns: int | None) -> list[Span]:
    """What the profiler recorded of host nodes, else what the engine wrote down by its own clock."""
    if runs:
        names = {key: [run.name for run in stages if run.kind == "host"] for key, stages in sidecar.stages.items()}
        keys = {launch.round: launch.key for launch in sidecar.launches}
        places: Counter[int] = Counter()
        spans = []
        for run in sorted(runs):
            known = names.get(keys.get(run.round, ""), [])
            by_order = known[places[run.round]] if places[run.round] < len(known) else "host node"
            places[run.round] += 1
            spans.append(Span(SIDE, run.name or by_order, "host", run.round, run.start_ns, run.end_ns))
        return spans
    if clock_offset_ns is None:
        return []
    return [
        Span(SIDE, name, "host", number, start + clock_offset_ns, end + clock_offset_ns) for name, number, start, end in sidecar.host_nodes
    ]


def with_hosts(spans: Sequence[Span], sidecar: Sidecar) -> tuple[Span, ...]:
    """Torch's profiler sees launches and no host nodes: these are added from what the engine wrote down."""
    if any(span.kind == "host" for span in spans):
        return tuple(spans)
    begun = {span.round: span.start_ns for span in spans if span.kind == "launch"}
    return (*spans, *host_spans((), sidecar, clock_offset(begun, sidecar)))


def clock_offset(begun: Mapping[int, int], sidecar: Sidecar) -> int | None:
    """From the engine's clock to the profiler's: the median over the rounds whose launch both saw begin."""
    both = [begun[launch.round] - launch.launched_ns for launch in sidecar.launches if launch.round in begun]
    return round(statistics.median(both)) if both else None
