"""Limits that determine the shapes of static tensors, graph keys, and the choice of a key for a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Sizes of the static memory. submit() refuses a request that exceeds them; nothing is truncated."""

    max_rows: int
    num_speculative_tokens: int
    max_length: int  # tokens of one row, prompt included
    page_size: int
    num_pages: int  # usable pages, without the scratch page
    vocab_size: int  # width of the logits
    num_tokens: int  # ids from here to vocab_size are padding and never generated
    feature_size: int  # width of the features that the target passes to the draft
    rounds_in_flight: int = 2
    max_stop_ids: int = 8
    max_bias_ids: int = 256  # entries of logit_bias and bad_token_ids together
    prefill_chunk: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("num_speculative_tokens", "feature_size") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Limits.{field.name}: got {value!r}, expected a whole number >= {least}")
        if self.num_speculative_tokens > 8:
            raise ValueError(f"Limits.num_speculative_tokens: got {self.num_speculative_tokens}, expected 0 to 8")
        if self.num_tokens > self.vocab_size:
            raise ValueError(f"Limits.num_tokens: got {self.num_tokens}, expected at most vocab_size={self.vocab_size}")
        if self.num_pages < self.pages_per_row:
            raise ValueError(
                f"Limits.num_pages: got {self.num_pages}, expected >= {self.pages_per_row} for one row of max_length={self.max_length}"
            )

    @property
    def rows(self) -> int:
        """Rows of state: one per request, and the dummy row that pads batches."""
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
        """Cache entries of a model. Page 0 is the scratch page, for inert positions."""
        return (self.num_pages + 1) * self.page_size

    @property
    def prompt_window(self) -> int:
        """Prompt tokens on the device at once: a chunk and the next token. The first chunk after a shared prefix has at least two."""
        return max(self.prefill_chunk, 2) + 1

    @property
    def mask_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def ring_depth(self) -> int:
        """Slots of a ring that each round uses once: one per round in flight, and one that is being written."""
        return self.rounds_in_flight + 1

    @property
    def admission_ring_depth(self) -> int:
        """Slots of a ring that each row may use once between two rounds. With fewer, a burst of arrivals would wait for the device."""
        return self.max_rows * self.ring_depth


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
