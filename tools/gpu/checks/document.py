"""The document of a run: the rows of its checks, the goals that they decide, and the file it is kept in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.checks.goals import GOALS, judge

FORMAT = 1
BAD = ("failed", "crashed", "timed out", "interrupted")


def compose(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], quick: bool, whole: bool, seconds: float) -> dict[str, Any]:
    """`whole`: every check was asked for."""
    rehearsal = facts["mode"] == "rehearsal"
    return {
        "format": FORMAT,
        **facts,
        "quick": quick,
        "whole": whole,
        "seconds": round(seconds, 1),
        "passed": all(row["verdict"] not in BAD for row in rows),
        "goals": [judge(goal, rows, rehearsal) for goal in GOALS],
        "checks": list(rows),
    }


def file_name(document: Mapping[str, Any]) -> str:
    """By device and date; what is not all of a full run says so."""
    device = re.sub(r"[^a-z0-9]+", "-", str(document["device"]).lower()).strip("-")
    kinds = {"rehearsal": document["mode"] == "rehearsal", "quick": document["quick"], "part": not document["whole"]}
    return "-".join([device, str(document["date"])[:10], *(kind for kind, told in kinds.items() if told)]) + ".json"


def save(document: Mapping[str, Any], folder: Path) -> Path:
    """Whole or not at all: an interruption leaves what was there before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(document)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path
