"""The report on the recordings of an engine, and the memory budget that they are checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from stepgraph.graphs.errors import LESS, CaptureError
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.key_sets import PromptKey
from stepgraph.graphs.spans import RecordedReport

OnFailure = Literal["raise", "eager"]
Key = GraphKey | PromptKey


@dataclass(frozen=True)
class FailedKey:
    """A key that could not be recorded. Its batches or chunks use the next larger graph of the same kind, or run eagerly."""

    key: Key
    why: str
    served_by: Key | None

    def __str__(self) -> str:
        served = f"replayed as {self.served_by}" if self.served_by else "run eagerly"
        uses = "batches" if isinstance(self.key, GraphKey) else "chunks"
        return f"{self.key} is not captured, its {uses} are {served}: {self.why.splitlines()[0]}"


@dataclass(frozen=True)
class CaptureReport:
    """The recorded keys with their size and duration. `str()` is a table, `as_dict()` can be serialised to JSON."""

    backend: str
    mode: str  # "captured", or "eager" with EngineConfig.eager
    notes: tuple[str, ...]
    keys: tuple[tuple[GraphKey, RecordedReport], ...]
    prompts: tuple[tuple[PromptKey, RecordedReport], ...]
    buffer_bytes: int
    # By which the process grew while recording, its threads included; the static buffers were allocated before. None if unknown
    resident_bytes: int | None
    seconds: float
    failed: tuple[FailedKey, ...] = ()  # with on_capture_failure="eager"

    def as_dict(self) -> dict[str, object]:
        """Without the single nodes of the graphs."""
        keys, prompts = ([{"key": asdict(key), **asdict(report)} for key, report in pairs] for pairs in (self.keys, self.prompts))
        for row in (*keys, *prompts):
            del row["graph_nodes"]
        failed = [asdict(one) for one in self.failed]
        plain = {name: getattr(self, name) for name in ("backend", "mode", "notes", "buffer_bytes", "resident_bytes", "seconds")}
        return {**plain, "keys": keys, "prompts": prompts, "failed": failed}

    def __str__(self) -> str:
        lines = [f"{'key':<32}{'nodes':>7}{'host nodes':>12}{'KiB':>9}{'ms':>8}"]
        for key, report in (*self.keys, *self.prompts):
            total = sum(report.nodes.values())
            lines.append(f"{key!s:<32}{total:>7}{len(report.host_nodes):>12}{_bytes_of(report) / 1024:>9.0f}{report.seconds * 1000:>8.0f}")
        graphs = [report for _, report in (*self.keys, *self.prompts)]
        grown = "" if self.resident_bytes is None else f"; the process grew by {self.resident_bytes / 1024:.0f} KiB beside static buffers"
        lines.append(
            f"{len(graphs)} graphs {self.mode} on {self.backend} in {self.seconds:.2f} s, "
            f"{self.buffer_bytes / 1024:.0f} KiB of static buffers, {sum(map(_bytes_of, graphs)) / 1024:.0f} KiB of graphs{grown}"
        )
        return "\n".join([*lines, *map(str, self.failed), *self.notes])


def _bytes_of(report: RecordedReport) -> int:
    return report.nbytes + report.host_bytes


class CaptureBudget:
    """Checks `limit` bytes for static buffers and graphs together; None: no limit. Graphs share the memory of their intermediates."""

    def __init__(self, limit: int | None, buffer_bytes: int) -> None:
        self._limit, self._buffer_bytes = limit, buffer_bytes
        self._pool = self._host = self._host_each = 0
        self._fixed = self._per_row = 0.0
        self._measured: Mapping[Key, int] = {}

    @property
    def limited(self) -> bool:
        return self._limit is not None

    @property
    def _used(self) -> int:
        return self._buffer_bytes + self._pool + self._host

    def learn(self, probes: Sequence[tuple[int, int]], measured: Mapping[Key, int] | None = None, host_bytes: int = 0) -> None:
        """Take rows and bytes of one or two small graphs, from which the others are estimated: memory is linear in the rows.

        measured: bytes of graphs that need no estimate. host_bytes: what each graph needs besides, which it does not share.
        """
        self._measured, self._host_each = measured or {}, host_bytes
        (rows, nbytes), (more_rows, more_bytes) = probes[0], probes[-1]
        self._per_row = max(0, more_bytes - nbytes) / (more_rows - rows) if len(probes) > 1 else nbytes / rows
        self._fixed = max(0.0, nbytes - self._per_row * rows)

    def _expected(self, key: Key) -> float:
        return self._measured.get(key, self._fixed + self._per_row * key.rows)

    def estimate(self, keys: Sequence[Key]) -> int:
        """Bytes of static buffers and of these graphs."""
        return self._buffer_bytes + round(max(map(self._expected, keys))) + self._host_each * len(keys)

    def check_all(self, keys: Sequence[Key]) -> None:
        """CaptureError if the estimate for these graphs exceeds the limit."""
        estimate = self.estimate(keys)
        parts = f"{self._buffer_bytes:,} bytes of static buffers and about {estimate - self._buffer_bytes:,} of {len(keys)} graphs"
        self._check(estimate, f"need about {estimate:,}, {parts}")

    def check_next(self, key: Key) -> None:
        """CaptureError if the graph of `key` is expected to exceed the limit."""
        more = max(0, round(self._expected(key)) - self._pool) + self._host_each
        self._check(self._used + more, f"{key} would need about {more:,}, and {self._used:,} are used")

    def add(self, key: Key, nbytes: int, host_bytes: int = 0) -> None:
        """Count a recorded graph. CaptureError if it exceeds the limit; the caller then drops it."""
        self._check(self._used + nbytes + host_bytes, f"{key} needs {nbytes + host_bytes:,}, and {self._used:,} are used")
        self._pool += nbytes
        self._host += host_bytes

    def _check(self, needed: int, why: str) -> None:
        if self._limit is not None and needed > self._limit:
            raise CaptureError("memory", f"capture_bytes: got {self._limit:,}, {why}; lower {LESS}")
