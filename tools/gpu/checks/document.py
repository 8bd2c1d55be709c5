"""The document of a run: check results, the goals that they decide, and the file that it is saved in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MISSING = "missing"  # version of a package that is not installed
FAILED_VERDICTS = ("failed", "crashed", "timed out", "interrupted")


def compose(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], quick: bool, whole: bool, seconds: float) -> dict[str, Any]:
    """`whole`: all checks were selected."""
    rehearsal = facts["mode"] == "rehearsal"
    return {
        "format": FORMAT,
        **facts,
        "quick": quick,
        "whole": whole,
        "seconds": round(seconds, 1),
        "passed": all(row["verdict"] not in FAILED_VERDICTS for row in rows),
        "goals": [assess(goal, rows, rehearsal) for goal in GOALS],
        "checks": list(rows),
    }


def merge(documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """One document of several that ran different checks at one commit on one device. names: of all checks, in order.

    ValueError if they do not belong together, or ran a check twice.
    """
    first = documents[0]
    for key in ("format", "mode", "device", "driver", "cuda", "python", "commit", "quick"):
        if found := [document[key] for document in documents if document[key] != first[key]]:
            raise ValueError(f"--merge: got {key} {first[key]!r} and {found[0]!r}, expected documents of one commit, device and length")
    versions: dict[str, str] = {}
    for package, version in (pair for document in documents for pair in document["versions"].items()):
        if MISSING not in (version, versions.get(package, version)) and version != versions.get(package, version):
            raise ValueError(f"--merge: got {package} {versions[package]} and {version}, expected one version")
        versions[package] = versions.get(package, version) if version == MISSING else version
    rows = sorted((row for document in documents for row in document["checks"]), key=lambda row: names.index(row["name"]))
    if twice := sorted({row["name"] for row in rows if sum(row["name"] == other["name"] for other in rows) > 1}):
        raise ValueError(f"--merge: got {', '.join(twice)} more than once, expected each check in one document")
    facts = {key: value for key, value in first.items() if key not in ("format", "quick", "whole", "seconds", "passed", "goals", "checks")}
    facts |= {"versions": versions, "date": min(document["date"] for document in documents)}
    whole = [row["name"] for row in rows] == list(names)
    return compose(facts, rows, first["quick"], whole, sum(document["seconds"] for document in documents))


def file_name(document: Mapping[str, Any]) -> str:
    """Device and date; also rehearsal, quick or part."""
    device = re.sub(r"[^a-z0-9]+", "-", str(document["device"]).lower()).strip("-")
    kinds = {"rehearsal": document["mode"] == "rehearsal", "quick": document["quick"], "part": not document["whole"]}
    return "-".join([device, str(document["date"])[:10], *(kind for kind, applies in kinds.items() if applies)]) + ".json"


def save(document: Mapping[str, Any], folder: Path) -> Path:
    """Atomic: an interruption leaves the previous file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(document)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path


@dataclass(frozen=True)
class Goal:
    """`figure` must be at most or at least `bound`; a miss within the `noise` figure counts as met."""

    name: str
    check: str
    figure: tuple[str, ...]
    bound: float
    at_most: bool = False
    noise: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}{' + noise' if self.noise else ''}"

    def met(self, found: float, noise: float) -> bool:
        return found <= self.bound + noise if self.at_most else found >= self.bound - noise


GOALS = (
    *(
        goal
        for size in ("1B", "8B")
        for goal in (
            Goal(f"{size}: constrained / unconstrained round, p50", "constrained_rounds", (size, "p50"), 1.0, True, (size, "noise")),
            Goal(f"{size}: constrained / unconstrained round, p99", "constrained_rounds", (size, "p99"), 1.02, True, (size, "noise_p99")),
        )
    ),
    Goal("1B: captured / eager tokens per second", "captured_against_eager", ("1B", "batch 1", "ratio", "median"), 2.5),
    Goal("8B: captured / eager tokens per second", "captured_against_eager", ("8B", "batch 1", "ratio", "median"), 1.65),
    Goal("share of host mask time hidden", "mask_time_is_hidden", ("share_hidden",), 0.99, False, ("noise",)),
    Goal("idle gap between rounds, us", "idle_between_rounds", ("gap_us", "median"), 5.0, True),
    Goal("a grammar's token and mask, us", "grammar_rows_equal_reference", ("advance_fill B=8 V=131072 mask 1", "kernel_us"), 5.0, True),
    Goal("1B: weights read per second / copy bandwidth, batch 1", "weights_per_second", ("1B", "share"), 0.78),
    Goal("8B: weights read per second / copy bandwidth, batch 1", "weights_per_second", ("8B", "share"), 0.88),
)


def assess(goal: Goal, rows: Sequence[Mapping[str, Any]], rehearsal: bool) -> dict[str, Any]:
    """Met, missed or not run, with the reason. A rehearsal decides no goal."""
    row = next((row for row in rows if row["name"] == goal.check), None)
    found, noise = (_figure(row["figures"], path) if row else None for path in (goal.figure, goal.noise))
    noise = noise if goal.noise and noise is not None else 0.0
    verdict, reason = "not run", ""
    if row is None:
        reason = "its check was not selected"
    elif found is None:
        reason = row["error"] or f"its check has no such figure: {row['verdict']}"
    elif rehearsal:
        reason = "a rehearsal measures no GPU"
    elif row["verdict"] != "passed" and goal.met(found, noise):  # parts that did not run may be worse
        reason = f"its check {row['verdict']}: {row['error']}"
    else:
        verdict = "met" if goal.met(found, noise) else "missed"
        reason = "" if verdict == "met" else f"found {found:g}, expected {goal.expected}" + (f" of {noise:g}" if noise else "")
    return {"name": goal.name, "expected": goal.expected, "found": found, "verdict": verdict, "reason": reason}


def _figure(figures: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = figures
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
