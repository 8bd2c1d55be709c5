"""Which thread may step an engine, and whether a step has something to do."""

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
    """Serialises step(), capture() and close(). A re-entrant call, say from a draft function or a signal handler, raises RuntimeError:
    it would wait for itself."""

    def __init__(self) -> None:
        self._lock, self._held = threading.RLock(), False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._held:
            self._lock.release()
            raise RuntimeError("Engine: re-entrant step(), capture() or close(); call it after the current one returns")
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._lock.release()


class StepGate:
    """Reserves stepping for one thread, and lets that thread sleep while there is nothing to do."""

    def __init__(self, wake: WakeSignal, scheduler: Scheduler, in_flight: InFlight, graphs: GraphSet, max_queued: int) -> None:
        self._wake, self._scheduler, self._in_flight, self._graphs, self._max_queued = wake, scheduler, in_flight, graphs, max_queued
        self._owner: int | None = None
        self._lock = threading.Lock()

    @property
    def captured(self) -> bool:
        return self._graphs.captured

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All unfinished jobs."""
        return tuple(self._scheduler.jobs.values())

    @property
    def queue_full(self) -> bool:
        """Whether submit() would raise QueueFullError."""
        return self._scheduler.waiting >= self._max_queued

    @property
    def ready(self) -> bool:
        """Whether a step has something to do. False while every job waits for its grammar."""
        return bool(self._scheduler.runnable or len(self._in_flight))

    def notify(self) -> None:
        """Wake the thread in `wait`."""
        self._wake.notify()

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep until notified, then return `ready`. ValueError for a negative or too large time-out."""
        if seconds is not None and not 0 <= seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"Engine.wait.seconds: got {seconds!r}, expected a number of seconds >= 0, or None")
        return self.ready or (self._wake.wait(seconds) and self.ready)

    def check(self) -> None:
        """RuntimeError if stepping is reserved for another thread."""
        if self._owner not in (None, threading.get_ident()):
            raise RuntimeError(
                "Engine.step(): another thread steps this engine, e.g. that of an AsyncEngine; other threads may call submit() and cancel()"
            )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Reserve stepping for this thread. RuntimeError if another thread has it."""
        with self._lock:
            self.check()
            self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
