"""All recorded rounds of an engine: every key, one pool, one report, and a dispatch that always finds a key.

Knows keys and recordings; knows nothing of requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Recorded, RecordedReport, Step, run_eager
from stepgraph.graphs.shapes import GraphKey, checked_buckets, dispatch, graph_keys


@dataclass(frozen=True)
class CaptureReport:
    """What was recorded, and what it took. `str()` is a table, `as_dict()` is JSON-ready."""

    backend: str
    mode: str  # "captured", or "eager" where the user asked for no recording
    notes: tuple[str, ...]
    keys: tuple[tuple[GraphKey, RecordedReport], ...]
    buffer_bytes: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        keys = [{"key": asdict(key), **asdict(report)} for key, report in self.keys]
        return {**{name: getattr(self, name) for name in ("backend", "mode", "notes", "buffer_bytes", "seconds")}, "keys": keys}

    def __str__(self) -> str:
        lines = [f"{'key':<32}{'nodes':>7}{'host nodes':>12}{'KiB':>9}{'ms':>8}"]
        for key, report in self.keys:
            total = sum(report.nodes.values())
            lines.append(f"{key!s:<32}{total:>7}{len(report.host_nodes):>12}{report.nbytes / 1024:>9.0f}{report.seconds * 1000:>8.0f}")
        lines.append(
            f"{len(self.keys)} graphs {self.mode} on {self.backend} in {self.seconds:.2f} s, "
            f"{self.buffer_bytes / 1024:.0f} KiB of static buffers"
        )
        return "\n".join([*lines, *self.notes])


class GraphSet:
    """One recording per key of `buckets`. `step_of(key)` is the function to record."""

    def __init__(self, backend: Backend, buffers: StaticBuffers, step_of: Callable[[GraphKey], Step], buckets: Sequence[int]) -> None:
        self._backend, self._buffers, self._step_of = backend, buffers, step_of
        self.buckets = checked_buckets(buckets, max(buckets, default=0))
        self._recorded: dict[GraphKey, Recorded] = {}

    @property
    def captured(self) -> bool:
        return bool(self._recorded)

    def capture(self, notes: tuple[str, ...] = (), eager: bool = False, greedy_only: bool = False, progress: bool = False) -> CaptureReport:
        """Record every key, largest first, so that the small graphs live in the memory of the large ones."""
        if self._recorded:
            raise RuntimeError("GraphSet.capture(): already captured; make a new engine for other limits")
        started = time.perf_counter()
        recorded: dict[GraphKey, Recorded] = {}
        for key in tqdm(graph_keys(self.buckets, greedy_only), desc="capture", unit="graph", disable=not progress, leave=False):
            step = self._step_of(key)
            recorded[key] = EagerStep(self._backend, step, self._buffers) if eager else self._backend.capture(step, self._buffers)
        self._recorded = recorded
        return CaptureReport(
            backend=self._backend.name,
            mode="eager" if eager else "captured",
            notes=notes,
            keys=tuple((key, one.report) for key, one in recorded.items()),
            buffer_bytes=self._buffers.nbytes,
            seconds=time.perf_counter() - started,
        )

    def key_for(self, batch_rows: int, constrained: bool, sampled: bool) -> GraphKey:
        return dispatch(self.buckets, batch_rows, constrained, sampled)

    def __getitem__(self, key: GraphKey) -> Recorded:
        return self._recorded[key]


class EagerStep:
    """The explicit answer "no recording": replays by running the step."""

    report = RecordedReport(nodes={}, host_nodes=(), nbytes=0, seconds=0.0)

    def __init__(self, backend: Backend, step: Step, buffers: StaticBuffers) -> None:
        self._backend, self._step, self._buffers = backend, step, buffers

    def replay(self) -> None:
        self._backend.run(lambda: run_eager(self._step, self._buffers, self._backend.ranges))
