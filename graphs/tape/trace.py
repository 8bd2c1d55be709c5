"""Times of stages, host nodes and waits of replays: programs with a clock around every item, used only while tracing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from stepgraph.graphs.capture import MAIN
from stepgraph.graphs.spans import BETWEEN, LAUNCHER, OUTSIDE, Span
from stepgraph.graphs.tape.player import Await, HostCall, Item, Segment


class Timed:
    """An item of a program with the time of its last run."""

    def __init__(self, stream: str, name: str, kind: Literal["stage", "host", "wait"], item: Item) -> None:
        self.stream, self.name, self.kind, self.item = stream, name, kind, item
        self.start_ns = self.end_ns = 0

    def __call__(self, skip: bool) -> None:
        self.start_ns = time.perf_counter_ns()
        try:
            self.item(skip)
        finally:
            self.end_ns = time.perf_counter_ns()


def describe(at: Mapping[str, Item]) -> tuple[str, ...]:
    """The current item of each stream, in words."""
    return tuple(f"stream {stream}: {_named(item)}" for stream, item in sorted(at.items()))


def _named(item: Item) -> str:
    if isinstance(item, Timed):
        item = item.item
    if isinstance(item, HostCall):
        return f"host node {item.name}"
    if isinstance(item, Await):
        return f"waits for {item.name}"
    stages = list(dict.fromkeys(node.stage for node in item.nodes)) if isinstance(item, Segment) else []
    return f"stage {stages[0]}" + (f" to {stages[-1]}" if len(stages) > 1 else "") if stages else "between two items"


class TimedPrograms(NamedTuple):
    """The items of a tape per stream, and the timed ones among them."""

    programs: Mapping[str, Sequence[Item]]
    timed: Sequence[Timed]


def timed_programs(programs: Mapping[str, Sequence[Item]]) -> TimedPrograms:
    """The same items with a clock, segments split by stage; signals take no time."""
    result: dict[str, list[Item]] = {stream: [] for stream in programs}
    timed: list[Timed] = []
    for stream, items in programs.items():
        for item in items:
            pieces: list[Item] = [item]
            if isinstance(item, Segment):
                pieces = [Timed(stream, piece.nodes[0].stage, "stage", piece) for piece in item.by_stage()]
            elif isinstance(item, HostCall):
                pieces = [Timed(stream, item.name, "host", item)]
            elif isinstance(item, Await):
                pieces = [Timed(stream, item.name, "wait", item)]
            result[stream] += pieces
            timed += [piece for piece in pieces if isinstance(piece, Timed)]
    return TimedPrograms(result, timed)


class Tracer:
    """Collects spans of `rounds` replays and of the work between them."""

    def __init__(self, first_round: int, rounds: int) -> None:
        self._next, self._end = first_round, first_round + rounds
        self.spans: list[Span] = []  # appended by the device thread and the launching thread

    @property
    def full(self) -> bool:
        return self._next >= self._end

    @contextlib.contextmanager
    def launching(self) -> Iterator[int]:
        """Times the launch of a round; yields its number."""
        number, start = self._next, time.perf_counter_ns()
        self._next += 1
        yield number
        self.spans.append(Span(LAUNCHER, f"launch {number}", "launch", number, start, time.perf_counter_ns()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Times a wait of the launching thread for results."""
        start = time.perf_counter_ns()
        yield
        self.spans.append(Span(LAUNCHER, "results", "wait", OUTSIDE, start, time.perf_counter_ns()))

    def outside(self, function: Callable[[], object]) -> Callable[[], object]:
        """`function` with a span, for work on the main stream between rounds."""

        def run() -> None:
            start = time.perf_counter_ns()
            function()
            self.spans.append(Span(MAIN, BETWEEN, "stage", OUTSIDE, start, time.perf_counter_ns()))

        return run

    def collect(self, replayed: TimedPrograms, number: int) -> None:
        """Add the spans of a replay; on the thread that ran it."""
        self.spans += [Span(item.stream, item.name, item.kind, number, item.start_ns, item.end_ns) for item in replayed.timed]
