"""Whether a figure grew: a line through what was measured after warm-up, and how far it rises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_POINTS = 4
MIB = 1 << 20


@dataclass(frozen=True)
class Trend:
    """A straight line by least squares."""

    points: int
    first: float
    last: float
    least: float
    most: float
    mean: float
    per_hour: float
    error_per_hour: float  # standard error of that
    growth: float  # of the line, from the first point to the last
    allowed: float
    flat: bool
    why: str


def fit(seconds: Sequence[float], values: Sequence[float], slack: float, share: float) -> Trend | None:
    """None where there are too few points. The line may rise by `slack`, or by `share` of the mean where that is more."""
    count = len(values)
    if count < LEAST_POINTS or seconds[-1] <= seconds[0]:
        return None
    mean, middle = math.fsum(values) / count, math.fsum(seconds) / count
    spread = math.fsum((second - middle) ** 2 for second in seconds)
    slope = math.fsum((second - middle) * (value - mean) for second, value in zip(seconds, values, strict=True)) / spread
    left = math.fsum((value - mean - slope * (second - middle)) ** 2 for second, value in zip(seconds, values, strict=True))
    error = math.sqrt(left / (count - 2) / spread)
    growth, allowed = slope * (seconds[-1] - seconds[0]), max(slack, share * abs(mean))
    flat = growth <= allowed
    why = f"the line rises by {growth:,.6g} in {seconds[-1] - seconds[0]:,.0f} s, {'at most' if flat else 'more than'} {allowed:,.6g}"
    hour = 3600.0
    return Trend(count, values[0], values[-1], min(values), max(values), mean, slope * hour, error * hour, growth, allowed, flat, why)
