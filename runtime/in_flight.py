"""Rounds in flight: launched without waiting, read from a pinned ring once the device has written them."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Event
from stepgraph.graphs.context import NULL_CONTEXT
from stepgraph.graphs.graph_key import FULL, Drafting, GraphKey
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.round_specs import MAX_SKIPPED
from stepgraph.graphs.row_layout import ResultLayout, ResultRecord
from stepgraph.runtime.calibration import Calibration
from stepgraph.runtime.draft_length import DraftLengthChooser, Results
from stepgraph.runtime.hidden_states import HiddenStates
from stepgraph.runtime.request import ActiveRequest
from stepgraph.sampling.grammar.link.protocol import HostLink
from stepgraph.sampling.kernels.processors import read_top_logprobs

_layout = functools.cache(ResultLayout)


class BatchKind(NamedTuple):
    """The arguments of GraphSet.key_for, but for the drafting."""

    rows: int
    constrained: bool
    sampled: bool
    device: bool


class DecodeBatch(NamedTuple):
    """What consecutive rounds of the same requests have in common."""

    requests: tuple[ActiveRequest, ...]  # by batch index
    kind: BatchKind
    reads_logprobs: bool  # whether some request reads log-probabilities


class LaunchedRound(NamedTuple):
    """A launch of one round, or with `is_loop` of many, whose results have not all been read."""

    event: Event
    number: int  # of the launch; its slot in the rings of launches is number % ring_depth
    batch: DecodeBatch
    key: GraphKey
    launched_at: float  # infinity after other work, which the device may still process
    drafting: Drafting
    is_loop: bool = False
    caught_up: bool = False  # whether the draft model first processed skipped tokens


class InFlight:
    """Launches one replay per round, and reads the results ring. The ring slot of a round is its number modulo the ring depth."""

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        graphs: GraphSet,
        host_link: HostLink,
        limits: Limits,
        hidden_states: HiddenStates | None = None,
        chooser: DraftLengthChooser | None = None,
        catch_up: Callable[[int], None] | None = None,
    ) -> None:
        self._backend, self._buffers, self._graphs, self._host_link = backend, buffers, graphs, host_link
        self._hidden_states, self._chooser, self._catch_up = hidden_states, chooser, catch_up
        self._calibration = Calibration(backend, buffers, graphs, limits.dummy_row, chooser, catch_up) if chooser else None
        self._device_idle_at = 0.0  # when the device ended the latest collected round; infinity if unknown
        self._other_work = False  # launched since the latest round: the time of the next round includes it
        self._ring_depth, self._dummy_row = limits.ring_depth, limits.dummy_row
        self._batch_ring = buffers.batch_rows_ring_host.numpy()
        self._results_ring, self._logprobs_ring = buffers.results_ring_host.numpy(), buffers.logprobs_ring_host.numpy()
        self._num_drafts = limits.num_speculative_tokens
        # Fields that no round writes: their columns hold values of rounds with more drafts.
        self._unwritten = tuple(name for name in ("forced", "looked_up", "relaxed") if f"row_{name}" not in buffers)
        self.pending: collections.deque[LaunchedRound] = collections.deque()
        self.latest_batch: DecodeBatch | None = None  # the next round may have the same
        self.rounds = 0
        self.rounds_by_kind = collections.Counter[tuple[BatchKind, Drafting]]()  # single operations only, as other threads read it

    def capturing(self) -> AbstractContextManager[None]:
        """The context in which the graphs are captured."""
        return NULL_CONTEXT

    def _replay(self, key: GraphKey, **loop: Any) -> None:
        with self._backend.ranges(f"round {self.rounds - 1}: {key}") if self._backend.ranges else NULL_CONTEXT:
            self._graphs[key].replay(**loop)

    def calibrate(self) -> None:
        """After the capture: launch what must be launched once, and measure rounds."""
        if self._calibration:
            self._calibration.measure_all()

    def launch(self, requests: tuple[ActiveRequest, ...]) -> None:
        """Launch one round: write its batch to the ring, and replay. Does not wait."""
        number, slot, batch = self.rounds, self.rounds % self._ring_depth, self._batch_of(requests)
        self.rounds += 1
        drafting, key = self._choose_graph(batch)
        self.rounds_by_kind[batch.kind, drafting] += 1
        self._send_batch(slot, batch, key)
        caught_up_at = 0.0
        if self._chooser and (catch_up := self._catch_up) and self._chooser.count_skipped(drafting):
            caught_up_at = self._now()
            self._backend.run(lambda: catch_up(key.rows))
        self._replay(key)
        if self._hidden_states:
            self._hidden_states.round_launched(slot, len(requests))
        launched_at = math.inf if self._other_work else caught_up_at or self._now()
        self._other_work = False
        event = self._backend.event()
        self.pending.append(LaunchedRound(event, number, batch, key, launched_at, drafting, caught_up=bool(caught_up_at)))

    def _batch_of(self, requests: tuple[ActiveRequest, ...]) -> DecodeBatch:
        if self.latest_batch is None or self.latest_batch.requests != requests:
            constrained, sampled = any(request.constrained for request in requests), any(request.sampled for request in requests)
            kind = BatchKind(len(requests), constrained, sampled, constrained and not any(request.matcher for request in requests))
            self.latest_batch = DecodeBatch(requests, kind, any(request.job.sampling.logprobs for request in requests))
        return self.latest_batch

    def _choose_graph(self, batch: DecodeBatch) -> tuple[Drafting, GraphKey]:
        chooser, key = self._chooser, self._graphs.key_for(*batch.kind)
        if chooser is None:
            return FULL, key
        if self._graphs.records_on_demand and self._calibration and not chooser.costs.is_measured(key):
            self._calibration.measure(key)
        drafting = chooser.choose(batch.requests, key)
        return drafting, self._graphs.key_for(*batch.kind, drafting)

    def _send_batch(self, slot: int, batch: DecodeBatch, key: GraphKey) -> None:
        line, size = self._batch_ring[slot], len(batch.requests)
        line[:size], line[size:] = [request.row for request in batch.requests], self._dummy_row
        if key.on_host:
            self._host_link.push_batch([request.matcher for request in batch.requests])

    def read(self, limit: int) -> Iterator[Results]:
        """Read the oldest rounds, one after the other, until fewer than `limit` are in flight."""
        while len(self.pending) >= limit:
            yield from self.collect()

    def interrupt(self) -> None:
        """End running launches after a round, before other work is launched. Here a launch is one round."""
        self._other_work = True

    def limit_next_launch(self) -> None:
        """End running launches and the next one after a round, since other work follows. Here a launch is one round."""

    def collect(self) -> Iterator[Results]:
        """Wait for the oldest round, and read the results of its unfinished requests."""
        launched = self.pending[0]
        seconds = self._wait(launched)
        self.pending.popleft()
        if launched.key.on_host:
            self._host_link.release_finished()
        slot, drafting = launched.number % self._ring_depth, launched.drafting
        results = self._results(launched, slot)
        for request, result in results if self._hidden_states or self._catch_up else ():
            if self._hidden_states:
                self._hidden_states.tokens_emitted(request.job, slot, launched.batch.requests.index(request), result.emitted)
            is_modelled = drafting.length and drafting.model
            request.num_skipped = 0 if is_modelled or not self._catch_up else min(request.num_skipped + result.emitted, MAX_SKIPPED)
        yield results
        if self._chooser:
            self._chooser.round_ended(drafting, results, seconds, launched.caught_up)

    def _results(self, launched: LaunchedRound, slot: int) -> Results:
        """The results of the unfinished requests of the launch. slot: of the result rings."""
        b, batch, layout = self._buffers, launched.batch, _layout(launched.key.num_drafts(self._num_drafts))
        lines = self._results_ring[slot, : len(batch.requests)]
        lines[:, [layout.columns[name].start for name in self._unwritten]] = 0
        all_pairs = self._logprobs_ring[slot].tolist() if batch.reads_logprobs else itertools.repeat([])
        results: list[tuple[ActiveRequest, ResultRecord]] = []
        for index, (request, line, pairs) in enumerate(zip(batch.requests, lines.tolist(), all_pairs, strict=False)):
            if not request.job.finished:  # if it ended after this round was launched, the row was inert
                if top_n := request.job.sampling.top_logprobs:
                    found = read_top_logprobs(b.top_ids_ring_host[slot, index], b.top_logprobs_ring_host[slot, index], top_n)
                    pairs = [[*pair, *tops] for pair, tops in zip(pairs, found, strict=True)]
                results.append((request, layout.read(line, pairs)))
        return results

    def _wait(self, launched: LaunchedRound) -> float | None:
        """Wait for the round. Returns its duration; None if the device ended it before this call, or began it after other work."""
        was_done = self._chooser is not None and launched.event.query()
        launched.event.wait()
        started = max(launched.launched_at, self._device_idle_at)
        self._device_idle_at = math.inf if was_done else self._now()
        return None if was_done or math.isinf(started) else self._device_idle_at - started

    def _now(self) -> float:
        return 0.0 if self._chooser is None else self._chooser.clock()

    def clear(self) -> None:
        """Drop the rounds in flight without reading them."""
        self.pending.clear()
        self.latest_batch = None
