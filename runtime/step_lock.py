"""What a thread of its own needs in order to step an engine: nobody else who does, and sleep while there is nothing to do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from stepgraph.graphs.graph_set import GraphSet
from stepgraph.runtime.in_flight import InFlight
from stepgraph.runtime.request import Job
from stepgraph.runtime.scheduler import Scheduler
from stepgraph.runtime.wake import WakeSignal


class StepLock:
    """To step, capture or close an engine: one thread's at a time. From within, say in a draft function or in a signal's handler, it is
    refused: that would wait for itself."""

    def __init__(self) -> None:
        self._lock, self._taken = threading.RLock(), False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._taken:
            self._lock.release()
            raise RuntimeError("Engine: got a step(), capture() or close() from within one of them, want it behind")
        self._taken = True

    def __exit__(self, *_: object) -> None:
        self._taken = False
        self._lock.release()


class StepGate:
    """Who may step an engine, and when a step has something to do."""

    def __init__(self, bell: WakeSignal, desk: Scheduler, flights: InFlight, graphs: GraphSet, max_queued: int) -> None:
        self._bell, self._desk, self._flights, self._graphs, self._max_queued = bell, desk, flights, graphs, max_queued
        self._owner: int | None = None
        self._lock = threading.Lock()

    @property
    def captured(self) -> bool:
        return self._graphs.captured

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Those that have not ended, whoever submitted them."""
        return tuple(self._desk.jobs.values())

    @property
    def queue_full(self) -> bool:
        """Whether a submit would be refused for those that wait already."""
        return self._desk.waiting >= self._max_queued

    @property
    def ready(self) -> bool:
        """Whether a step has something to do. What waits for a grammar alone has not."""
        return bool(self._desk.stirs or len(self._flights))

    def ring(self) -> None:
        """End a sleep."""
        self._bell.ring()

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep until a step may have something to do; whether it has. A ring ends the sleep whatever it is for."""
        if seconds is not None and not 0 <= seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"Engine.wait.seconds: got {seconds!r}, want a number of seconds from 0, or None")
        return self.ready or (self._bell.wait(seconds) and self.ready)

    def check(self) -> None:
        if self._owner not in (None, threading.get_ident()):
            raise RuntimeError("Engine.step(): another thread serves this engine, say an AsyncEngine's; submit() and cancel() are for any")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """This thread only steps until it leaves; RuntimeError where another one does."""
        with self._lock:
            self.check()
            self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
