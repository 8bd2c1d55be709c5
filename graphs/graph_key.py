"""Graph keys, the recorded graph of each, and the choice of the one that serves a batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from stepgraph.graphs.capture import Recorded

FULL_LENGTH = -1  # the draft length num_speculative_tokens


class Drafting(NamedTuple):
    length: int = FULL_LENGTH  # drafts that the round verifies and makes
    model: bool = True  # False: the draft model does not run, and all drafts are looked up or forced by a grammar

    def __str__(self) -> str:
        return f"{self.length}" if self.model else f"{self.length} without model"


FULL, PLAIN = Drafting(), Drafting(0)


@dataclass(frozen=True, order=True)
class GraphKey:
    """Selects the graph of a round: the size and kind of its batch, and its drafts."""

    rows: int
    constrained: bool  # some row has a constraint
    sampled: bool = False  # some row needs more than a masked argmax: SamplingParams.plain
    device: bool = False  # every constraint is a grammar on the device: no host node
    draft_length: int = FULL_LENGTH  # with `draft_model`: see Drafting
    draft_model: bool = True

    def __str__(self) -> str:
        grammar = "device" if self.device else "constrained" if self.constrained else "free"
        drafts = "" if self.drafting == FULL else f" drafts={self.drafting}"
        return f"rows={self.rows} {grammar} {'sampled' if self.sampled else 'greedy'}{drafts}"

    def num_drafts(self, most: int) -> int:
        """Drafts of each row; most: num_speculative_tokens."""
        return most if self.draft_length == FULL_LENGTH else self.draft_length

    @property
    def drafting(self) -> Drafting:
        return Drafting(self.draft_length, self.draft_model)

    def with_drafting(self, drafting: Drafting) -> GraphKey:
        return replace(self, draft_length=drafting.length, draft_model=drafting.model)

    @property
    def on_host(self) -> bool:
        """Whether host nodes follow grammars."""
        return self.constrained and not self.device

    @property
    def kind(self) -> tuple[bool, bool, bool, Drafting]:
        """All but the number of rows."""
        return self.constrained, self.sampled, self.device, self.drafting


class GraphTable:
    """The recorded graph of each key, and the key for each batch.

    host_buckets: the sizes of batches whose grammars are followed by host nodes. record: a method that records a key on demand.
    """

    def __init__(self, buckets: tuple[int, ...], host_buckets: tuple[int, ...], record: Callable[..., Recorded]) -> None:
        self.buckets, self._host_buckets, self._record = buckets, host_buckets, record
        self.records_on_demand = False  # record each key when it is used for the first time
        self._recorded: dict[Any, Recorded] = {}  # by key
        self._replacements: dict[Hashable, Hashable] = {}  # failed key -> the key used instead
        self._keys: dict[tuple[int, bool, bool, bool, Drafting], GraphKey] = {}  # by arguments of `key_for`

    @property
    def captured(self) -> bool:
        return self.records_on_demand or bool(self._recorded)

    @property
    def complete(self) -> bool:
        """Whether every key is recorded."""
        return bool(self._recorded) and not self.records_on_demand

    def key_for(self, batch_rows: int, constrained: bool, sampled: bool, device: bool = False, drafting: Drafting = FULL) -> GraphKey:
        """The smallest key that holds a batch, or the key that replaces it."""
        batch = batch_rows, constrained, sampled, device, drafting
        if batch not in self._keys:
            assert 1 <= batch_rows <= self.buckets[-1], f"{batch_rows} rows, graphs of up to {self.buckets[-1]}"
            sizes = self._host_buckets if constrained and not device else self.buckets
            key = GraphKey(min(size for size in sizes if size >= batch_rows), constrained, sampled, device, *drafting)
            self._keys[batch] = cast("GraphKey", self._replacements.get(key, key))
        return self._keys[batch]

    def __getitem__(self, key: Hashable) -> Recorded:
        if self.records_on_demand and key not in self._recorded:
            self._recorded[key] = self._record(self, key)
        return self._recorded[key]
