"""Stage names for profiles: the stage of each node of a recording, the report on a recording, time spans of stages, NVTX ranges."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from stepgraph.sampling.fields import shows_fields

DEFAULT_STAGE = "step"  # stage of operations outside every named stage
NO_ROUND = -1  # round number of work between rounds: prompts, copies of batches and results
BETWEEN_ROUNDS = "between rounds"
LAUNCHING_THREAD = "launching thread"
RangeFactory = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class StageRun:
    """Consecutive nodes of one stage on one stream, or one host node under its own name."""

    stream: str
    name: str
    kind: Literal["stage", "host"] = "stage"
    nodes: int = 1


class GraphNode(NamedTuple):
    """Kind and launch shape of a node of a CUDA graph, without its arguments."""

    kind: str
    launch: tuple[int, ...] = ()  # of a kernel: handle, grid, block, shared memory


@shows_fields
@dataclass(frozen=True)
class RecordedReport:
    """What a recording contains, and what it took."""

    nodes: Mapping[str, int]  # by kind: kernel, copy, fill, host, ...
    host_nodes: tuple[str, ...]
    nbytes: int  # memory of the intermediates, beyond that of earlier recordings of the backend
    seconds: float  # duration of the capture
    stages: tuple[StageRun, ...] = ()  # in capture order
    host_bytes: int = 0  # of the Python objects that replay it, estimated from their number; 0 on CUDA, where the driver has them
    graph_nodes: tuple[GraphNode, ...] = field(default=(), repr=False)  # on CUDA, in capture order


class Span(NamedTuple):
    """Time of a stage, a host node, a wait of one stream for another, or a launch."""

    stream: str
    name: str  # of a wait: the stage or host node that it waited for
    kind: Literal["stage", "host", "wait", "launch"]
    round: int  # or NO_ROUND
    start_ns: int
    end_ns: int


def stage_runs(nodes: Iterable[StageRun]) -> tuple[StageRun, ...]:
    """Join the runs of single nodes, in capture order."""
    runs = list[StageRun]()
    for run, group in itertools.groupby(nodes):
        same = list(group)
        runs += [replace(run, nodes=len(same))] if run.kind == "stage" else same
    return tuple(runs)


def nvtx_range() -> RangeFactory:
    """NVTX ranges; ValueError if this build of torch has none."""
    try:
        torch.cuda.nvtx.mark("stepgraph")
    except RuntimeError as error:
        raise ValueError(f"nvtx: got True, expected False: torch {torch.__version__} has no NVTX ({str(error).splitlines()[0]})") from None
    return functools.partial(torch.cuda.nvtx.range, "{}")  # a name must not be a format string
