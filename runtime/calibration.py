"""Measures rounds of inert rows, from whose times the draft length of a round is chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

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
        costs, key_for = self._chooser.costs, self._graphs.key_for
        if self._catch_up:
            costs.catch_up_seconds.update(self._by_rows(self._catch_up_seconds))
        for drafting in self._chooser.choices:
            for rows, seconds in self._by_rows(lambda rows: self._time_round(key_for(rows, False, False, False, drafting))):  # noqa: B023
                costs.calibrate(key_for(rows, False, False, False, drafting), seconds)

    def _by_rows(self, seconds_of: Callable[[int], float]) -> Iterator[tuple[int, float]]:
        """Rows and seconds of every bucket: measured for the fewest and the most rows, interpolated linearly between them."""
        fewest, *_, most = (*self._graphs.buckets, self._graphs.buckets[-1])
        low = seconds_of(fewest)
        high = low if most == fewest else seconds_of(most)
        for rows in self._graphs.buckets:
            yield rows, low + (high - low) * (rows - fewest) / max(1, most - fewest)

    def measure(self, key: GraphKey) -> None:
        """Measure rounds of every draft length for batches like that of `key`, before its first use. Records their graphs."""
        if key.on_host:  # rounds of inert rows have no batch for the host nodes
            key = self._graphs.key_for(key.rows, False, False)
        if self._catch_up and key.rows not in self._chooser.costs.catch_up_seconds:
            self._chooser.costs.catch_up_seconds[key.rows] = self._catch_up_seconds(key.rows)
        for each in map(key.with_drafting, self._chooser.choices):
            self._chooser.costs.calibrate(each, self._time_round(each))

    def _catch_up_seconds(self, rows: int) -> float:
        assert self._catch_up is not None
        catch_up, plain = functools.partial(self._catch_up, rows), self._graphs.key_for(rows, False, False, False, PLAIN)
        return self._min_seconds(lambda: self._backend.run(catch_up), lambda: self._replay(plain))  # which replaces the contents of caches

    def _time_round(self, key: GraphKey) -> float:
        """The time of a round of inert rows."""
        return self._min_seconds(lambda: self._replay(key))

    def _replay(self, key: GraphKey) -> None:
        self._graphs[key].replay(is_round=False)
        self._backend.run(lambda: self._buffers.round_counters[Counter.PUBLISHED :].sub_(1))

    def _min_seconds(self, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        seconds, counts = list[float](), dict(vars(self._backend.stats))
        for _ in range(REPLAYS_PER_MEASUREMENT):
            self._backend.event().wait()
            self._buffers.batch_rows_ring_host.fill_(self._dummy_row)  # every launched round has read its batch
            prepare()
            self._backend.event().wait()
            begin = self._chooser.clock()
            work()
            self._backend.event().wait()
            seconds.append(self._chooser.clock() - begin)
        vars(self._backend.stats).update(counts)  # statistics do not count these rounds
        return min(seconds)
