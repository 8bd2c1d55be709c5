"""The line that profiles: nsys with what the report needs and nothing that disturbs the rounds, or the script alone.

Which rounds, the engine in the script learns from its environment; see runtime/profiled.py.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# flag, why. {out} is where the reports go.
FLAGS = (
    ("--trace=cuda,nvtx", "launches, graph nodes and stages; what else nsys traces costs time and answers nothing here"),
    ("--cuda-graph-trace=node", "a graph as a whole has no stages"),
    ("--capture-range=cudaProfilerApi", "the engine says when: loading and warming up stay out"),
    ("--capture-range-end=repeat:2", "the first range is the capture, where nodes get their stages, the second the rounds"),
    ("--sample=none", "sampling would interrupt the host nodes that are being measured"),
    ("--cpuctxsw=none", "the same, and it may need privileges"),
    ("--wait=primary", "grammar workers of the script need not be waited for"),
    ("--force-overwrite=true", "the same name again is the next try"),
    ("--output={out}", "writes {out}.1.nsys-rep of the capture and {out}.2.nsys-rep of the rounds"),
)
ROUNDS, FILE, TOOL, NVTX = "STEPGRAPH_PROFILE_ROUNDS", "STEPGRAPH_PROFILE_FILE", "STEPGRAPH_PROFILE_WITH", "STEPGRAPH_NVTX"


BEHIND = 3  # rounds that the bench goes on for: the results of the last one are read while the next ones are on their way


def checked_rounds(text: str) -> tuple[int, int]:
    """First and last round; ValueError where that is no range."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--rounds: got {text!r}, expected FIRST-LAST, two whole numbers, the second one greater, like 20-40")
    return int(match[1]), int(match[2])


def rounds_file(out: Path) -> Path:
    """What the engine writes down."""
    return out.with_name(out.name + ".rounds.json")


def environment(rounds: tuple[int, int], out: Path, with_nsys: bool) -> dict[str, str]:
    variables = {ROUNDS: f"{rounds[0]}-{rounds[1]}", FILE: str(rounds_file(out)), TOOL: "nsys" if with_nsys else "trace"}
    return {**variables, NVTX: "1"} if with_nsys else variables


def python_line(script: Sequence[str]) -> list[str]:
    """A .py file is run by this interpreter; anything else is a command."""
    return [sys.executable, *script] if script[0].endswith(".py") else list(script)


def nsys_line(nsys: str, out: Path, script: Sequence[str]) -> list[str]:
    return [nsys, "profile", *(flag.format(out=out) for flag, _ in FLAGS), *python_line(script)]


def reasons(out: Path) -> list[str]:
    return [f"# {flag.format(out=out)}: {why.format(out=out)}" for flag, why in FLAGS]


def clip_repr(line: Sequence[str], variables: Mapping[str, str]) -> str:
    """As one would type it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), *map(shlex.quote, line)])
