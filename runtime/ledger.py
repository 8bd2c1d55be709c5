"""The ledger: what jobs did, counted as it becomes known. Knows numbers only; whoever owns it holds a lock around it."""

from __future__ import annotations

import bisect
import collections
import itertools
import threading
from collections.abc import Sequence

from stepgraph.graphs.shapes import GraphKey
from stepgraph.runtime.request import FinishReason
from stepgraph.runtime.stats import DraftStats, GraphStats, Histogram, Loss

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Tally:
    """A histogram in the making."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


class Ledger:
    """Rounds of rows, tokens, ends and waits."""

    def __init__(self, num_drafts: int) -> None:
        self.tokens = self.prompt_tokens = self.accepted_drafts = 0
        self.forced_drafts = self.accepted_forced_drafts = 0
        self.submitted = self.most_waiting = 0
        self.finished = collections.Counter[FinishReason]()
        self.queue_seconds, self.first_token_seconds = Tally(), Tally()
        self._drafting_tokens = 0
        self._chains = ([0] * (num_drafts + 1), [0] * (num_drafts + 1))  # by how many drafts they offered, and how many of these held
        self._lost = collections.Counter[Loss | None]()

    def emitted(self, tokens: int, accepted: int) -> None:
        self.tokens += tokens
        self.accepted_drafts += accepted

    def drafted(self, tokens: int, offered: int, accepted: int, lost: Loss | None) -> None:
        """A round of a row for which drafts could be made."""
        by_offered, by_accepted = self._chains
        by_offered[offered] += 1
        by_accepted[accepted] += 1
        self._drafting_tokens += tokens
        self._lost[lost] += 1

    @property
    def drafting(self) -> DraftStats:
        offered, accepted = (_reached(chains) for chains in self._chains)
        losses = {loss.value: self._lost[loss] for loss in Loss}
        rounds = sum(self._lost.values())
        return DraftStats(rounds=rounds, tokens=self._drafting_tokens, full=self._lost[None], offered=offered, accepted=accepted, **losses)


class Launches:
    """Which graph served how many rounds, and how full it was. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[GraphKey, list[int]] = {}

    def note(self, key: GraphKey, rows: int) -> None:
        with self._lock:
            noted = self._by_key.setdefault(key, [0, 0, 0])
            noted[0] += 1
            noted[1] += rows < key.rows
            noted[2] += key.rows - rows

    @property
    def graphs(self) -> tuple[GraphStats, ...]:
        """Largest first."""
        with self._lock:
            return tuple(GraphStats(key, *noted) for key, noted in sorted(self._by_key.items(), reverse=True))


def _reached(chains: Sequence[int]) -> tuple[int, ...]:
    """How many chains have at least 1, 2, ... drafts, by how many have exactly 0, 1, ..."""
    behind = itertools.accumulate(reversed(chains[1:]))
    return tuple(behind)[::-1]
