"""Rounds on their way: launched without waiting, read from a pinned ring once the device has written it."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from stepgraph.graphs.buffers import ResultLayout, StaticBuffers
from stepgraph.graphs.capture import Backend, Event
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.shapes import GraphKey, Limits
from stepgraph.runtime.extras.hidden_states import HiddenStates
from stepgraph.runtime.request import TokenLogprob
from stepgraph.runtime.slots import ActiveRequest
from stepgraph.runtime.stats import GraphCounters, Loss, loss_of
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.link.protocol import HostLink


class LaunchedRound(NamedTuple):
    """A launched round whose results have not been read."""

    event: Event
    slot: int  # of the results ring
    seats: tuple[ActiveRequest, ...]  # who sat in which batch slot when it was launched
    key: GraphKey
    logprobs: bool  # some seat wants them, and they are on their way too


class RowResult(NamedTuple):
    """What one round says of one seat."""

    seat: ActiveRequest
    tokens: list[int]
    accepted: int
    code: FinishCode
    logprobs: list[TokenLogprob]
    forced: int  # a bit per draft of the round: whether a grammar forced it
    looked_up: int  # a bit per draft: whether it was found in the text, if it was not forced
    offered: int  # drafts that the round judged
    lost: Loss | None  # why not every draft that the request wants held; None where they did


class InFlight:
    """The one replay per round, and the results ring behind it."""

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        graphs: GraphSet,
        host: HostLink,
        limits: Limits,
        states: HiddenStates | None = None,
    ) -> None:
        self._backend, self._buffers, self._graphs, self._host, self._limits = backend, buffers, graphs, host, limits
        self._states = states
        self._flights: collections.deque[LaunchedRound] = collections.deque()
        self._layout = ResultLayout(limits.num_speculative_tokens)
        self.rounds = 0
        self.launches = GraphCounters()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def told(self) -> str:
        """The rounds on their way and their graphs, in words."""
        first = self.rounds - len(self._flights)
        return ", ".join(f"round {first + place} ({flight.key})" for place, flight in enumerate(self._flights))

    def capturing(self) -> AbstractContextManager[None]:
        """Around the capture of the graphs, for who profiles them."""
        return contextlib.nullcontext()

    def _replay(self, key: GraphKey) -> None:
        if self._backend.ranges is None:
            self._graphs[key].replay()
        else:
            with self._backend.ranges(f"round {self.rounds - 1}: {key}"):
                self._graphs[key].replay()

    def launch(self, seats: tuple[ActiveRequest, ...]) -> None:
        """One round of these seats: batch in, replay, results out. Nothing here waits."""
        slot = self.rounds % self._limits.ring_depth
        self.rounds += 1
        constrained, sampled = any(seat.matcher for seat in seats), any(not seat.job.sampling.plain for seat in seats)
        key = self._graphs.key_for(len(seats), constrained, sampled)
        self.launches.add(key, len(seats))
        batch_host, results_host = self._buffers.batch_rows_ring_host[slot], self._buffers.results_ring_host[slot]
        batch_np = batch_host.numpy()
        batch_np[:] = self._limits.dummy_row
        batch_np[: len(seats)] = [seat.row for seat in seats]
        if key.constrained:
            self._host.push_batch([seat.matcher for seat in seats])
        self._backend.run(lambda: self._buffers.batch_rows.copy_(batch_host, non_blocking=True))
        self._replay(key)
        self._backend.run(lambda: results_host.copy_(self._buffers.results, non_blocking=True))
        logprobs = any(seat.job.sampling.logprobs for seat in seats)
        if logprobs:
            logprobs_host = self._buffers.logprobs_ring_host[slot]
            self._backend.run(lambda: logprobs_host.copy_(self._buffers.results_logprobs, non_blocking=True))
        if self._states:
            self._states.launched(slot, len(seats))
        self._flights.append(LaunchedRound(self._backend.event(), slot, seats, key, logprobs))

    def collect(self) -> Iterator[RowResult]:
        """Read the oldest round on its way: what it says of every seat whose end was not known when it was launched."""
        flight = self._flights[0]
        flight.event.wait()
        self._flights.popleft()
        self._host.release_finished()
        results = self._buffers.results_ring_host[flight.slot].tolist()
        all_pairs = self._buffers.logprobs_ring_host[flight.slot].tolist() if flight.logprobs else [[]] * len(results)
        for place, (seat, line, pairs) in enumerate(zip(flight.seats, results, all_pairs, strict=False)):
            if not seat.job.finished:  # else: launched before its end was known, and inert
                row = self._layout.read(line, pairs)
                if self._states:
                    self._states.emitted(seat.job, flight.slot, place, row.emitted)
                logprobs = [TokenLogprob(*pair) for pair in row.logprobs[: row.emitted]] if seat.job.sampling.logprobs else []
                lost = loss_of(seat.job.num_speculative_tokens, row.emitted, row.accepted, row.draft_count, row.statuses, row.drafts)
                yield RowResult(
                    seat,
                    row.tokens[: row.emitted],
                    row.accepted,
                    FinishCode(row.finish),
                    logprobs,
                    row.forced if flight.key.constrained else 0,
                    row.looked_up,
                    row.draft_count,
                    lost,
                )

    def forget(self) -> None:
        self._flights.clear()
