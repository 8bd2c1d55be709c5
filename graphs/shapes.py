"""Sizes: the limits every static tensor is cut to, the key of a graph, and the total map from a batch to a key.

Knows numbers only; no tensors, no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """What the static memory is made for. Everything beyond is refused at submit, never truncated."""

    max_rows: int
    num_speculative_tokens: int
    max_length: int  # tokens of one row, prompt included
    page_size: int
    num_pages: int  # usable pages; the scratch page comes on top
    vocab_size: int  # width of the logits
    num_tokens: int  # ids from here to vocab_size are padding and never chosen
    feature_size: int  # width of what the target hands to the draft
    rounds_in_flight: int = 2
    max_stop_ids: int = 8
    max_bias_ids: int = 256  # entries of logit_bias and bad_token_ids together
    prefill_chunk: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("num_speculative_tokens", "feature_size") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Limits.{field.name}: got {value!r}, want a whole number >= {least}")
        if self.num_speculative_tokens > 8:
            raise ValueError(f"Limits.num_speculative_tokens: got {self.num_speculative_tokens}, want 0 to 8")
        if self.num_tokens > self.vocab_size:
            raise ValueError(f"Limits.num_tokens: got {self.num_tokens}, want at most vocab_size={self.vocab_size}")
        if self.num_pages < self.pages_per_row:
            raise ValueError(
                f"Limits.num_pages: got {self.num_pages}, want >= {self.pages_per_row} so that one row of max_length {self.max_length} fits"
            )

    @property
    def rows(self) -> int:
        """Rows of state: the requests' rows and, last, the dummy row that pads a batch."""
        return self.max_rows + 1

    @property
    def dummy_row(self) -> int:
        return self.max_rows

    @property
    def positions(self) -> int:
        """Positions that one row takes in target_verify: its last token and its drafts."""
        return self.num_speculative_tokens + 1

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_length // self.page_size)

    @property
    def cache_slots(self) -> int:
        """Cache entries of a model: page 0 is the scratch page, where inert positions write."""
        return (self.num_pages + 1) * self.page_size

    @property
    def prompt_window(self) -> int:
        """Prompt tokens shown at once: a chunk and the token behind it. The first chunk behind reused pages takes two at least."""
        return max(self.prefill_chunk, 2) + 1

    @property
    def mask_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def ring_depth(self) -> int:
        """Slots of a ring that every round uses once: one per round in flight and one being written."""
        return self.rounds_in_flight + 1

    @property
    def admission_ring_depth(self) -> int:
        """Slots of a ring that every row may use once between two rounds. With less, a burst of arrivals would wait for the device."""
        return self.max_rows * self.ring_depth


@dataclass(frozen=True, order=True)
class GraphKey:
    """Everything that makes one recorded round differ from another."""

    rows: int
    constrained: bool  # some row has a grammar
    sampled: bool = False  # some row needs more than a masked argmax: SamplingParams.plain

    def __str__(self) -> str:
        return f"rows={self.rows} {'constrained' if self.constrained else 'free'} {'sampled' if self.sampled else 'greedy'}"


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two below `max_rows`, and `max_rows` itself."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


def checked_buckets(buckets: Iterable[int], max_rows: int) -> tuple[int, ...]:
    """The buckets sorted; ValueError where a batch of 1..max_rows would have none."""
    sizes = tuple(buckets) if isinstance(buckets, Iterable) else ()
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    if not whole or max(sizes, default=0) != max_rows:
        raise ValueError(f"buckets: got {buckets!r}, want whole numbers from 1 of which the largest is max_rows={max_rows}")
    return tuple(sorted(set(sizes)))


def graph_keys(buckets: Iterable[int], greedy_only: bool = False) -> tuple[GraphKey, ...]:
    """Every key, largest first: the pool then serves the small graphs from the memory of the large ones."""
    kinds = [(constrained, sampled) for constrained in (True, False) for sampled in (True, False) if not (sampled and greedy_only)]
    return tuple(GraphKey(rows, *kind) for rows in sorted(buckets, reverse=True) for kind in kinds)


def dispatch(buckets: tuple[int, ...], batch_rows: int, constrained: bool, sampled: bool = False) -> GraphKey:
    """The key that serves a batch: total over 1..max_rows by construction of `checked_buckets`."""
    return GraphKey(min(size for size in buckets if size >= batch_rows), constrained, sampled)
