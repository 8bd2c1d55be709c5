"""Launches of many rounds: the device runs rounds until an event ends the launch, and publishes the results of each to a ring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.graphs.row_layout import ResultRecord
from stepgraph.runtime.in_flight import InFlight, LaunchedRound
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.request_queue import RequestQueue

Poll = Callable[[Callable[[], bool]], None]


class Loops(InFlight):
    """Only the last launch may still start new rounds. A launch of a graph with host nodes is one round.

    In this class `rounds` and `launches` count rounds that were read.
    """

    def __init__(self, queue: RequestQueue, poll: Poll, max_rounds: int, *parts: Any) -> None:
        super().__init__(*parts)
        self._queue, self._poll = queue, poll
        self._loop: dict[str, Any] = {"until": self._buffers.loop_done, "limit": max_rounds}
        self._loopable: frozenset[GraphKey] = frozenset()
        self._launched = 0
        self._control = self._buffers.loop_control_host.numpy()
        self._headers = self._buffers.results_header_ring_host.numpy()

    def calibrate(self) -> None:
        """Launch each loop once, with inert rows: the first launch builds it."""
        self._loopable = self._graphs.without_host_nodes
        for key in self._loopable:
            self._graphs[key].replay(**self._loop)
        self._backend.run(self._buffers.round_counters.zero_)
        self._backend.synchronize()
        self._headers[:] = 0

    def launch(self, requests: tuple[ActiveRequest, ...]) -> None:
        """Launch rounds of these requests, unless an earlier launch continues with them."""
        self._control[Control.WAITING] = bool(self._queue.waiting)
        if self._looping:
            return
        self._launched += 1
        launch, key = self._dispatch(requests)
        self._send_batch(self._launched % self._ring_depth, requests, key)
        number = self._buffers.round_counters[: Counter.PUBLISHED]
        self._backend.run(lambda: number.add_(1))
        loops = key in self._loopable
        self._replay(key, **self._loop if loops else {})
        logprobs = any(request.job.sampling.logprobs for request in requests)
        event = self._backend.event()
        self.pending.append(LaunchedRound(event, self._launched, requests, key, logprobs, time.perf_counter(), launch, loops))

    def interrupt(self, *, next_too: bool = False) -> None:
        self._control[Control.STOP_BEFORE] = self._launched + 1 + next_too

    def read(self, most: int) -> Iterator[tuple[ActiveRequest, ResultRecord]]:
        """Wait for a round of the running loop, or until fewer than `most` launches are in flight, and read the published rounds."""
        looping = self._looping
        if looping:
            most = max(most, 2)
            yield from self.collect()
        while len(self.pending) >= most:
            yield from self.collect()

    def collect(self) -> Iterator[tuple[ActiveRequest, ResultRecord]]:
        """Wait for a published round or the end of the oldest launch, and read what is published."""
        oldest = self.pending[0]
        self._poll(lambda: self._published or oldest.event.query())
        ended = oldest.event.query()  # if so, all its rounds are read below
        for _ in self._headers:  # bounded, since the device may publish rounds faster than this loop reads them
            if not self._published:
                break
            slot = self.rounds % len(self._headers)
            while self.pending[0].number < self._headers[slot, Counter.LAUNCH]:
                self._end_oldest()
            launched = self.pending[0]
            self.rounds += 1
            self.launches[launched.launch] = self.launches.get(launched.launch, 0) + 1
            for _, request, result in self._results(launched, slot):
                yield request, result
            self._control[Control.READ] = self.rounds
        if ended and self.pending[0] is oldest:
            self._end_oldest()

    def clear(self) -> None:
        self.interrupt()
        super().clear()

    def _end_oldest(self) -> None:
        launched = self.pending.popleft()
        launched.event.wait()
        if launched.key.on_host:
            self._host.release_finished()

    @property
    def _looping(self) -> bool:
        """Whether the last launch is a loop that nothing interrupted."""
        last = self.pending[-1] if self.pending else None
        return last is not None and last.loops and last.number >= self._control[Control.STOP_BEFORE]

    @property
    def _published(self) -> bool:
        """Whether the next round can be read."""
        published: bool = self._headers[self.rounds % len(self._headers), Counter.PUBLISHED] == self.rounds + 1
        return published
