"""The report: one JSON document with counts, figures over time, linear trends and the verdict."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.origin import origin
from tools.soak.process import Sample
from tools.soak.soak import Soak, columns

LEAST_POINTS = 4
MIB = 1 << 20
MOST_POINTS = 120  # kept of a figure over time
# A figure grows if its trend after warm-up rises by more than two standard errors of its slope, and by more per hour than given here: an
# absolute value, or a share of its mean if that is more. The error alone would call any steady rise growth, such as that of a heap that
# is still fragmenting, or of a count that went from 20 to 21; the rate alone would call noise growth. A run of less than an hour may
# rise as much as one of an hour: some of what grows after warm-up (heaps, threads of captured engines) does so once.
SIGNIFICANT = 2.0
ALLOWED: dict[str, tuple[float, float]] = {
    "resident_bytes": (4 * MIB, 0.0),
    "heap_bytes": (4 * MIB, 0.0),
    "device_bytes": (2 * MIB, 0.01),
    "threads": (4, 0.1),
    "python_threads": (4, 0.1),
    "files": (4, 0.1),
    "strays": (2, 0.0),
    "pages": (0, 0.0),
    "rows": (0, 0.0),
    "grammar_bytes": (MIB, 0.2),
    "matchers": (40, 0.1),
    "objects": (5000, 0.05),
    "tensors": (200, 0.1),
}
OF_A_TYPE = (100, 0.2)  # as ALLOWED, for objects of one type; caches empty with their engines and fill again


def report(soak: Soak, interrupted: bool = False) -> dict[str, Any]:
    trends = lines(soak.samples, soak.warm_at)
    growing = {name: trend.why for name, trend in trends.items() if not trend.flat}
    trend_name = bool(trends)
    reason = (
        f"{soak.num_problems} problems: {soak.problems[0][:300]}"
        if soak.problems
        else f"growing: {growing}"
        if growing
        else "every output was correct, and no figure grew after warm-up"
        if trend_name
        else "every output was correct; the run was too short for trends"
    )
    return {
        "what": "soak",
        **origin(soak.models.device),
        "seed": soak.plan.seed,
        "seconds": round(soak.seconds, 1),
        "wanted_seconds": soak.plan.seconds,
        "interrupted": interrupted,
        "passed": not soak.problems and not growing,
        "flat": not growing if trend_name else None,
        "reason": reason,
        "did": dict(sorted(soak.counts.items())),
        "kinds": {name: dict(sorted(counts.items())) for name, counts in sorted(soak.by_kind.items())},
        "num_problems": soak.num_problems,
        "problems": soak.problems,
        "warm_after_seconds": soak.warm_at and round(soak.warm_at, 1),
        "trends": {name: _rounded(trend) for name, trend in trends.items() if not name.startswith("objects: ") or not trend.flat},
        "types_that_changed": changes(soak.samples, soak.warm_at),
        "settled": columns(thinned([each for each in soak.samples if each.settled])),
        "running": columns(thinned([each for each in soak.samples if not each.settled])),
    }


def written(found: dict[str, Any]) -> str:
    """As JSON, with each list of numbers on one line."""
    flat = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")
    return flat.sub(lambda part: "[" + re.sub(r"\s*\n\s*", " ", part[1]) + "]", json.dumps(found, indent=1))


def lines(samples: Sequence[Sample], warm_at: float | None) -> dict[str, Trend]:
    """A trend of each figure of the settled samples after warm-up, and of the object count of each type."""
    warm = _warm(samples, warm_at)
    late = warm[len(warm) // 2 :]  # a heap that was still filling is flat here; a leak grows here as well
    found: dict[str, Trend] = {}
    for name, (slack, share) in ALLOWED.items():
        for trend_name, those in ((name, warm), (f"{name}, last half", late)):
            values = [getattr(each, name) for each in those]
            if None not in values and (trend := fit([each.seconds for each in those], values, slack, share)):
                found[trend_name] = trend
    for name in sorted({name for each in warm for name in each.types}):
        both = [fit([each.seconds for each in those], [each.types.get(name, 0) for each in those], *OF_A_TYPE) for those in (warm, late)]
        if both_trends := [trend for trend in both if trend]:  # rings and caches of new engines fill once; a leak grows in both
            found[f"objects: {name}"] = min(both_trends, key=lambda trend: trend.growth)
    return found


def changes(samples: Sequence[Sample], warm_at: float | None) -> dict[str, list[int]]:
    """Object counts at the end of warm-up and of the run, for types that differ by more than five."""
    warm = _warm(samples, warm_at)
    if not warm:
        return {}
    first, last = warm[0].types, warm[-1].types
    names = sorted({*first, *last})
    return {name: [first.get(name, 0), last.get(name, 0)] for name in names if abs(first.get(name, 0) - last.get(name, 0)) > 5}


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    step = -(-len(samples) // MOST_POINTS) or 1
    return list(samples[::step])


def _warm(samples: Sequence[Sample], warm_at: float | None) -> list[Sample]:
    return [each for each in samples if each.settled and warm_at is not None and each.seconds >= warm_at]


def _rounded(trend: Trend) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(trend).items()}


@dataclass(frozen=True)
class Trend:
    """A least-squares line."""

    points: int
    first: float
    last: float
    least: float
    most: float
    mean: float
    per_hour: float
    error_per_hour: float  # standard error of per_hour
    growth: float  # from the first to the last point of the line
    allowed: float  # growth that is no leak, whatever the error
    flat: bool
    why: str


def fit(seconds: Sequence[float], values: Sequence[float], slack: float, share: float) -> Trend | None:
    """None for too few points. Flat: the slope is not significantly above zero, or at most max(slack, share * mean) per hour."""
    count = len(values)
    if count < LEAST_POINTS or seconds[-1] <= seconds[0]:
        return None
    hour, span = 3600.0, seconds[-1] - seconds[0]
    mean, middle = math.fsum(values) / count, math.fsum(seconds) / count
    spread = math.fsum((second - middle) ** 2 for second in seconds)
    slope = math.fsum((second - middle) * (value - mean) for second, value in zip(seconds, values, strict=True)) / spread
    left = math.fsum((value - mean - slope * (second - middle)) ** 2 for second, value in zip(seconds, values, strict=True))
    error = math.sqrt(left / (count - 2) / spread)
    growth, allowed = slope * span, max(slack, share * abs(mean)) * max(1.0, span / hour)
    within, significant = growth <= allowed, slope > SIGNIFICANT * error
    why = f"the line rises by {growth:,.6g} in {span:,.0f} s, {'at most' if within else 'more than'} {allowed:,.6g}; "
    why += f"per hour {slope * hour:,.6g}, standard error {error * hour:,.3g}"
    return Trend(
        count,
        values[0],
        values[-1],
        min(values),
        max(values),
        mean,
        slope * hour,
        error * hour,
        growth,
        allowed,
        within or not significant,
        why,
    )
