"""The keys of the graphs that an engine records, and the batch sizes that they serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepgraph.graphs.graph_key import FULL, LONGEST, PLAIN, Drafting, GraphKey
from stepgraph.graphs.limits import Limits
from stepgraph.sampling.fields import clip_repr, is_int, is_series

LEAST_CHUNK = 32  # tokens; the weights are read for any number


def prompt_keys(limits: Limits) -> tuple[PromptKey, ...]:
    """Largest first: a whole chunk, and quarters of that for the ends of prompts. Below LEAST_CHUNK a shorter one is no faster."""
    keys = [PromptKey(limits.prompt_window - 1)]
    while keys[-1].tokens // 4 >= LEAST_CHUNK:
        keys.append(PromptKey(keys[-1].tokens // 4))
    return tuple(keys)


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two below `max_rows`, and `max_rows`."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


def checked_buckets(buckets: Iterable[int], max_rows: int | None = None) -> tuple[int, ...]:
    """The buckets sorted; ValueError if there are none, or if a batch of 1..max_rows would have none."""
    sizes = tuple(buckets) if is_series(buckets) else ()
    whole = sizes and all(is_int(size) and size >= 1 for size in sizes)
    if not whole or max(sizes) != (max_rows or max(sizes)):
        largest = "" if max_rows is None else f" of which the largest is max_rows={max_rows}"
        raise ValueError(f"buckets: got {clip_repr(buckets)}, expected integers >= 1{largest}")
    return tuple(sorted(set(sizes)))


def host_buckets(buckets: Iterable[int]) -> tuple[int, ...]:
    """Every other bucket, the largest included: the sizes with graphs for grammars on the host where grammars may be on the device.

    Few batches need these graphs, and each also has the kernels for grammars on the device.
    """
    return tuple(sorted(buckets)[::-2][::-1])


def draft_choices(longest: int, model: bool, look_up: bool) -> tuple[Drafting, ...]:
    """The choices of an engine, by length. Each has its graphs. look_up: there is one beside the draft model.

    Without a model there are two: a proposed chain takes about as long whatever its length.
    """
    lengths = sorted({0, (longest // 2 if model else 0) or longest, longest})
    return (*map(Drafting, lengths), *([Drafting(longest, model=False)] if look_up else []))


def host_drafting(drafting: Sequence[Drafting]) -> tuple[Drafting, ...]:
    """None and the most drafts: what graphs for grammars on the host have where grammars may be on the device. See `host_buckets`."""
    most = min(drafting, key=_longest_first)
    return tuple(each for each in drafting if each in (PLAIN, most))


def _longest_first(drafting: Drafting) -> tuple[bool, int, bool]:
    return drafting.length != LONGEST, -drafting.length, not drafting.model


def graph_keys(
    buckets: Iterable[int], greedy_only: bool = False, device: bool = False, drafting: Sequence[Drafting] = (FULL,)
) -> tuple[GraphKey, ...]:
    """Every key, largest first: the memory pool then places the small graphs in the memory of the large ones.

    device: grammars may be on the device. The constrained graphs then serve batches that also have grammars on the host.
    """
    sizes = sorted(buckets, reverse=True)
    on_host = (host_buckets(sizes), host_drafting(drafting)) if device else (sizes, drafting)
    # constrained, on the device, rows and drafts
    lanes = ((True, True, sizes if device else (), drafting), (True, False, *on_host), (False, False, sizes, drafting))
    modes = (False,) if greedy_only else (True, False)
    return tuple(
        GraphKey(rows, constrained, sampled, lane, *each)
        for rows in sizes
        for each in sorted(drafting, key=_longest_first)
        for constrained, lane, served, drafts in lanes
        if rows in served and each in drafts
        for sampled in modes
    )


@dataclass(frozen=True, order=True)
class PromptKey:
    """Identifies a recorded prompt chunk."""

    tokens: int  # for at most so many

    def __str__(self) -> str:
        return f"prompt tokens={self.tokens}"

    @property
    def rows(self) -> int:
        """Of its matrix products."""
        return self.tokens

    @property
    def kind(self) -> str:
        return "prompt"
