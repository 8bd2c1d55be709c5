"""When everything of some rounds ran: spans, what they sum up to, and files that show them.

with engine.trace(rounds=20) as trace:
    for event in engine.stream(): ...
print(trace.timeline.summary())
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stepgraph.graphs.capture import MAIN, Backend
from stepgraph.graphs.spans import LAUNCHER, OUTSIDE, Span
from stepgraph.sampling.fields import is_int

Interval = tuple[int, int]


@dataclass(frozen=True)
class StageTime:
    """All spans of one name on one stream."""

    stream: str
    name: str
    kind: str
    count: int
    total_ns: int
    median_ns: int


@dataclass(frozen=True)
class Summary:
    """What a timeline sums up to. Times are in nanoseconds; `str()` is a table, `as_dict()` is JSON-ready."""

    rounds: int
    round_ns: int  # the median, from the first to the last that its main stream did
    stages: tuple[StageTime, ...]
    host_ns: int  # of all host nodes
    hidden_ns: int  # of that, while a stage ran on the main stream
    exposed_ns: int  # the rest of it
    exposed_wait_ns: int  # the main stream stood waiting: for host nodes, and for the copies to and from them
    idle_ns: int  # the main stream had nothing to do between two rounds

    @property
    def share_hidden(self) -> float | None:
        """None where no host node was seen: there was none, or the backend does not tell of them."""
        return self.hidden_ns / self.host_ns if self.host_ns else None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "share_hidden": self.share_hidden}

    def __str__(self) -> str:
        lines = [f"{'stream':<18}{'stage':<20}{'':<8}{'count':>6}{'median ms':>11}{'total ms':>11}"]
        for one in self.stages:
            kind = "" if one.kind == "stage" else one.kind
            lines.append(f"{one.stream:<18}{one.name:<20}{kind:<8}{one.count:>6}{one.median_ns / 1e6:>11.3f}{one.total_ns / 1e6:>11.3f}")
        lines.append(f"{self.rounds} rounds of {self.round_ns / 1e6:.2f} ms; {self.idle_ns / 1e6:.2f} ms idle between them")
        if self.share_hidden is not None:
            lines.append(
                f"host nodes {self.host_ns / 1e6:.2f} ms, {self.share_hidden:.1%} of it hidden under the main stream's stages; "
                f"the main stream waited {self.exposed_wait_ns / 1e6:.2f} ms"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Timeline:
    """The spans of some rounds, in the order of their beginnings. On one stream they do not overlap."""

    spans: tuple[Span, ...]
    backend: str = "tape"

    @property
    def rounds(self) -> tuple[int, ...]:
        """The numbers of those that were traced."""
        return tuple(sorted({span.round for span in self.spans if span.kind != "launch"} - {OUTSIDE}))

    @property
    def streams(self) -> tuple[str, ...]:
        """The main one, the others by name, the launching thread."""
        return tuple(dict.fromkeys(span.stream for span in sorted(self.spans, key=_lane)))

    def summary(self) -> Summary:
        main = [span for span in self.spans if span.stream == MAIN]
        busy = union((span.start_ns, span.end_ns) for span in main if span.kind == "stage" and span.round != OUTSIDE)
        host = [(span.start_ns, span.end_ns) for span in self.spans if span.kind == "host"]
        total, hidden = length(host), sum(covered(one, busy) for one in host)
        extents = list(self.extents().values())
        gaps = [(end, start) for (_, end), (start, _) in itertools.pairwise(extents) if start > end]
        between = union((span.start_ns, span.end_ns) for span in main if span.round == OUTSIDE)
        return Summary(
            rounds=len(extents),
            round_ns=int(statistics.median(end - start for start, end in extents)) if extents else 0,
            stages=tuple(self._stage_times()),
            host_ns=total,
            hidden_ns=hidden,
            exposed_ns=total - hidden,
            exposed_wait_ns=sum(span.end_ns - span.start_ns for span in main if span.kind == "wait"),
            idle_ns=length(gaps) - sum(covered(gap, between) for gap in gaps),
        )

    def extents(self) -> dict[int, Interval]:
        """Round by round, when the main stream began it and ended it."""
        found: dict[int, Interval] = {}
        for span in self.spans:
            if span.stream == MAIN and span.round != OUTSIDE:
                start, end = found.get(span.round, (span.start_ns, span.end_ns))
                found[span.round] = min(start, span.start_ns), max(end, span.end_ns)
        return dict(sorted(found.items()))

    def _stage_times(self) -> Iterator[StageTime]:
        grouped: dict[tuple[str, str, str], list[int]] = {}
        for span in sorted(self.spans, key=_lane):
            name = "launch" if span.kind == "launch" else span.name
            grouped.setdefault((span.stream, name, span.kind), []).append(span.end_ns - span.start_ns)
        for (stream, name, kind), times in grouped.items():
            yield StageTime(stream, name, kind, len(times), sum(times), int(statistics.median(times)))

    def save_perfetto(self, path: str | Path) -> None:
        """A file that ui.perfetto.dev opens, and chrome://tracing. Arrows lead from a host node to the wait for it."""
        Path(path).write_text(json.dumps({"traceEvents": list(self._trace_events()), "displayTimeUnit": "ms"}), encoding="utf-8")

    def save_picture(self, path: str | Path, *, rounds: int = 3, title: str = "") -> None:
        """A PNG of some rounds from the middle of the timeline. RuntimeError names what brings matplotlib where it is missing."""
        from stepgraph.runtime.extras.trace_picture import draw

        draw(self, Path(path), rounds, title)

    def _trace_events(self) -> Iterator[dict[str, object]]:
        threads = {stream: number for number, stream in enumerate(self.streams, 1)}
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"stepgraph ({self.backend})"}}
        for stream, thread in threads.items():
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": stream}}
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
        begin = min((span.start_ns for span in self.spans), default=0)
        waits = {(span.round, span.name): span for span in self.spans if span.kind == "wait" and span.round != OUTSIDE}
        for number, span in enumerate(self.spans):
            place = {"pid": 1, "tid": threads[span.stream]}
            start, duration = (span.start_ns - begin) / 1000, (span.end_ns - span.start_ns) / 1000
            name = f"wait for {span.name}" if span.kind == "wait" else span.name
            yield {"ph": "X", **place, "name": name, "cat": span.kind, "ts": start, "dur": duration, "args": {"round": span.round}}
            wait = waits.get((span.round, span.name)) if span.kind == "host" else None
            if wait is not None:  # an arrow holds on to the slice that its end lies in
                arrow = {"pid": 1, "name": "masks", "cat": "masks", "id": number}
                yield {"ph": "s", **arrow, "tid": threads[span.stream], "ts": start}
                yield {"ph": "f", "bp": "e", **arrow, "tid": threads[wait.stream], "ts": max(start, (wait.start_ns - begin) / 1000)}


