"""Converts profiles to pictures, and torch profiler traces to spans.

Imports torch; import only where needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepgraph.graphs import spans as engine_spans
from stepgraph.graphs.cuda import trace
from stepgraph.runtime.trace import Timeline
from tools.profiling import picture
from tools.profiling.sidecar import Sidecar
from tools.profiling.spans import Profile, Span


def save_picture(profile: Profile, path: Path) -> None:
    """Draw a few rounds from the middle; RuntimeError names the missing package."""
    picture.draw(Timeline(merge_kernels(profile.spans), profile.backend), path)


def merge_kernels(spans: Iterable[Span]) -> tuple[engine_spans.Span, ...]:
    """Merges consecutive kernels of a stage on one stream."""
    joined: dict[str, list[engine_spans.Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        lane = joined.setdefault(span.stream, [])
        if lane and span.kind == "stage" and lane[-1][1:4] == span[1:4]:
            lane[-1] = lane[-1]._replace(end_ns=max(lane[-1].end_ns, span.end_ns))
        else:
            lane.append(engine_spans.Span(*span))
    return tuple(sorted((span for lane in joined.values() for span in lane), key=lambda span: span.start_ns))


def from_torch(events: Iterable[Mapping[str, Any]], sidecar: Sidecar) -> tuple[Span, ...]:
    """Spans of a trace; its n-th graph launch is the n-th round in the engine's file."""
    captured = [
        trace.Captured(
            [engine_spans.StageRun(*run) for run in sidecar.stages.get(launch.key, ())],
            [engine_spans.GraphNode(*node) for node in sidecar.graph_nodes.get(launch.key, ())],
        )
        for launch in sidecar.launches
    ]
    first = sidecar.launches[0].round if sidecar.launches else 0
    return tuple(Span(*span) for span in trace.spans_of(events, captured, first, len(captured)))
