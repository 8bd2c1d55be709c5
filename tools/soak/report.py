"""What a soak found, as one JSON document: what it did, figures over time, lines through them, and the verdict."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.soak.figures import Sample
from tools.soak.running import Soak, columns
from tools.soak.trend import MIB, Trend, fit

MOST_POINTS = 120  # of a figure over time that are kept
# What a line through a figure may rise by behind warm-up: so much, or such a share of its mean. Heaps break up, and engines differ:
# those that record have threads of their own.
ALLOWED: dict[str, tuple[float, float]] = {
    "resident_bytes": (16 * MIB, 0.02),
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
OF_A_TYPE = (100, 0.2)  # objects of one type; caches are emptied with their engines, and fill again


def report(soak: Soak, interrupted: bool = False) -> dict[str, Any]:
    trends = lines(soak.samples, soak.warm_at)
    growing = {name: trend.why for name, trend in trends.items() if not trend.flat}
    told = bool(trends)
    reason = (
        f"{soak.num_problems} problems: {soak.problems[0][:300]}"
        if soak.problems
        else f"growing: {growing}"
        if growing
        else "every output was as it should be, and no figure rises behind warm-up by more than it may"
        if told
        else "every output was as it should be; too short to tell whether figures are flat"
    )
    return {
        "what": "soak",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **machine(soak.models.device),
        "seed": soak.plan.seed,
        "seconds": round(soak.seconds, 1),
        "wanted_seconds": soak.plan.seconds,
        "interrupted": interrupted,
        "passed": not soak.problems and not growing,
        "flat": not growing if told else None,
        "reason": reason,
        "did": dict(sorted(soak.counts.items())),
        "jobs": dict(sorted(soak.by_kind.items())),
        "num_problems": soak.num_problems,
        "problems": soak.problems,
        "warm_after_seconds": soak.warm_at and round(soak.warm_at, 1),
        "trends": {name: _rounded(trend) for name, trend in trends.items() if not name.startswith("objects: ") or not trend.flat},
        "types_that_changed": changes(soak.samples, soak.warm_at),
        "settled": columns(thinned([each for each in soak.samples if each.settled])),
        "running": columns(thinned([each for each in soak.samples if not each.settled])),
    }


def written(found: dict[str, Any]) -> str:
    """As JSON, a list of numbers on one line."""
    flat = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")
    return flat.sub(lambda part: "[" + re.sub(r"\s*\n\s*", " ", part[1]) + "]", json.dumps(found, indent=1))


def lines(samples: Sequence[Sample], warm_at: float | None) -> dict[str, Trend]:
    """A line through each figure of the settled samples behind warm-up, and through the count of each type of object."""
    warm = _warm(samples, warm_at)
    late = warm[len(warm) // 2 :]  # heaps that are still settling rise no more here; a leak rises as ever
    found: dict[str, Trend] = {}
    for name, (slack, share) in ALLOWED.items():
        for told, those in ((name, warm), (f"{name}, last half", late)):
            values = [getattr(each, name) for each in those]
            if None not in values and (trend := fit([each.seconds for each in those], values, slack, share)):
                found[told] = trend
    for name in sorted({name for each in warm for name in each.types}):
        both = [fit([each.seconds for each in those], [each.types.get(name, 0) for each in those], *OF_A_TYPE) for those in (warm, late)]
        if told_by := [trend for trend in both if trend]:  # rings and caches of new engines fill once: what leaks rises in both
            found[f"objects: {name}"] = min(told_by, key=lambda trend: trend.growth)
    return found


def changes(samples: Sequence[Sample], warm_at: float | None) -> dict[str, list[int]]:
    """How many objects there were of a type at the end of warm-up, and at the end, where that differs by a few."""
    warm = _warm(samples, warm_at)
    if not warm:
        return {}
    first, last = warm[0].types, warm[-1].types
    names = sorted({*first, *last})
    return {name: [first.get(name, 0), last.get(name, 0)] for name in names if abs(first.get(name, 0) - last.get(name, 0)) > 5}


def machine(device: torch.device) -> dict[str, Any]:
    """What it ran on and with; nothing that tells whose it is."""
    versions = {}
    for package in ("stepgraph", "torch", "xgrammar", "llguidance", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (tape)",
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def processor() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown processor"


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    step = -(-len(samples) // MOST_POINTS) or 1
    return list(samples[::step])


def _warm(samples: Sequence[Sample], warm_at: float | None) -> list[Sample]:
    return [each for each in samples if each.settled and warm_at is not None and each.seconds >= warm_at]


def _rounded(trend: Trend) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(trend).items()}
