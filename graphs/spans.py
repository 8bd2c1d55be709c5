"""Stages by name: which nodes of a recording belong to which stage, and the ranges that a profiler shows them as.

Knows names and counts; knows nothing of devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

STEP = "step"  # the stage of what a step does outside of every named one
OUTSIDE = -1  # the round of what runs between rounds: prompts, a batch on its way in, results on their way out
BETWEEN = "between rounds"
LAUNCHER = "launching thread"
MakeRange = Callable[[str], AbstractContextManager[None]]


class Label(NamedTuple):
    """What a node belongs to: a stage, or itself where it is a host node."""

    stream: str
    name: str
    kind: Literal["stage", "host"] = "stage"


@dataclass(frozen=True)
class StageRun:
    """Nodes of one stage that were captured one after the other, on one stream; or one host node, under its own name."""

    stream: str
    name: str
    kind: Literal["stage", "host"]
    nodes: int


class Span(NamedTuple):
    """Something took this long: a stage, a host node, a stream that stood waiting for another, or the launching thread's part."""

    stream: str
    name: str  # of a wait: what is waited for
    kind: Literal["stage", "host", "wait", "launch"]
    round: int  # OUTSIDE: none
    start_ns: int
    end_ns: int


def stage_runs(labels: Iterable[Label]) -> tuple[StageRun, ...]:
    """One label per node, in the order of the capture. The n-th node of a graph is in the run that counts up to n."""
    runs: list[StageRun] = []
    for label in labels:
        if label.kind == "stage" and runs and (runs[-1].stream, runs[-1].name, runs[-1].kind) == label:
            runs[-1] = replace(runs[-1], nodes=runs[-1].nodes + 1)
        else:
            runs.append(StageRun(*label, nodes=1))
    return tuple(runs)


def nvtx_range() -> MakeRange:
    """Ranges for nsys and its like; ValueError where this torch cannot make them."""
    try:
        torch.cuda.nvtx.mark("stepgraph")
    except RuntimeError as error:
        raise ValueError(f"nvtx: got True, want False: torch {torch.__version__} makes no ranges ({str(error).splitlines()[0]})") from None
    return _pushed


@contextlib.contextmanager
def _pushed(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
