"""Timeline of the work of some rounds: spans, a summary of them, and files to look at.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from stepgraph.graphs.capture import Backend
from stepgraph.graphs.context import MAIN
from stepgraph.graphs.graph_key import Drafting
from stepgraph.graphs.spans import LAUNCHING_THREAD, NO_ROUND, Span
from stepgraph.runtime.draft_length import DraftLengthChooser
from stepgraph.sampling.fields import check_value, whole

Interval = tuple[int, int]  # start and end in nanoseconds


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
    """Totals of a timeline in nanoseconds. `str()` gives a table, `as_dict()` values for JSON."""

    rounds: int
    round_ns: int  # median of the time from a round's first to its last work on the main stream
    stages: tuple[StageTime, ...]
    host_nodes: int | None  # None: unknown, since the CUDA profiler does not report them
    host_ns: int  # total time of host nodes
    hidden_ns: int  # the part of host_ns during which a stage ran on the main stream
    exposed_ns: int  # the rest of host_ns
    exposed_wait_ns: int  # waits of the main stream for host nodes and for the copies to and from them
    idle_ns: int  # gaps of the main stream between two rounds

    @property
    def share_hidden(self) -> float | None:
        """The hidden share of the time of host nodes; None if the timeline has no host nodes."""
        return self.hidden_ns / self.host_ns if self.host_ns else None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "share_hidden": self.share_hidden}

    def __str__(self) -> str:
        lines = [f"{'stream':<18}{'stage':<20}{'':<8}{'count':>6}{'median ms':>11}{'total ms':>11}"]
        for stage in self.stages:
            kind = "" if stage.kind == "stage" else stage.kind
            times = f"{stage.median_ns / 1e6:>11.3f}{stage.total_ns / 1e6:>11.3f}"
            lines.append(f"{stage.stream:<18}{stage.name:<20}{kind:<8}{stage.count:>6}{times}")
        lines.append(f"{self.rounds} rounds, median {self.round_ns / 1e6:.2f} ms; {self.idle_ns / 1e6:.2f} ms idle between them")
        if self.share_hidden is not None:
            lines.append(
                f"host nodes {self.host_ns / 1e6:.2f} ms, {self.share_hidden:.1%} of it hidden under the main stream's stages; "
                f"the main stream waited {self.exposed_wait_ns / 1e6:.2f} ms"
            )
        elif self.host_nodes == 0:
            lines.append("no host nodes: these rounds follow no grammar on the host")
        return "\n".join(lines)


class ChosenLength(NamedTuple):
    """The draft length of a round, where it is chosen for each."""

    round: int
    drafts: int
    account: float  # seconds that rounds with drafts may take longer than they would without
    model: bool = True  # False: its drafts are looked up or forced


@dataclass(frozen=True)
class Timeline:
    """The spans of some rounds, ordered by start. Spans on one stream do not overlap. lengths: chosen ones, if draft_length="auto"."""

    spans: tuple[Span, ...]
    backend: str = "tape"
    lengths: tuple[ChosenLength, ...] = ()

    @property
    def rounds(self) -> tuple[int, ...]:
        return tuple(sorted({span.round for span in self.spans if span.kind != "launch"} - {NO_ROUND}))

    @property
    def streams(self) -> tuple[str, ...]:
        """The main stream, the others in alphabetical order, then the launching thread."""
        return tuple(dict.fromkeys(span.stream for span in sorted(self.spans, key=_by_stream)))

    def summary(self) -> Summary:
        main = [span for span in self.spans if span.stream == MAIN]
        busy = union((span.start_ns, span.end_ns) for span in main if span.kind == "stage" and span.round != NO_ROUND)
        host = [(span.start_ns, span.end_ns) for span in self.spans if span.kind == "host"]
        total, hidden = total_length(host), sum(covered(interval, busy) for interval in host)
        extents = list(self.extents().values())
        gaps = [(end, start) for (_, end), (start, _) in itertools.pairwise(extents) if start > end]
        between = union((span.start_ns, span.end_ns) for span in main if span.round == NO_ROUND)
        return Summary(
            rounds=len(extents),
            round_ns=int(statistics.median(end - start for start, end in extents)) if extents else 0,
            stages=tuple(self._stage_times()),
            host_nodes=len(host) if host or self.backend == "tape" else None,
            host_ns=total,
            hidden_ns=hidden,
            exposed_ns=total - hidden,
            exposed_wait_ns=sum(span.end_ns - span.start_ns for span in main if span.kind == "wait"),
            idle_ns=total_length(gaps) - sum(covered(gap, between) for gap in gaps),
        )

    def extents(self) -> dict[int, Interval]:
        """Start and end of each round's work on the main stream."""
        extents: dict[int, Interval] = {}
        for span in self.spans:
            if span.stream == MAIN and span.round != NO_ROUND:
                start, end = extents.get(span.round, (span.start_ns, span.end_ns))
                extents[span.round] = min(start, span.start_ns), max(end, span.end_ns)
        return dict(sorted(extents.items()))

    def save_perfetto(self, path: str | Path) -> None:
        """Write a file for ui.perfetto.dev and chrome://tracing. Arrows connect host nodes with the waits for them."""
        content = {"traceEvents": list(self._trace_events()), "displayTimeUnit": "ms", "otherData": {"draft_lengths": self.lengths}}
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    def _stage_times(self) -> Iterator[StageTime]:
        grouped: dict[tuple[str, str, str], list[int]] = {}
        for span in sorted(self.spans, key=_by_stream):
            name = "launch" if span.kind == "launch" else span.name
            grouped.setdefault((span.stream, name, span.kind), []).append(span.end_ns - span.start_ns)
        for (stream, name, kind), times in grouped.items():
            yield StageTime(stream, name, kind, len(times), sum(times), int(statistics.median(times)))

    def _trace_events(self) -> Iterator[dict[str, object]]:
        threads = {stream: number for number, stream in enumerate(self.streams, 1)}
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"stepgraph ({self.backend})"}}
        for stream, thread in threads.items():
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": stream}}
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
        begin = min((span.start_ns for span in self.spans), default=0)
        extents = self.extents()
        for chosen in self.lengths:
            if chosen.round in extents:
                values = {"drafts": chosen.drafts}, {"ms": chosen.account * 1e3}
                for name, value in zip(("draft length", "draft account"), values, strict=True):
                    yield {"ph": "C", "pid": 1, "name": name, "ts": (extents[chosen.round][0] - begin) / 1000, "args": value}
        waits = {(span.round, span.name): span for span in self.spans if span.kind == "wait" and span.round != NO_ROUND}
        for number, span in enumerate(self.spans):
            track = {"pid": 1, "tid": threads[span.stream]}
            start, duration = (span.start_ns - begin) / 1000, (span.end_ns - span.start_ns) / 1000
            name = f"wait for {span.name}" if span.kind == "wait" else span.name
            yield {"ph": "X", **track, "name": name, "cat": span.kind, "ts": start, "dur": duration, "args": {"round": span.round}}
            wait = waits.get((span.round, span.name)) if span.kind == "host" else None
            if wait is not None:  # an arrow is attached to the slice that contains its end
                arrow = {"pid": 1, "name": "masks", "cat": "masks", "id": number}
                yield {"ph": "s", **arrow, "tid": threads[span.stream], "ts": start}
                yield {"ph": "f", "bp": "e", **arrow, "tid": threads[wait.stream], "ts": max(start, (wait.start_ns - begin) / 1000)}


