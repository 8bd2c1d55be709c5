"""The profiled command line: the script under nsys with the flags that the report needs, or the script alone.

The engine in the script reads the rounds from its environment.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# flag and reason; {out} is the prefix of the reports
FLAGS = (
    ("--trace=cuda,nvtx", "launches, graph nodes and stages; other traces cost time and are not used"),
    ("--cuda-graph-trace=node", "without it nsys records whole graphs, without stages"),
    ("--capture-range=cudaProfilerApi", "the engine starts and stops the recording; excludes loading and warm-up"),
    ("--capture-range-end=repeat:2", "first range: capture, where nodes get their stages; second range: rounds"),
    ("--sample=none", "sampling would interrupt the host nodes that are being measured"),
    ("--cpuctxsw=none", "the same; may also need privileges"),
    ("--wait=primary", "do not wait for grammar workers of the script"),
    ("--force-overwrite=true", "allow repeated runs with one name"),
    ("--output={out}", "writes {out}.1.nsys-rep of the capture and {out}.2.nsys-rep of the rounds"),
)
ROUNDS, FILE, TOOL, NVTX = "STEPGRAPH_PROFILE_ROUNDS", "STEPGRAPH_PROFILE_FILE", "STEPGRAPH_PROFILE_WITH", "STEPGRAPH_NVTX"


EXTRA_ROUNDS = 3  # additional rounds of the bench: results are read while later rounds are in flight


def parse_rounds(text: str) -> tuple[int, int]:
    """First and last round; ValueError if `text` is not a range."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--rounds: got {text!r}, expected FIRST-LAST with FIRST < LAST, for example 20-40")
    return int(match[1]), int(match[2])


def rounds_file(out: Path) -> Path:
    """The file written by the engine."""
    return out.with_name(out.name + ".rounds.json")


def environment(rounds: tuple[int, int], out: Path, with_nsys: bool) -> dict[str, str]:
    variables = {ROUNDS: f"{rounds[0]}-{rounds[1]}", FILE: str(rounds_file(out)), TOOL: "nsys" if with_nsys else "trace"}
    return {**variables, NVTX: "1"} if with_nsys else variables


def python_command(script: Sequence[str]) -> list[str]:
    """The command of a script: a .py file runs with this interpreter."""
    return [sys.executable, *script] if script[0].endswith(".py") else list(script)


def nsys_command(nsys: str, out: Path, script: Sequence[str]) -> list[str]:
    return [nsys, "profile", *(flag.format(out=out) for flag, _ in FLAGS), *python_command(script)]


def flag_reasons(out: Path) -> list[str]:
    return [f"# {flag.format(out=out)}: {why.format(out=out)}" for flag, why in FLAGS]


def shell_command(line: Sequence[str], variables: Mapping[str, str]) -> str:
    """The command as typed in a shell."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), *map(shlex.quote, line)])
