"""The file that the engine writes after a profiled range: rounds, graph keys, counters.

A profiler records graph nodes without names; the file has the stages and nodes in the order of the capture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tools.profiling.spans import Span

KIND = "stepgraph rounds"


class Run(NamedTuple):
    """Consecutive nodes of one stage in a recording; like the class in `graphs/spans.py`."""

    stream: str
    name: str
    kind: Literal["stage", "host"]
    nodes: int


@dataclass(frozen=True)
class Launch:
    round: int
    key: str
    launched_ns: int  # by the monotonic clock


@dataclass(frozen=True)
class Sidecar:
    launches: tuple[Launch, ...] = ()
    stages: Mapping[str, tuple[Run, ...]] = field(default_factory=dict)  # by key
    graph_nodes: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=dict)  # kind and launch shape, by key
    host_nodes: tuple[tuple[str, int, int, int], ...] = ()  # name, round, start and end by the monotonic clock
    counters: Mapping[str, Any] = field(default_factory=dict)
    backend: str = ""
    spans: tuple[Span, ...] = ()  # if the engine recorded the timeline itself
    notes: tuple[str, ...] = ()

    @property
    def without_host_nodes(self) -> bool:
        """Whether the recordings of these rounds are known and none has a host node: their grammars, if any, are on the device."""
        return bool(self.stages) and all(run.kind != "host" for runs in self.stages.values() for run in runs)

    @property
    def stream_of(self) -> dict[str, str]:
        """Stream of every stage and host node that occurs on one stream only."""
        streams: dict[str, set[str]] = {}
        for runs in self.stages.values():
            for run in runs:
                streams.setdefault(run.name, set()).add(run.stream)
        return {name: min(found) for name, found in streams.items() if len(found) == 1}


def read_sidecar(path: Path) -> Sidecar:
    """ValueError if the file is not one written by the engine."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["document"] != KIND:
            raise ValueError(f"a document {content['document']!r}")
        return Sidecar(
            launches=tuple(Launch(int(row["round"]), str(row["key"]), int(row["launched_ns"])) for row in content["rounds"]),
            stages={key: tuple(Run(*run) for run in runs) for key, runs in content["stages"].items()},
            graph_nodes={
                key: tuple((str(kind), tuple(map(int, launch))) for kind, launch in nodes)
                for key, nodes in content.get("graph_nodes", {}).items()
            },
            host_nodes=tuple((str(name), int(number), int(start), int(end)) for name, number, start, end in content["host_nodes"]),
            counters=dict(content["counters"]),
            backend=str(content["backend"]),
            spans=tuple(Span(*span) for span in content["spans"]),
            notes=tuple(content.get("notes", ())),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: got {type(error).__name__}: {error}, expected a file written with STEPGRAPH_PROFILE_ROUNDS") from None
