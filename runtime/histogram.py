"""Counts of durations."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

SECONDS_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True)
class Histogram:
    bounds: tuple[float, ...]  # upper, inclusive
    counts: tuple[int, ...]  # one per bound, then one for larger values
    total: float  # sum of the values

    @property
    def count(self) -> int:
        return sum(self.counts)


class HistogramBuilder:
    """Counts values up to each bound of SECONDS_BOUNDS, inclusive, and larger ones."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(SECONDS_BOUNDS) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(SECONDS_BOUNDS, value)] += 1
        self.total += value

    def snapshot(self) -> Histogram:
        return Histogram(SECONDS_BOUNDS, tuple(self.counts), self.total)
