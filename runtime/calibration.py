"""Measures rounds of inert rows, from whose times the draft length of a round is chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.graph_key import PLAIN, GraphKey
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.round_specs import Counter
from stepgraph.runtime.draft_length import DraftLengthChooser

REPLAYS_PER_MEASUREMENT = 3  # the first replay of a graph takes longer, and one of the others may be interrupted


@dataclass(frozen=True)
class Calibration:
    """Replays graphs between rounds, without requests, and gives their times to the chooser."""

    backend: Backend
    buffers: StaticBuffers
    graphs: GraphSet
    dummy_row: int
    chooser: DraftLengthChooser
    catch_up: Callable[[int], None] | None

    def measure_all(self) -> None:
        """Measure unconstrained greedy rounds of every bucket and draft length, after the capture."""
        for rows in self.graphs.buckets:  # also since the catch-up runs eagerly: the first products of a shape load a kernel
            self.measure(GraphKey(rows, False))

    def measure(self, key: GraphKey) -> None:
        """Measure rounds of every draft length for batches like that of `key`, before its first use. Records graphs on demand."""
        if key.on_host:  # rounds of inert rows have no batch for the host nodes
            key = self.graphs.key_for(key.rows, False, False)
        costs, choices = self.chooser.costs, self.chooser.choices
        if self.catch_up and key.rows not in costs.catch_up_seconds:
            costs.catch_up_seconds[key.rows] = self._catch_up_seconds(key.rows)
        graphs = [self.graphs.key_for(key.rows, key.constrained, key.sampled, key.device, drafting) for drafting in choices]
        for drafting, seconds in zip(choices, self._min_seconds([functools.partial(self._replay, graph) for graph in graphs]), strict=True):
            costs.calibrate(key.with_drafting(drafting), seconds)

    def _catch_up_seconds(self, rows: int) -> float:
        assert self.catch_up is not None
        catch_up, plain = functools.partial(self.catch_up, rows), self.graphs.key_for(rows, False, False, False, PLAIN)
        prepare = functools.partial(self._replay, plain)  # which replaces the contents of caches
        return self._min_seconds([lambda: self.backend.run(catch_up)], prepare)[0]

    def _replay(self, key: GraphKey) -> None:
        self.graphs[key].replay(is_round=False)
        self.backend.run(lambda: self.buffers.round_counters[Counter.PUBLISHED :].sub_(1))

    def _min_seconds(self, works: Sequence[Callable[[], object]], prepare: Callable[[], object] = lambda: None) -> list[float]:
        """By turns, since a machine that is busy for a while would otherwise make one choice seem slower than the others."""
        seconds = [math.inf] * len(works)
        for _ in range(REPLAYS_PER_MEASUREMENT):
            for index, work in enumerate(works):
                self.backend.event().wait()
                self.buffers.batch_rows_ring_host.fill_(self.dummy_row)  # every launched round has read its batch
                prepare()
                self.backend.event().wait()
                begin = self.chooser.clock()
                work()
                self.backend.event().wait()
                seconds[index] = min(seconds[index], self.chooser.clock() - begin)
        return seconds
