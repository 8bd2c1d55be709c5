"""Between profiles and the engine's own timelines: pictures of the one, spans from a trace of torch's profiler for the other.

Imported only where it is needed: it brings torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepgraph.graphs import spans as marks
from stepgraph.graphs.cuda import trace
from stepgraph.runtime.trace import Timeline
from tools.profiling.sidecar import Sidecar
from tools.profiling.spans import Profile, Span

DRAWN_ROUNDS = 3


def save_picture(profile: Profile, path: Path) -> None:
    """A few rounds from the middle; RuntimeError names what brings matplotlib where it is missing."""
    Timeline(stretches(profile.spans), profile.backend).save_picture(path, rounds=DRAWN_ROUNDS)


def stretches(spans: Iterable[Span]) -> tuple[marks.Span, ...]:
    """Kernels of a stage that follow each other on a stream, as one: a picture shows stages."""
    joined: dict[str, list[marks.Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        lane = joined.setdefault(span.stream, [])
        if lane and span.kind == "stage" and lane[-1][1:4] == span[1:4]:
            lane[-1] = lane[-1]._replace(end_ns=max(lane[-1].end_ns, span.end_ns))
        else:
            lane.append(marks.Span(*span))
    return tuple(sorted((span for lane in joined.values() for span in lane), key=lambda span: span.start_ns))


def from_torch(events: Iterable[Mapping[str, Any]], sidecar: Sidecar) -> tuple[Span, ...]:
    """The n-th graph launch of the trace is the n-th round that the engine wrote down."""
    runs = [tuple(marks.StageRun(*run) for run in sidecar.stages.get(launch.key, ())) for launch in sidecar.launches]
    first = sidecar.launches[0].round if sidecar.launches else 0
    return tuple(Span(*span) for span in trace.spans_of(events, runs, first, len(runs)))
