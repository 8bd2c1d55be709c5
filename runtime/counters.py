"""Counters of an engine. The stepping thread changes them under the lock of the queue; `take_stats` copies them."""

from __future__ import annotations

import bisect
import collections
import enum
from collections.abc import Sequence

from stepgraph.graphs.row_layout import REFUSED, ResultRecord
from stepgraph.runtime.request import NO_DRAFTS, FinishReason
from stepgraph.sampling.grammar.status import MaskStatus

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Loss(str, enum.Enum):
    """Why a round accepted fewer drafts than the request asks for: the first cause in the chain."""

    ILLEGAL = "illegal"  # the grammar forbids the next draft; found when it was proposed or when it was verified
    IMPROBABLE = "improbable"  # the target chose or sampled another token
    ENDED = "ended"  # the text ended at an accepted draft, or at the position of the next one
    UNDRAFTED = "undrafted"  # no drafter proposed a token for the next position


def loss_of(requested: int, result: ResultRecord) -> Loss | None:
    """The cause for one row of a round that `requested` so many drafts; None if all of them were accepted."""
    accepted = result.accepted
    if accepted >= requested:
        return None
    if result.emitted == accepted:
        return Loss.ENDED
    if accepted < result.draft_count:
        return Loss.IMPROBABLE if MaskStatus.OK <= result.statuses[accepted + 1] < MaskStatus.ILLEGAL else Loss.ILLEGAL
    return Loss.ILLEGAL if result.drafts[accepted] == REFUSED else Loss.UNDRAFTED


class HistogramBuilder:
    """Counts values up to each bound, inclusive, and larger ones."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds, self.counts, self.total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class Counters:
    def __init__(self, num_drafts: int) -> None:
        self.tokens = self.prompt_tokens = self.drafting_tokens = 0
        self.drafts = NO_DRAFTS
        self.finished = collections.Counter[FinishReason]()
        self.queue_seconds, self.first_token_seconds = HistogramBuilder(), HistogramBuilder()
        self.offered, self.accepted = [0] * (num_drafts + 1), [0] * (num_drafts + 1)  # drafting rounds by number of drafts
        self.losses: dict[Loss | None, int] = dict.fromkeys((None, *Loss), 0)

    def add_drafting_round(self, result: ResultRecord, loss: Loss | None) -> None:
        """A round of a row for which drafts could be made."""
        self.offered[result.draft_count] += 1
        self.accepted[result.accepted] += 1
        self.drafting_tokens += result.emitted
        self.losses[loss] += 1
