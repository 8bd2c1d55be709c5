"""A profile: spans on streams, their rounds, and counters of the engine; independent of the profiler.

Imports nothing of stepgraph, so that reports can be read without torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MAIN = "main"
NO_ROUND = -1  # round number of work between rounds: prompts, uploads, results
Kind = Literal["stage", "host", "wait", "launch"]
Interval = tuple[int, int]


class Span(NamedTuple):
    """A timed activity, as in `graphs/spans.py`. On a GPU a stage span is one kernel, copy or fill."""

    stream: str
    name: str
    kind: Kind
    round: int
    start_ns: int
    end_ns: int

    @property
    def nanoseconds(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Profile:
    """The profiled rounds. `counters`: the engine's counters over the same rounds, if available. `without_host_nodes`: it is known that
    their graphs have none."""

    backend: Literal["nsys", "torch", "tape"]
    spans: tuple[Span, ...]
    sources: tuple[str, ...] = ()
    counters: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    without_host_nodes: bool = False


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of the intervals, sorted and disjoint."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def total_length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Intersection of two unions."""
    found = []
    index = bisect.bisect_right(second, first[0][0], key=lambda one: one[1]) if first else 0  # avoids quadratic time for many short windows
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        at = index
        while at < len(second) and second[at][0] < end:
            found.append((max(start, second[at][0]), min(end, second[at][1])))
            at += 1
    return found


def subtract(window: Interval, busy: Sequence[Interval]) -> list[Interval]:
    """`window` without `busy`."""
    gaps, at = [], window[0]
    for start, end in intersection([window], busy):
        if start > at:
            gaps.append((at, start))
        at = end
    return gaps + ([(at, window[1])] if at < window[1] else [])
