"""What a profile is made of, whoever took it: spans on streams, the rounds they belong to, and what the engine counted meanwhile.

Knows times and names; knows nothing of profilers, files or devices, and imports nothing of stepgraph: reports are also read where
there is no torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MAIN = "main"
OUTSIDE = -1  # the round of what ran between rounds: prompts, the batch on its way in, results on their way out
Kind = Literal["stage", "host", "wait", "launch"]
Interval = tuple[int, int]


class Span(NamedTuple):
    """Something took this long, as in `graphs/spans.py`. Where a GPU was profiled, one of a stage is one kernel, copy or fill."""

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
    """The rounds of one range. `counters` is what the engine counted over the same rounds; empty where nobody wrote it down."""

    backend: Literal["nsys", "torch", "tape"]
    spans: tuple[Span, ...]
    sources: tuple[str, ...] = ()
    counters: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in order and without overlaps."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time that lies in both; each of them as `union` gives it."""
    found = []
    index = bisect.bisect_right(second, first[0][0], key=lambda one: one[1]) if first else 0  # else many short windows would cost a square
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        at = index
        while at < len(second) and second[at][0] < end:
            found.append((max(start, second[at][0]), min(end, second[at][1])))
            at += 1
    return found


def without(window: Interval, busy: Sequence[Interval]) -> list[Interval]:
    """What of `window` is not in `busy`."""
    gaps, at = [], window[0]
    for start, end in common([window], busy):
        if start > at:
            gaps.append((at, start))
        at = end
    return gaps + ([(at, window[1])] if at < window[1] else [])
