"""Spans of graph launches from torch's profiler, with the names of the stages in which the nodes were captured.

The profiler reports time and stream of kernels, copies and fills of a graph launch, and no host nodes. A recording has the number
of nodes of each stage in capture order, which is the order of execution on one stream. If the numbers of a stream do not
match, its activities are UNNAMED.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.spans import BETWEEN, LAUNCHER, OUTSIDE, Span, StageRun

UNNAMED = "unnamed"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


class Activity(NamedTuple):
    """One kernel, copy or fill."""

    stream: int
    start_ns: int
    end_ns: int


class CudaTracer:
    """Profiles launches until `stop`. `replayed` must be called for each launch, in order: without stages if it is no round."""

    def __init__(self, first_round: int, rounds: int, activity: ProfilerActivity = ProfilerActivity.CUDA) -> None:
        self._first, self._rounds = first_round, rounds
        self._launched: list[tuple[StageRun, ...] | None] = []
        self._profiler = profile(activities=[activity])
        self._profiler.start()

    def replayed(self, stages: tuple[StageRun, ...] | None) -> None:
        self._launched.append(stages)

    def stop(self) -> tuple[Span, ...]:
        """Only while the device is idle."""
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return spans_of(events, self._launched, self._first, self._rounds)


def spans_of(
    events: Iterable[Mapping[str, Any]], launched: Sequence[tuple[StageRun, ...] | None], first_round: int, rounds: int
) -> tuple[Span, ...]:
    """Spans of the first `rounds` rounds. The n-th graph launch has the nodes of `launched[n]`; if that is None, it is between rounds."""
    launches: list[tuple[int, int, int]] = []
    activities: dict[int, list[Activity]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        start = round(float(event["ts"]) * 1000)
        end, details = start + round(float(event.get("dur", 0)) * 1000), event.get("args", {})
        if event.get("cat") in _DEVICE:
            activities.setdefault(details["correlation"], []).append(Activity(details["stream"], start, end))
        elif event["name"] in _LAUNCHES and "correlation" in details:
            launches.append((start, end, details["correlation"]))
    launches.sort()
    spans: list[Span] = []
    of_rounds = [(launch, stages) for launch, stages in zip(launches, launched, strict=False) if stages is not None]
    for number, ((start, end, correlation), stages) in enumerate(of_rounds[:rounds], first_round):
        spans.append(Span(LAUNCHER, f"launch {number}", "launch", number, start, end))
        spans += named(sorted(activities.pop(correlation, ()), key=lambda activity: activity.start_ns), stages, number)
    window = (min((span.start_ns for span in spans), default=0), max((span.end_ns for span in spans), default=0))
    others = [one for found in activities.values() for one in found if window[0] <= one.start_ns < window[1]]
    spans += [Span(MAIN, BETWEEN, "stage", OUTSIDE, one.start_ns, one.end_ns) for one in others]
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def named(activities: Sequence[Activity], stages: Sequence[StageRun], number: int) -> list[Span]:
    """Spans of one launch from its activities in time order: one span per consecutive run of a stage on a stream."""
    expected: dict[str, list[str]] = {}
    for run in stages:
        if run.kind == "stage":
            expected.setdefault(run.stream, []).extend([run.name] * run.nodes)
    by_stream: dict[int, list[Activity]] = {}
    for activity in activities:
        by_stream.setdefault(activity.stream, []).append(activity)
    spans: list[Span] = []
    for stream, found in by_stream.items():
        matching = [name for name, names in expected.items() if len(names) == len(found)]
        name = matching[0] if len(matching) == 1 else f"stream {stream}"
        names = expected[name] if len(matching) == 1 else [UNNAMED] * len(found)
        for stage, activity in zip(names, found, strict=True):
            if spans and (spans[-1].stream, spans[-1].name) == (name, stage):
                spans[-1] = spans[-1]._replace(end_ns=max(spans[-1].end_ns, activity.end_ns))
            else:
                spans.append(Span(name, stage, "stage", number, activity.start_ns, activity.end_ns))
    return spans
