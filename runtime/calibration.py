"""Measures rounds of inert rows, from whose times the draft length of a round is chosen."""

from __future__ import annotations

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.round_specs import Counter
from stepgraph.runtime.draft_length import DraftLengthChooser

CALIBRATING_ROUNDS = 3  # the first replay of a graph takes longer, and one of the others may be interrupted


class Calibration:
    """Replays graphs between rounds, without requests, and gives their times to the chooser."""

    def __init__(self, backend: Backend, buffers: StaticBuffers, graphs: GraphSet, dummy_row: int, lengths: DraftLengthChooser) -> None:
        self._backend, self._buffers, self._graphs, self._dummy_row, self._lengths = backend, buffers, graphs, dummy_row, lengths

    def measure_all(self) -> None:
        """Unconstrained greedy rounds of every draft length, after the capture."""
        buckets, costs = self._graphs.buckets, self._lengths.costs
        fewest, most = buckets[0], buckets[-1]
        for drafting in self._lengths.choices:
            keys = {rows: self._graphs.key_for(rows, False, False, False, drafting) for rows in buckets}
            low = self._seconds(keys[fewest])
            high = low if most == fewest else self._seconds(keys[most])
            for rows, key in keys.items():  # those between are about linear in the rows
                costs.calibrate(key, low + (high - low) * (rows - fewest) / max(1, most - fewest))

    def measure(self, key: GraphKey) -> None:
        """Rounds of every draft length for batches like that of `key`, which is used for the first time: records their graphs."""
        if key.on_host:  # rounds of inert rows have no batch for the host nodes
            key = self._graphs.key_for(key.rows, False, False)
        for each in map(key.with_drafting, self._lengths.choices):
            self._lengths.costs.calibrate(each, self._seconds(each))

    def _seconds(self, key: GraphKey) -> float:
        """Of a round of inert rows."""
        graph, seconds, before = self._graphs[key], list[float](), dict(vars(self._backend.stats))
        published = self._buffers.round_counters[Counter.PUBLISHED :]
        for _ in range(CALIBRATING_ROUNDS):
            self._backend.event().wait()
            self._buffers.batch_rows_ring_host.fill_(self._dummy_row)  # no launched round has still to read its batch
            begin = self._lengths.clock()
            graph.replay()
            self._backend.event().wait()
            seconds.append(self._lengths.clock() - begin)
            self._backend.run(lambda: published.sub_(1))
        vars(self._backend.stats).update(before)  # these are no rounds
        return min(seconds)
