"""Files in the format of nsys exports, with known times."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PROCESS = 1 << 24
PID, THREAD = 7 * PROCESS, 7 * PROCESS + 1
KEY = "rows=1 constrained greedy"
FIRST, PERIOD = 20, 10_000
GRAPH = 9 << 32  # id of the executable graph; the captured one differs
CAPTURED = 4 << 32

TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "NVTX_EVENTS": """start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
        text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER""",
    "CUPTI_ACTIVITY_KIND_RUNTIME": """start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
        correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER""",
    "CUPTI_ACTIVITY_KIND_KERNEL": """start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
        streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,
        graphNodeId INTEGER""",
    "CUPTI_ACTIVITY_KIND_MEMCPY": """start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
        copyKind INTEGER NOT NULL, graphNodeId INTEGER""",
    "CUDA_GRAPH_NODE_EVENTS": """start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
        nameId INTEGER NOT NULL, graphNodeId INTEGER NOT NULL, originalGraphNodeId INTEGER""",
    "CUPTI_ACTIVITY_KIND_GRAPH_HOST_NODE_AND_HOST_LAUNCH": """start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
        graphNodeId INTEGER, graphId INTEGER""",
    "CUDA_HOST_CALLBACK": """start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
        correlationId INTEGER, nameId INTEGER""",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": """start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId INTEGER NOT NULL,
        graphExecId INTEGER NOT NULL""",
}
OLDER_TABLES = {  # of nsys 2023.4: no endGlobalTid, no graph columns except the node's
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, textId INTEGER",
}
# Activities of one round, relative to its start: stage, node, stream, start, end. Node 2 is the host node.
ROUND = [
    ("show verify", 1, 13, -20, 30),
    ("place verify", 3, 13, 720, 760),
    ("target_verify", 4, 7, 0, 1000),
    ("target_verify", 5, 7, 1010, 2000),
    ("accept", 6, 7, 2100, 2300),
    ("draft_prefill", 7, 7, 2300, 3300),
]
HOST = (100, 700)
LATE_ROUND = [
    ("show verify", 1, 13, -20, 30),
    ("place verify", 3, 13, 2420, 2460),
    ("target_verify", 4, 7, 0, 1000),
    ("target_verify", 5, 7, 1010, 2000),
    ("accept", 6, 7, 2500, 2700),
    ("draft_prefill", 7, 7, 2700, 3700),
]
LATE_HOST = (100, 2400)
RUNS = [
    ["side", "show verify", "stage", 1],
    ["side", "verify", "host", 1],
    ["side", "place verify", "stage", 1],
    ["main", "target_verify", "stage", 2],
    ["main", "accept", "stage", 1],
    ["main", "draft_prefill", "stage", 1],
]


class Export:
    """One file. A table exists once it has a row."""

    def __init__(self, path: Path, variants: dict[str, str] | None = None) -> None:
        self.path, self._columns = path, {**TABLES, **(variants or {})}
        self._db = sqlite3.connect(path)
        self._strings: dict[str, int] = {}

    def add(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        self._db.execute(f'CREATE TABLE IF NOT EXISTS "{table}" ({self._columns[table]})')
        known = [row[1] for row in self._db.execute(f'PRAGMA table_info("{table}")')]
        needed = [row[1] for row in self._db.execute(f'PRAGMA table_info("{table}")') if row[3]]
        for row in rows:
            full = {**dict.fromkeys(needed, 0), **{name: value for name, value in row.items() if name in known}}
            names = ", ".join(f'"{name}"' for name in full)
            self._db.execute(f'INSERT INTO "{table}" ({names}) VALUES ({", ".join("?" * len(full))})', list(full.values()))

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.add("StringIds", [{"id": self._strings[text], "value": text}])
        return self._strings[text]

    def ranges(self, rows: Sequence[tuple[int, int, str]], by_id: bool = True) -> None:
        texts = [{"textId": self.string(name)} if by_id else {"text": name} for _, _, name in rows]
        times = [{"start": start, "end": end, "eventType": 59, "globalTid": THREAD} for start, end, _ in rows]
        self.add("NVTX_EVENTS", [{**time, **name} for time, name in zip(times, texts, strict=True)])

    def close(self) -> Path:
        self._db.commit()
        self._db.close()
        return self.path


def captures(path: Path) -> Path:
    """The collection of `Engine.capture()`: seven nodes in the ranges of their stages, one outside, all cloned by the instantiation."""
    export = Export(path)
    names = ["show verify", "verify", "place verify", "target_verify", "target_verify", "accept", "draft_prefill"]
    created_ns = [100 * index for index in range(1, 8)]
    export.ranges([(at - 40, at + 40, name) for at, name in zip(created_ns, names, strict=True)])
    export.ranges([(1, 5000, "capture")])  # around all of them: the innermost open range counts
    created_ns.append(780)  # after the last range
    nodes = [{"start": at, "end": at, "globalTid": THREAD, "graphNodeId": CAPTURED + index} for index, at in enumerate(created_ns, 1)]
    clones = [
        {"start": 6000, "end": 6000, "globalTid": THREAD, "graphNodeId": GRAPH + index, "originalGraphNodeId": CAPTURED + index}
        for index in range(1, 9)
    ]
    export.add("CUDA_GRAPH_NODE_EVENTS", nodes + clones)
    return export.close()


def rounds(
    path: Path, *, host_table: str = "CUPTI_ACTIVITY_KIND_GRAPH_HOST_NODE_AND_HOST_LAUNCH", older: bool = False, graph_only: bool = False
) -> Path:
    """Rounds 20, 21 and 22, the second with a late host node; each followed by its result copy."""
    export = Export(path, OLDER_TABLES if older else None)
    for index, (work, host) in enumerate([(ROUND, HOST), (LATE_ROUND, LATE_HOST), (ROUND, HOST)]):
        number, base = FIRST + index, 1000 + PERIOD * index
        export.ranges([(base - 500, base - 400, f"round {number}: {KEY}")], by_id=not older)
        launch, copy = 2 * number, 2 * number + 1
        calls = [(base - 450, base - 420, launch), (base - 390, base - 380, copy)]
        export.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            [{"start": start, "end": end, "globalTid": THREAD, "correlationId": correlation} for start, end, correlation in calls],
        )
        if graph_only:
            whole = {"start": base, "end": base + 3300, "correlationId": launch, "globalPid": PID, "streamId": 7}
            export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", [whole])
        for stage, node, stream, start, end in () if graph_only else work:
            table = "CUPTI_ACTIVITY_KIND_MEMCPY" if stage == "show verify" else "CUPTI_ACTIVITY_KIND_KERNEL"
            row = {"start": base + start, "end": base + end, "streamId": stream, "correlationId": launch, "globalPid": PID}
            export.add(table, [{**row, "graphNodeId": GRAPH + node}])
        out = {"start": base + 3800, "end": base + 3840, "streamId": 7, "correlationId": copy, "globalPid": PID, "graphNodeId": 0}
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", [out])
        export.add("CUPTI_ACTIVITY_KIND_KERNEL", [])
        if host_table and not graph_only:
            row = {"start": base + host[0], "end": base + host[1], "correlationId": launch, "globalPid": PID, "globalTid": THREAD + 5}
            export.add(host_table, [{**row, "graphNodeId": GRAPH + 2, "streamId": 13}])
    return export.close()


def sidecar_document(**changes: Any) -> dict[str, Any]:
    """The engine's file of the same rounds, with a clock 5,000 ns slower than the profiler's."""
    hosts = [HOST, LATE_HOST, HOST]
    begins = [1000 + PERIOD * index for index in range(3)]
    return {
        "document": "stepgraph rounds",
        "version": 1,
        "backend": "cuda",
        "rounds": [{"round": FIRST + index, "key": KEY, "launched_ns": begin - 500 - 5000} for index, begin in enumerate(begins)],
        "stages": {KEY: RUNS},
        "graph_nodes": {KEY: [_node(number) for number in range(1, 8)]},
        "host_nodes": [
            ["verify", FIRST + index, begin + host[0] - 5000, begin + host[1] - 5000]
            for index, (begin, host) in enumerate(zip(begins, hosts, strict=True))
        ],
        "spans": [],
        "counters": {"row_rounds": 3, "tokens": 9, "accepted_drafts": 6},
        **changes,
    }


def _node(number: int) -> tuple[str, list[int]]:
    kinds = {1: "copy", 2: "host"}
    return (kinds[number], []) if number in kinds else ("kernel", [99, number, 1, 1, 32, 1, 1, 0])


def torch_trace() -> list[dict[str, Any]]:
    """A torch profiler trace of the same rounds: launches and unnamed work, in microseconds."""
    events: list[dict[str, Any]] = []
    for index, work in enumerate([ROUND, LATE_ROUND, ROUND]):
        base, launch = 1000 + PERIOD * index, 2 * (FIRST + index)
        called = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": (base - 500) / 1000, "dur": 0.03}
        events.append({**called, "args": {"correlation": launch}})
        for _, node, stream, start, end in work:
            event = {"ph": "X", "cat": "gpu_memcpy" if node == 1 else "kernel", "name": "k", "ts": (base + start) / 1000}
            shape = {} if node == 1 else {"grid": [node, 1, 1], "block": [32, 1, 1]}
            events.append({**event, "dur": (end - start) / 1000, "args": {"correlation": launch, "stream": stream, **shape}})
    return events
