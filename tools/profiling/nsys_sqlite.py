"""Reads exports of `nsys export --type sqlite`, from nsys 2023.4 on. Errors name missing tables and columns.

Graph node ids are valid for the whole process: a first file may have the captures, a second one the rounds. Times are relative to
the start of each collection.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.profiling.activities import Activity, HostRun, clock_offset, host_spans, named_spans
from tools.profiling.sidecar import Sidecar
from tools.profiling.spans import NO_ROUND, Profile

KERNEL_TABLE, NVTX_TABLE, RUNTIME_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"
COPY_TABLES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
NODE_TABLE, GRAPH_TABLE = "CUDA_GRAPH_NODE_EVENTS", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
# Host nodes on the stream and on the host thread; recorded by nsys from late 2025 on, with CUDA 13.1.
HOST_NODE_TABLES = ("CUPTI_ACTIVITY_KIND_GRAPH_HOST_NODE_AND_HOST_LAUNCH", "CUDA_HOST_CALLBACK")
RECORDING_FLAGS = {
    KERNEL_TABLE: "--trace=cuda,nvtx, and a range in which rounds ran",
    NVTX_TABLE: "--trace=cuda,nvtx, and an engine with nvtx on (STEPGRAPH_NVTX=1)",
    RUNTIME_TABLE: "--trace=cuda,nvtx",
}
ROUND = re.compile(r"round (\d+)(?:: .*)?$")
IDS_PER_PROCESS = 1 << 24  # globalTid = process * this + thread; globalPid = process * this
Range = tuple[int, int, str]


class Call(NamedTuple):
    start_ns: int
    thread: int


class Export:
    """One exported file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            self._db.row_factory = sqlite3.Row
            self.tables = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
        except sqlite3.Error as error:
            raise ValueError(f"{path}: {error}; expected a file that `nsys export --type sqlite` wrote") from None

    def close(self) -> None:
        self._db.close()

    def rows(self, table: str, *columns: str, **defaults: Any) -> Iterator[dict[str, Any]]:
        """Rows with these columns; columns in `defaults` may be missing in some versions of nsys."""
        if table not in self.tables:
            raise ValueError(f"{self.path}: no table {table}; profile with {RECORDING_FLAGS.get(table, '--trace=cuda,nvtx')}")
        present = {row["name"] for row in self._db.execute(f'PRAGMA table_info("{table}")')}
        missing = [column for column in columns if column not in present]
        if missing:
            raise ValueError(f"{self.path}: table {table} has no column {', '.join(missing)}; expected an export of nsys 2023.4 or newer")
        chosen = [*columns, *(column for column in defaults if column in present)]
        for row in self._db.execute(f'SELECT {", ".join(f"{chr(34)}{column}{chr(34)}" for column in chosen)} FROM "{table}"'):
            yield {**defaults, **{column: row[column] for column in chosen if row[column] is not None or column not in defaults}}

    def ranges(self) -> dict[int, list[Range]]:
        """Closed NVTX ranges by thread, outermost first."""
        strings = {row["id"]: row["value"] for row in self.rows("StringIds", "id", "value")} if "StringIds" in self.tables else {}
        found: dict[int, list[Range]] = {}
        for row in self.rows(NVTX_TABLE, "start", "end", text=None, textId=None, globalTid=0):
            name = row["text"] if row["text"] is not None else strings.get(row["textId"])
            if row["end"] is not None and name:
                found.setdefault(row["globalTid"], []).append((row["start"], row["end"], name))
        return {thread: sorted(ranges, key=lambda one: (one[0], -one[1])) for thread, ranges in found.items()}

    def calls(self) -> dict[tuple[int, int], Call]:
        """CUDA calls by process and correlation."""
        rows = self.rows(RUNTIME_TABLE, "start", "correlationId", globalTid=0)
        return {(row["globalTid"] // IDS_PER_PROCESS, row["correlationId"]): Call(row["start"], row["globalTid"]) for row in rows}


def read_nsys(paths: Sequence[Path], sidecar: Sidecar) -> Profile:
    """The profile from the one file with rounds; other files have captures. ValueError names what is missing and the nsys flags to pass."""
    with contextlib.ExitStack() as stack:
        exports = [Export(path) for path in paths]
        for export in exports:
            stack.callback(export.close)
        stages: dict[int, str] = {}
        for export in exports:
            stages.update(stages_of_nodes(export))
        with_rounds = [(export, rounds) for export in exports if (rounds := _rounds(export))]
        if len(with_rounds) != 1:
            found = ", ".join(str(export.path) for export, _ in with_rounds) or "none"
            raise ValueError(f"expected one file with NVTX ranges 'round <n>', got {found}; {RECORDING_FLAGS[NVTX_TABLE]}")
        export, rounds = with_rounds[0]
        return _profile(export, rounds, stages, sidecar, tuple(path.name for path in paths))


def _profile(export: Export, rounds: Rounds, stages: Mapping[int, str], sidecar: Sidecar, sources: tuple[str, ...]) -> Profile:
    activities = _activities(export, rounds)
    hosts = _hosts(export, rounds, stages)
    named = named_spans(activities, stages, sidecar)
    spans = named.spans + host_spans(hosts, sidecar, clock_offset(rounds.start_ns, sidecar))
    ordered = tuple(sorted(spans, key=lambda span: span.start_ns))
    return Profile("nsys", ordered, sources, sidecar.counters, tuple(named.notes), sidecar.without_host_nodes)


class Rounds:
    """Round of each launch: the range that was open on the launching thread."""

    def __init__(self, ranges: Mapping[int, list[Range]], calls: Mapping[tuple[int, int], Call]) -> None:
        self._round_ranges = {
            thread: [(start, end, int(match[1])) for start, end, name in found if (match := ROUND.match(name))]
            for thread, found in ranges.items()
        }
        self._calls = calls
        self._by_correlation = {correlation: call for (_, correlation), call in calls.items()}
        self.start_ns = {number: start for found in self._round_ranges.values() for start, _, number in found}

    def __bool__(self) -> bool:
        return bool(self.start_ns)

    def round_of(self, process: int | None, correlation: int | None) -> int:
        """The round of an activity; NO_ROUND if no round launched it."""
        if correlation is None:
            return NO_ROUND
        call = self._by_correlation.get(correlation) if process is None else self._calls.get((process, correlation))
        if call is None:
            return NO_ROUND
        numbers = (number for start, end, number in self._round_ranges.get(call.thread, ()) if start <= call.start_ns <= end)
        return next(numbers, NO_ROUND)


def _rounds(export: Export) -> Rounds | None:
    if NVTX_TABLE not in export.tables:
        return None
    ranges = export.ranges()
    if not any(ROUND.match(name) for found in ranges.values() for _, _, name in found):
        return None
    return Rounds(ranges, export.calls())


def _activities(export: Export, rounds: Rounds) -> list[Activity]:
    found = []
    for table in (KERNEL_TABLE, *(table for table in COPY_TABLES if table in export.tables)):
        rows = export.rows(table, "start", "end", streamId=0, correlationId=None, globalPid=None, graphNodeId=None)
        for row in rows:
            process = None if row["globalPid"] is None else row["globalPid"] // IDS_PER_PROCESS
            number = rounds.round_of(process, row["correlationId"])
            found.append(Activity(row["start"], row["end"], row["streamId"], number, row["graphNodeId"] or None))
    if not any(activity.node is not None for activity in found):
        got = "graphs as a whole" if GRAPH_TABLE in export.tables else "no graph"
        raise ValueError(f"{export.path}: it shows {got}, expected nodes of graphs: profile captured rounds with --cuda-graph-trace=node")
    return found


def _hosts(export: Export, rounds: Rounds, stages: Mapping[int, str]) -> list[HostRun]:
    for table in HOST_NODE_TABLES:
        if table in export.tables:
            rows = export.rows(table, "start", "end", correlationId=None, globalPid=None, globalTid=None, graphNodeId=None)
            found = []
            for row in rows:
                owner = row["globalPid"] if row["globalPid"] is not None else row["globalTid"]
                number = rounds.round_of(None if owner is None else owner // IDS_PER_PROCESS, row["correlationId"])
                if number != NO_ROUND:
                    found.append(HostRun(row["start"], row["end"], number, stages.get(row["graphNodeId"] or 0, "")))
            if found:
                return found
    return []


def stages_of_nodes(export: Export) -> dict[int, str]:
    """The innermost NVTX range around the creation of every node and its clones."""
    if NODE_TABLE not in export.tables or NVTX_TABLE not in export.tables:
        return {}
    ranges = export.ranges()
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for row in export.rows(NODE_TABLE, "start", "graphNodeId", originalGraphNodeId=None, globalTid=0):
        if row["originalGraphNodeId"]:
            parents[row["graphNodeId"]] = row["originalGraphNodeId"]
        elif (name := _innermost(ranges.get(row["globalTid"], ()), row["start"])) is not None:
            names.setdefault(row["graphNodeId"], name)
    for node in parents:
        seen, ancestor = {node}, node
        while ancestor not in names and ancestor in parents and parents[ancestor] not in seen:
            ancestor = parents[ancestor]
            seen.add(ancestor)
        if ancestor in names:
            names[node] = names[ancestor]
    return names


def _innermost(ranges: Sequence[Range], at: int) -> str | None:
    """The innermost open range; ranges are sorted by start."""
    for index in range(bisect.bisect_right(ranges, at, key=lambda one: one[0]) - 1, -1, -1):
        if ranges[index][1] >= at and not ROUND.match(ranges[index][2]):
            return ranges[index][2]
    return None
