"""N-gram look-up: proposes the tokens that followed an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.model import History, NoCache
from stepgraph.graphs.proposing import ANCHOR_TOKENS, look_up
from stepgraph.sampling.fields import check_value, whole


@dataclass(frozen=True)
class NgramLookup(NoCache):
    """Searches the history, and the request's `draft_ids`, for the last tokens of the history. Runs on the device.

    The longest match wins, of at most `max_ngram` and at least `min_ngram` tokens. Among matches of equal length, one in
    draft_ids precedes one in the history; in draft_ids the one closest to the number of generated tokens wins, in the
    history the latest. A copy that reaches the end of the history continues with its own tokens; one that reaches the end of
    draft_ids ends.
    """

    max_ngram: int = ANCHOR_TOKENS
    min_ngram: int = 1
    batch_invariant: ClassVar[bool] = True
    why: str = ""  # the reason for the choice of this drafter, for the capture report

    def __post_init__(self) -> None:
        for name, most in (("max_ngram", ANCHOR_TOKENS), ("min_ngram", self.max_ngram)):
            check_value(f"NgramLookup.{name}", getattr(self, name), whole(1, most))

    @property
    def notes(self) -> tuple[str, ...]:
        reason = f" ({self.why})" if self.why else ""
        return (f"draft: n-gram look-up, {self.min_ngram} to {self.max_ngram} tokens{reason}",)

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        return look_up(*history, self.max_ngram, self.min_ngram)
