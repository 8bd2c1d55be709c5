"""How much memory graphs may take: refused before they are recorded where they will not fit, and after where they did not.

Knows sizes; does not know what is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.graphs.capture import CaptureError
from stepgraph.graphs.shapes import GraphKey

LESS = "max_rows, buckets, num_speculative_tokens, max_length or num_pages; greedy_only=True halves the graphs"


class CaptureBudget:
    """`most` bytes for static buffers and graphs together; None: as many as there are. `pooled`: graphs live in each other's memory."""

    def __init__(self, most: int | None, buffer_bytes: int, pooled: bool) -> None:
        self._most, self._buffer_bytes, self._pooled = most, buffer_bytes, pooled
        self._taken = buffer_bytes
        self._fixed = self._per_row = 0.0

    @property
    def limited(self) -> bool:
        return self._most is not None

    def learn(self, probes: Sequence[tuple[int, int]]) -> None:
        """Rows and bytes of one small graph, or of two: memory grows with the rows, so that they tell the others."""
        (rows, nbytes), (more_rows, more_bytes) = probes[0], probes[-1]
        self._per_row = max(0, more_bytes - nbytes) / (more_rows - rows) if len(probes) > 1 else nbytes / rows
        self._fixed = max(0.0, nbytes - self._per_row * rows)

    def estimate(self, keys: Sequence[GraphKey]) -> int:
        """Bytes of static buffers and of these graphs."""
        graphs = [self._fixed + self._per_row * key.rows for key in keys]
        return self._buffer_bytes + round(max(graphs) if self._pooled else sum(graphs))

    def refuse(self, keys: Sequence[GraphKey]) -> None:
        """CaptureError where these graphs are too many."""
        wanted = self.estimate(keys)
        if self._most is not None and wanted > self._most:
            parts = f"{self._buffer_bytes:,} bytes of static buffers and about {wanted - self._buffer_bytes:,} of {len(keys)} graphs"
            raise self._refusal(f"want about {wanted:,}, {parts}")

    def expect(self, key: GraphKey) -> None:
        """CaptureError where one more graph would be one too many."""
        pooled = self._taken - self._buffer_bytes if self._pooled else 0
        more = max(0, round(self._fixed + self._per_row * key.rows) - pooled)
        if self._most is not None and self._taken + more > self._most:
            raise self._refusal(f"{key} would take about {more:,}, and {self._taken:,} are taken")

    def book(self, key: GraphKey, nbytes: int) -> None:
        """A graph was recorded. CaptureError where it took more than was left: whoever asks drops it then."""
        if self._most is not None and self._taken + nbytes > self._most:
            raise self._refusal(f"{key} takes {nbytes:,}, and {self._taken:,} are taken")
        self._taken += nbytes

    def _refusal(self, why: str) -> CaptureError:
        return CaptureError("memory", f"capture_bytes: got {self._most:,}, {why}; lower {LESS}")
