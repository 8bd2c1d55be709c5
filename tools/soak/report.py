"""The report: one JSON document with counts, figures over time, linear trends and the verdict."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from tools.origin import origin
from tools.soak.process import Sample
from tools.soak.soak import Soak, columns

MIN_POINTS = 4
MIB = 1 << 20
MAX_POINTS = 120  # points of a figure in the document
# A figure grows if its slope is more than this many standard errors above zero: by chance, one of forty figures in one run of twenty.
SIGNIFICANT_ERRORS = 3.0
MAX_LAG = 36  # consecutive points with correlated errors: an engine keeps memory of an act until its next act, twelve acts later
# Growth that is allowed because it happens once, so that a run cannot measure it as a slope:
# * within the first FILLING_SECONDS heaps, caches and threads of the engines fill, by at most the first number or, if that is more, by the
#   second number as a share of the mean. Fifteen minutes is how long resident memory rose at the same allocated bytes.
# * later, by at most the third number: whole units of the counted objects; for bytes, the samples of the run itself (MOST_SAMPLES of about
#   a kilobyte), blocks of torch's allocator on a device, a grammar that replaces a smaller one in a cache.
FILLING_SECONDS = 900.0
ALLOWED: dict[str, tuple[float, float, float]] = {
    "resident_bytes": (4 * MIB, 0.0, MIB / 2),
    "heap_bytes": (4 * MIB, 0.0, MIB / 2),
    "device_bytes": (2 * MIB, 0.01, 2 * MIB),
    "threads": (4, 0.1, 1),
    "python_threads": (4, 0.1, 1),
    "files": (4, 0.1, 1),
    "strays": (2, 0.0, 1),
    "pages": (0, 0.0, 0),
    "rows": (0, 0.0, 0),
    "grammar_bytes": (MIB, 0.2, MIB / 4),
    "matchers": (40, 0.1, 12),  # later: one for each engine, which keeps those of its last rounds
    "objects": (5000, 0.05, 1000),  # later: two for each sample
    "tensors": (200, 0.1, 10),
}
ALLOWED_PER_TYPE = (100, 0.2, 5)  # like ALLOWED, for objects of one type; caches are emptied with their engines and fill again
LATE = ", last half"


def report(soak: Soak, interrupted: bool = False) -> dict[str, Any]:
    settled = soak.samples(settled=True)
    trends = fit_trends(settled, soak.warm_at)
    growing = {name: trend.why for name, trend in growing_trends(trends).items()}
    has_trends = bool(trends)
    reason = (
        f"{soak.num_problems} problems: {soak.problems[0][:300]}"
        if soak.problems
        else f"growing: {growing}"
        if growing
        else "every output was correct, and no figure grew after warm-up"
        if has_trends
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
        "flat": not growing if has_trends else None,
        "reason": reason,
        "did": dict(sorted(soak.counts.items())),
        "kinds": {name: dict(sorted(counts.items())) for name, counts in sorted(soak.by_kind.items())},
        "num_problems": soak.num_problems,
        "problems": soak.problems,
        "warm_after_seconds": soak.warm_at and round(soak.warm_at, 1),
        "trends": {name: _rounded(trend) for name, trend in trends.items() if not name.startswith("objects: ") or not trend.flat},
        "types_that_changed": changes(settled, soak.warm_at),
        "settled": columns(thin(settled)),
        "running": columns(thin(soak.samples(settled=False))),
    }


def to_json(document: dict[str, Any]) -> str:
    """As JSON, with each list of numbers on one line."""
    flat = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")
    return flat.sub(lambda part: "[" + re.sub(r"\s*\n\s*", " ", part[1]) + "]", json.dumps(document, indent=1))


def fit_trends(samples: Sequence[Sample], warm_at: float | None) -> dict[str, Trend]:
    """Trends of each figure of the settled samples, and of the object count of each type: after warm-up, and in the last half of that."""
    warm = _warm(samples, warm_at)
    filled = [each for each in warm if each.seconds >= FILLING_SECONDS]
    warm = filled if len(filled) >= 2 * MIN_POINTS else warm
    late = warm[len(warm) // 2 :]
    trends: dict[str, Trend] = {}
    for suffix, points in (("", warm), (LATE, late)):
        seconds = [each.seconds for each in points]
        for name, allowed in ALLOWED.items():
            values = [getattr(each, name) for each in points]
            if None not in values and (trend := fit(seconds, values, *allowed)):
                trends[name + suffix] = trend
        for name in sorted({name for each in warm for name in each.types}):
            if trend := fit(seconds, [each.types.get(name, 0) for each in points], *ALLOWED_PER_TYPE):
                trends[f"objects: {name}{suffix}"] = trend
    return trends


def growing_trends(trends: Mapping[str, Trend]) -> dict[str, Trend]:
    """Trends of figures that grow in the whole time, and in its last half where that has enough points. A leak grows in both; what fills
    once is flat in the last half, and a last half that differs by chance does not make the whole grow."""
    names = [name for name in trends if not name.endswith(LATE)]
    return {name: trends[name] for name in names if not trends[name].flat and (name + LATE not in trends or not trends[name + LATE].flat)}


def changes(samples: Sequence[Sample], warm_at: float | None) -> dict[str, list[int]]:
    """Object counts at the end of warm-up and of the run, for types that differ by more than five."""
    warm = _warm(samples, warm_at)
    if not warm:
        return {}
    first, last = warm[0].types, warm[-1].types
    names = sorted({*first, *last})
    return {name: [first.get(name, 0), last.get(name, 0)] for name in names if abs(first.get(name, 0) - last.get(name, 0)) > 5}


def thin(samples: Sequence[Sample]) -> list[Sample]:
    step = -(-len(samples) // MAX_POINTS) or 1
    return list(samples[::step])


def _warm(samples: Sequence[Sample], warm_at: float | None) -> list[Sample]:
    return [each for each in samples if warm_at is not None and each.seconds >= warm_at]


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
    error_per_hour: float  # standard error of per_hour, for autocorrelated points
    growth: float  # from the first to the last point of the line
    allowed: float  # growth that is not measured as a slope
    flat: bool
    why: str


def fit(seconds: Sequence[float], values: Sequence[float], slack: float, share: float, step: float) -> Trend | None:
    """None for too few points. Flat: the slope is not significantly above zero, or the growth is at most `step`, or at most
    max(slack, share * mean) where the points begin within FILLING_SECONDS."""
    count = len(values)
    if count < MIN_POINTS or seconds[-1] <= seconds[0]:
        return None
    hour, span = 3600.0, seconds[-1] - seconds[0]
    mean, middle = math.fsum(values) / count, math.fsum(seconds) / count
    spread = math.fsum((second - middle) ** 2 for second in seconds)
    slope = math.fsum((second - middle) * (value - mean) for second, value in zip(seconds, values, strict=True)) / spread
    residuals = [value - mean - slope * (second - middle) for second, value in zip(seconds, values, strict=True)]
    error = _slope_error([second - middle for second in seconds], residuals)
    growth, allowed = slope * span, max(slack, share * abs(mean)) if seconds[0] < FILLING_SECONDS else step
    is_allowed, is_significant = growth <= allowed, slope > SIGNIFICANT_ERRORS * error
    why = f"the line rises by {growth:,.6g} in {span:,.0f} s, {'at most' if is_allowed else 'more than'} {allowed:,.6g}; "
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
        is_allowed or not is_significant,
        why,
    )


def _slope_error(seconds: Sequence[float], residuals: Sequence[float]) -> float:
    """The standard error of a slope, from the residuals at centred times: the larger of the error for independent points, which is too
    small for autocorrelated points such as the memory of engines, and the error of Newey and West (1987)."""
    times, distances, count = numpy.array(seconds), numpy.array(residuals), len(residuals)
    spread, scores, lags = float(times @ times), times * distances, min(count // 4, MAX_LAG)
    pairs = sum((1 - lag / (lags + 1)) * float(scores[lag:] @ scores[:-lag]) for lag in range(1, lags + 1))
    variance = float(scores @ scores) + 2 * pairs
    independent = float(distances @ distances) / (count - 2) * spread
    return math.sqrt(max(variance, independent)) / spread