class Trace:
    """What `Engine.trace` hands out."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """What was noted; there once the block has ended."""
        if self._timeline is None:
            raise RuntimeError("Trace.timeline: nothing is there before the with block of Engine.trace() has ended")
        return self._timeline

    def end(self, timeline: Timeline) -> None:
        self._timeline = timeline


@contextlib.contextmanager
def trace_rounds(backend: Backend, first_round: int, rounds: int, eager: bool) -> Iterator[Trace]:
    """Trace the next `rounds` rounds of an engine that runs on `backend`, while the block lasts."""
    if not is_int(rounds) or rounds < 1:
        raise ValueError(f"Engine.trace.rounds: got {rounds!r}, want a whole number >= 1")
    if eager:
        got = "an engine with EngineConfig.eager=True, or with graphs that could not be captured"
        raise ValueError(f"Engine.trace: got {got}, want one whose rounds are recorded")
    trace = Trace()
    backend.start_trace(first_round, rounds)
    try:
        yield trace
    except BaseException:
        with contextlib.suppress(Exception):  # the engine's failure is the one to tell
            backend.stop_trace()
        raise
    trace.end(Timeline(tuple(sorted(backend.stop_trace(), key=lambda span: span.start_ns)), backend.name))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in order, without overlaps."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def covered(interval: Interval, busy: Sequence[Interval]) -> int:
    """How much of an interval lies in `busy`, which is as `union` gives it."""
    total = 0
    for place in range(max(bisect.bisect_right(busy, interval) - 1, 0), len(busy)):
        if busy[place][0] >= interval[1]:
            break
        total += max(0, min(interval[1], busy[place][1]) - max(interval[0], busy[place][0]))
    return total


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def _lane(span: Span) -> tuple[int, str, int]:
    return {MAIN: 0, LAUNCHER: 2}.get(span.stream, 1), span.stream, span.start_ns
