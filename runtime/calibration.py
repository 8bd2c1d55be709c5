"""Measures rounds of inert rows, from whose times the draft length of a round is chosen."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.graph_key import PLAIN, GraphKey
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.round_specs import Counter
from stepgraph.runtime.draft_length import DraftLengthChooser

REPLAYS_PER_MEASUREMENT = 3  # the first replay of a graph takes longer, and one of the others may be interrupted


class Calibration:
    """Replays graphs between rounds, without requests, and gives their times to the chooser."""

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        graphs: GraphSet,
        dummy_row: int,
        chooser: DraftLengthChooser,
        catch_up: Callable[[int], None] | None = None,
    ) -> None:
        self._backend, self._buffers, self._graphs, self._dummy_row, self._chooser = backend, buffers, graphs, dummy_row, chooser
        self._catch_up = catch_up

    def measure_all(self) -> None:
        """Measure unconstrained greedy rounds of every draft length, after the capture."""
        costs, key_for, buckets = self._chooser.costs, self._graphs.key_for, self._graphs.buckets
        measured = sorted({buckets[0], buckets[-1]})
        if self._catch_up:  # of every bucket, also since it runs eagerly: the first products of a shape load a kernel
            costs.catch_up_seconds.update({rows: self._catch_up_seconds(rows) for rows in buckets})
        keys = [[key_for(rows, False, False, False, drafting) for rows in measured] for drafting in self._chooser.choices]
        seconds = iter(self._round_seconds([key for of_drafting in keys for key in of_drafting]))
        for drafting in self._chooser.choices:
            for rows, cost in self._by_rows(list(itertools.islice(seconds, len(measured)))):
                costs.calibrate(GraphKey(rows, False).with_drafting(drafting), cost)  # key_for may give another one

    def _by_rows(self, seconds: Sequence[float]) -> Iterator[tuple[int, float]]:
        """Rows and seconds of every bucket: linear between those of the fewest and of the most rows."""
        fewest, most = self._graphs.buckets[0], self._graphs.buckets[-1]
        for rows in self._graphs.buckets:
            yield rows, seconds[0] + (seconds[-1] - seconds[0]) * (rows - fewest) / max(1, most - fewest)

    def measure(self, key: GraphKey) -> None:
        """Measure rounds of every draft length for batches like that of `key`, before its first use. Records their graphs."""
        if key.on_host:  # rounds of inert rows have no batch for the host nodes
            key = self._graphs.key_for(key.rows, False, False)
        if self._catch_up and key.rows not in self._chooser.costs.catch_up_seconds:
            self._chooser.costs.catch_up_seconds[key.rows] = self._catch_up_seconds(key.rows)
        keys = [key.with_drafting(drafting) for drafting in self._chooser.choices]
        for each, seconds in zip(keys, self._round_seconds(keys), strict=True):
            self._chooser.costs.calibrate(each, seconds)

    def _catch_up_seconds(self, rows: int) -> float:
        assert self._catch_up is not None
        catch_up, plain = functools.partial(self._catch_up, rows), self._graphs.key_for(rows, False, False, False, PLAIN)
        prepare = functools.partial(self._replay, plain)  # which replaces the contents of caches
        return self._min_seconds([lambda: self._backend.run(catch_up)], prepare)[0]

    def _round_seconds(self, keys: Sequence[GraphKey]) -> list[float]:
        return self._min_seconds([functools.partial(self._replay, key) for key in keys])

    def _replay(self, key: GraphKey) -> None:
        self._graphs[key].replay(is_round=False)
        self._backend.run(lambda: self._buffers.round_counters[Counter.PUBLISHED :].sub_(1))

    def _min_seconds(self, works: Sequence[Callable[[], object]], prepare: Callable[[], object] = lambda: None) -> list[float]:
        """By turns, since a machine that is busy for a while would otherwise make one choice seem slower than the others."""
        seconds, counts = [math.inf] * len(works), dict(vars(self._backend.stats))
        for _ in range(REPLAYS_PER_MEASUREMENT):
            for index, work in enumerate(works):
                self._backend.event().wait()
                self._buffers.batch_rows_ring_host.fill_(self._dummy_row)  # every launched round has read its batch
                prepare()
                self._backend.event().wait()
                begin = self._chooser.clock()
                work()
                self._backend.event().wait()
                seconds[index] = min(seconds[index], self._chooser.clock() - begin)
        vars(self._backend.stats).update(counts)  # statistics do not count these rounds
        return seconds
