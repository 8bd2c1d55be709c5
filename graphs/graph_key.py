"""Graph keys, and the choice of a key for a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LONGEST = -1  # as a draft length: num_speculative_tokens


class Drafting(NamedTuple):
    """How a round drafts."""

    length: int = LONGEST  # drafts that it verifies and makes
    model: bool = True  # False: the draft model does not run, and all drafts are looked up or forced by a grammar

    def __str__(self) -> str:
        return f"{self.length}" if self.model else f"{self.length} without model"


FULL, PLAIN = Drafting(), Drafting(0)


@dataclass(frozen=True, order=True)
class GraphKey:
    """Identifies a recorded round."""

    rows: int
    constrained: bool  # some row has a constraint
    sampled: bool = False  # some row needs more than a masked argmax: SamplingParams.plain
    device: bool = False  # every constraint is a grammar on the device: no host node
    draft_length: int = LONGEST  # and `draft_model`: see Drafting
    draft_model: bool = True

    def __str__(self) -> str:
        grammar = "device" if self.device else "constrained" if self.constrained else "free"
        drafts = "" if self.drafting == FULL else f" drafts={self.drafting}"
        return f"rows={self.rows} {grammar} {'sampled' if self.sampled else 'greedy'}{drafts}"

    @property
    def drafting(self) -> Drafting:
        return Drafting(self.draft_length, self.draft_model)

    @property
    def on_host(self) -> bool:
        """Whether host nodes follow grammars."""
        return self.constrained and not self.device

    @property
    def kind(self) -> tuple[bool, bool, bool, Drafting]:
        """All but the number of rows."""
        return self.constrained, self.sampled, self.device, self.drafting


def dispatch(
    buckets: tuple[int, ...],
    batch_rows: int,
    constrained: bool,
    sampled: bool = False,
    device: bool = False,
    drafting: Drafting = FULL,
) -> GraphKey:
    """The smallest key that holds a batch; `checked_buckets` guarantees one for 1..max_rows."""
    return GraphKey(min(size for size in buckets if size >= batch_rows), constrained, sampled, device, *drafting)
