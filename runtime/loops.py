"""Launches of many rounds: the device runs rounds until an event ends the launch, and publishes the results of each to a ring."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.runtime.draft_length import Results
from stepgraph.runtime.in_flight import InFlight, LaunchedRound
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.request_queue import RequestQueue

Poll = Callable[[Callable[[], bool]], None]


class LoopInFlight(InFlight):
    """Only the last launch may still start new rounds. A launch of a graph with host nodes is one round.

    In this class `rounds` and `rounds_by_kind` count rounds that were read.
    """

    def __init__(self, queue: RequestQueue, poll: Poll, max_rounds: int, *parts: Any) -> None:
        super().__init__(*parts)
        self._queue, self._poll = queue, poll
        self._loop_arguments: dict[str, Any] = {"until": self._buffers.loop_done, "limit": max_rounds}
        self._loopable: frozenset[GraphKey] = frozenset()
        self._num_launches = 0
        self._control = self._buffers.loop_control_host.numpy()
        self._header_ring = self._buffers.results_header_ring_host.numpy()

    def calibrate(self) -> None:
        """Launch each loop once, with inert rows: the first launch builds it."""
        self._loopable = self._graphs.without_host_nodes
        for key in self._loopable:
            self._graphs[key].replay(**self._loop_arguments)
        self._backend.run(self._buffers.round_counters.zero_)
        self._backend.synchronize()
        self._header_ring[:] = 0

    def launch(self, requests: tuple[ActiveRequest, ...]) -> None:
        """Launch rounds of these requests, unless an earlier launch continues with them."""
        self._control[Control.WAITING] = bool(self._queue.waiting)
        if self._is_looping:
            return
        self._num_launches += 1
        batch = self._batch_of(requests)
        self._control[Control.READ] = self._num_read()
        drafting, key = self._choose_graph(batch)
        self._send_batch(self._num_launches % self._ring_depth, batch, key)
        number = self._buffers.round_counters[: Counter.PUBLISHED]
        self._backend.run(lambda: number.add_(1))
        loops = key in self._loopable
        self._replay(key, **self._loop_arguments if loops else {})
        event = self._backend.event()
        self.pending.append(LaunchedRound(event, self._num_launches, batch, key, time.perf_counter(), drafting, loops))

    def interrupt(self) -> None:
        self._control[Control.STOP_BEFORE] = self._num_launches + 1

    def limit_next_launch(self) -> None:
        self._control[Control.STOP_BEFORE] = self._num_launches + 2

    def read(self, limit: int) -> Iterator[Results]:
        """Wait for a round of the running loop, or until fewer than `limit` launches are in flight, and read the published rounds."""
        if self._is_looping:
            limit = max(limit, 2)
            yield from self.collect()
        yield from super().read(limit)

    def collect(self) -> Iterator[Results]:
        """Wait for a published round or the end of the oldest launch, and read what is published."""
        oldest = self.pending[0]
        self._poll(lambda: self._has_published or oldest.event.query())
        ended = oldest.event.query()  # if so, all its rounds are read below
        for _ in self._header_ring:  # bounded, since the device may publish rounds faster than this loop reads them
            if not self._has_published:
                break
            slot = self.rounds % len(self._header_ring)
            while self.pending[0].number < self._header_ring[slot, Counter.LAUNCH]:
                self._end_oldest()
            launched = self.pending[0]
            self.rounds += 1
            self.rounds_by_kind[launched.batch.kind, launched.drafting] += 1
            yield self._results(launched, slot)
            self._control[Control.READ] = self._num_read()
        if ended and self.pending[0] is oldest:
            self._end_oldest()

    def _num_read(self) -> int:
        """The rounds that the host has read; fewer if rows have pages for fewer rounds than the ring has slots: it is full earlier then."""
        requests, slots = self.latest_batch.requests if self.latest_batch else (), len(self._header_ring) - self._ring_depth
        left = (each.most_tokens - len(each.job.tokens) for each in requests if not each.job.finished)  # until a row needs another page
        tokens = min(left, default=sys.maxsize)
        return self.rounds + min(0, 1 + tokens // (self._num_drafts + 1) - slots)

    def clear(self) -> None:
        self.interrupt()
        super().clear()

    def _end_oldest(self) -> None:
        launched = self.pending.popleft()
        launched.event.wait()
        if launched.key.on_host:
            self._host_link.release_finished()

    @property
    def _is_looping(self) -> bool:
        """Whether the last launch is a loop that nothing interrupted."""
        last = self.pending[-1] if self.pending else None
        return last is not None and last.is_loop and last.number >= self._control[Control.STOP_BEFORE]

    @property
    def _has_published(self) -> bool:
        """Whether the next round can be read."""
        published: bool = self._header_ring[self.rounds % len(self._header_ring), Counter.PUBLISHED] == self.rounds + 1
        return published
