"""The ledger: what jobs did, counted as it becomes known. Knows numbers only; whoever owns it holds a lock around it."""

from __future__ import annotations

import bisect
import collections
import itertools
import threading
from collections.abc import Sequence

from stepgraph.graphs.shapes import GraphKey
from stepgraph.runtime.request import DraftCounts, FinishReason
from stepgraph.runtime.stats import DraftStats, GraphStats, Histogram, Loss

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class HistogramBuilder:
    """A histogram in the making."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


class Counters:
    """Rounds of rows, tokens, ends and waits."""

    def __init__(self, num_drafts: int) -> None:
        self.tokens = self.prompt_tokens = 0
        self.drafts = DraftCounts()
        self.submitted = self.most_waiting = 0
        self.finished = collections.Counter[FinishReason]()
        self.queue_seconds, self.first_token_seconds = HistogramBuilder(), HistogramBuilder()
        self._drafting_tokens = 0
        self._offered, self._accepted = [0] * (num_drafts + 1), [0] * (num_drafts + 1)  # chains by how many drafts they had, and held
        self._lost: dict[Loss | None, int] = dict.fromkeys((None, *Loss), 0)

    def drafted(self, tokens: int, offered: int, accepted: int, lost: Loss | None) -> None:
        """A round of a row for which drafts could be made."""
        self._offered[offered] += 1
        self._accepted[accepted] += 1
        self._drafting_tokens += tokens
        self._lost[lost] += 1

    @property
    def drafting(self) -> DraftStats:
        offered, accepted = _reached(self._offered), _reached(self._accepted)
        losses = {loss.value: self._lost[loss] for loss in Loss}
        rounds = sum(self._lost.values())
        return DraftStats(rounds=rounds, tokens=self._drafting_tokens, full=self._lost[None], offered=offered, accepted=accepted, **losses)


class Launches:
    """Which graph served how many rounds, and how full it was. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: dict[tuple[int, bool, bool], int] = {}  # by their own rows; looked up without the key's hash, which is Python
        self._keys: dict[tuple[int, bool, bool], GraphKey] = {}

    def note(self, key: GraphKey, rows: int) -> None:
        launched = rows, key.constrained, key.sampled
        with self._lock:
            if launched in self._rounds:
                self._rounds[launched] += 1
            else:
                self._rounds[launched], self._keys[launched] = 1, key

    @property
    def graphs(self) -> tuple[GraphStats, ...]:
        """Largest first."""
        with self._lock:
            noted = [(self._keys[launched], launched[0], rounds) for launched, rounds in self._rounds.items()]
        by_key: dict[GraphKey, list[int]] = {}
        for key, rows, rounds in noted:
            sums = by_key.setdefault(key, [0, 0, 0])
            sums[0] += rounds
            sums[1] += rounds if rows < key.rows else 0
            sums[2] += rounds * (key.rows - rows)
        return tuple(GraphStats(key, *sums) for key, sums in sorted(by_key.items(), reverse=True))


def _reached(chains: Sequence[int]) -> tuple[int, ...]:
    """How many chains have at least 1, 2, ... drafts, by how many have exactly 0, 1, ..."""
    behind = itertools.accumulate(reversed(chains[1:]))
    return tuple(behind)[::-1]