class Trace:
    """Traces the next `rounds` rounds of an engine while its `with` block lasts. After the block, `timeline` is available."""

    def __init__(
        self,
        backend: Backend,
        first_round: int,
        rounds: int,
        eager: bool,
        wait: Callable[[], None],  # for everything launched; an error of it closes the backend, which then does not wait
        chooser: DraftLengthChooser | None = None,
    ) -> None:
        check_value("Engine.trace.rounds", rounds, whole(1))
        if eager:
            got = "an engine with EngineConfig.eager=True or with graphs that could not be captured"
            raise ValueError(f"Engine.trace: got {got}, expected one whose rounds are recorded")
        self._backend, self._first_round, self._rounds, self._wait, self._chooser = backend, first_round, rounds, wait, chooser
        self._chosen: list[tuple[Drafting, float]] = []
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RuntimeError("Trace.timeline: not available before the with block of Engine.trace() has ended")
        return self._timeline

    def __enter__(self) -> Trace:
        self._wait()
        self._backend.start_trace(self._first_round, self._rounds)
        if self._chooser:
            self._chooser.choice_log = self._chosen
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._chooser:
            self._chooser.choice_log = None
        chosen = tuple(
            ChosenLength(number, drafting.length, account, drafting.model)
            for number, (drafting, account) in enumerate(self._chosen[: self._rounds], self._first_round)
        )
        with contextlib.suppress(*(() if kind is None else (Exception,))):  # the error of the block is the one to raise
            try:
                self._wait()
            finally:
                spans = self._backend.stop_trace()
                self._timeline = Timeline(tuple(sorted(spans, key=lambda span: span.start_ns)), self._backend.name, chosen)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, in order and without overlaps."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def covered(interval: Interval, busy: Sequence[Interval]) -> int:
    """The length of the part of `interval` that lies in `busy`, a result of `union`."""
    later = busy[max(bisect.bisect_right(busy, interval) - 1, 0) :]
    begun = itertools.takewhile(lambda other: other[0] < interval[1], later)
    return sum(max(0, min(interval[1], end) - max(interval[0], start)) for start, end in begun)


def total_length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def _by_stream(span: Span) -> tuple[int, str, int]:
    return {MAIN: 0, LAUNCHING_THREAD: 2}.get(span.stream, 1), span.stream, span.start_ns
