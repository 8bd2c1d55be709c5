"""Graph keys, and the choice of a key for a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class GraphKey:
    """Identifies a recorded round."""

    rows: int
    constrained: bool  # some row has a constraint
    sampled: bool = False  # some row needs more than a masked argmax: SamplingParams.plain

    def __str__(self) -> str:
        return f"rows={self.rows} {'constrained' if self.constrained else 'free'} {'sampled' if self.sampled else 'greedy'}"


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two below `max_rows`, and `max_rows`."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


def checked_buckets(buckets: Iterable[int], max_rows: int) -> tuple[int, ...]:
    """The buckets sorted; ValueError if a batch of 1..max_rows would have none."""
    sizes = tuple(buckets) if isinstance(buckets, Iterable) else ()
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    if not whole or max(sizes, default=0) != max_rows:
        raise ValueError(f"buckets: got {buckets!r}, expected integers >= 1 of which the largest is max_rows={max_rows}")
    return tuple(sorted(set(sizes)))


def graph_keys(buckets: Iterable[int], greedy_only: bool = False) -> tuple[GraphKey, ...]:
    """Every key, largest first: the memory pool then places the small graphs in the memory of the large ones."""
    kinds = [(constrained, sampled) for constrained in (True, False) for sampled in (True, False) if not (sampled and greedy_only)]
    return tuple(GraphKey(rows, *kind) for rows in sorted(buckets, reverse=True) for kind in kinds)


def dispatch(buckets: tuple[int, ...], batch_rows: int, constrained: bool, sampled: bool = False) -> GraphKey:
    """The smallest key that holds a batch; `checked_buckets` guarantees one for 1..max_rows."""
    return GraphKey(min(size for size in buckets if size >= batch_rows), constrained, sampled)
