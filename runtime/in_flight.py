"""Rounds in flight: launched without waiting, read from a pinned ring once the device has written them."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from stepgraph.graphs.buffers import ResultLayout, ResultRecord, StaticBuffers
from stepgraph.graphs.capture import Backend, Event
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.shapes import GraphKey
from stepgraph.runtime.extras.hidden_states import HiddenStates
from stepgraph.runtime.request import ActiveRequest
from stepgraph.sampling.grammar.link.protocol import HostLink

Launch = tuple[int, bool, bool]  # rows, whether some are constrained, whether some are sampled


class LaunchedRound(NamedTuple):
    """A launched round whose results have not been read."""

    event: Event
    slot: int  # of the results ring
    requests: tuple[ActiveRequest, ...]  # by batch index
    key: GraphKey
    logprobs: bool  # whether log-probabilities were copied as well


class InFlight:
    """Launches one replay per round, and reads the results ring."""

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        graphs: GraphSet,
        host: HostLink,
        limits: Limits,
        states: HiddenStates | None = None,
    ) -> None:
        self._backend, self._buffers, self._graphs, self._host = backend, buffers, graphs, host
        self._states = states
        self._ring_depth, self._dummy_row = limits.ring_depth, limits.dummy_row
        self._layout = ResultLayout(limits.num_speculative_tokens)
        self._pending: collections.deque[LaunchedRound] = collections.deque()
        self.rounds = 0
        self.launches: dict[Launch, int] = {}  # number of rounds; single operations only, as other threads read it

    def __len__(self) -> int:
        return len(self._pending)

    def describe(self) -> str:
        """The rounds in flight and their graphs, for the time-out report."""
        first = self.rounds - len(self._pending)
        return ", ".join(f"round {first + index} ({launched.key})" for index, launched in enumerate(self._pending))

    def capturing(self) -> AbstractContextManager[None]:
        """Entered around the capture of the graphs."""
        return contextlib.nullcontext()

    def _replay(self, key: GraphKey) -> None:
        if self._backend.ranges is None:
            self._graphs[key].replay()
        else:
            with self._backend.ranges(f"round {self.rounds - 1}: {key}"):
                self._graphs[key].replay()

    def launch(self, requests: tuple[ActiveRequest, ...]) -> None:
        """Launch one round: batch in, replay, results out. Does not wait."""
        slot = self.rounds % self._ring_depth
        self.rounds += 1
        constrained, sampled = any(request.matcher for request in requests), any(request.sampled for request in requests)
        key, launch = self._graphs.key_for(len(requests), constrained, sampled), (len(requests), constrained, sampled)
        self.launches[launch] = self.launches.get(launch, 0) + 1
        batch_host, results_host = self._buffers.batch_rows_ring_host[slot], self._buffers.results_ring_host[slot]
        batch_np = batch_host.numpy()
        batch_np[:] = self._dummy_row
        batch_np[: len(requests)] = [request.row for request in requests]
        if key.constrained:
            self._host.push_batch([request.matcher for request in requests])
        self._backend.run(lambda: self._buffers.batch_rows.copy_(batch_host, non_blocking=True))
        self._replay(key)
        self._backend.run(lambda: results_host.copy_(self._buffers.results, non_blocking=True))
        logprobs = any(request.job.sampling.logprobs for request in requests)
        if logprobs:
            logprobs_host = self._buffers.logprobs_ring_host[slot]
            self._backend.run(lambda: logprobs_host.copy_(self._buffers.results_logprobs, non_blocking=True))
        if self._states:
            self._states.launched(slot, len(requests))
        self._pending.append(LaunchedRound(self._backend.event(), slot, requests, key, logprobs))

    def collect(self) -> Iterator[tuple[ActiveRequest, ResultRecord]]:
        """Wait for the oldest round, and read the results of its unfinished requests."""
        launched = self._pending[0]
        launched.event.wait()
        self._pending.popleft()
        self._host.release_finished()
        results = self._buffers.results_ring_host[launched.slot].tolist()
        all_pairs = self._buffers.logprobs_ring_host[launched.slot].tolist() if launched.logprobs else [[]] * len(results)
        for index, (request, line, pairs) in enumerate(zip(launched.requests, results, all_pairs, strict=False)):
            job = request.job
            if job.finished:  # it ended after this round was launched: the row was inert
                continue
            result = self._layout.read(line, pairs)
            if self._states:
                self._states.emitted(job, launched.slot, index, result.emitted)
            yield request, result

    def clear(self) -> None:
        """Drop the rounds in flight without reading them."""
        self._pending.clear()
