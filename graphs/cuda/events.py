"""Events of a CUDA backend, and the CUDA events that they reuse."""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

import torch

from stepgraph.graphs.capture import BackendStats
from stepgraph.graphs.cuda.driver import Driver
from stepgraph.graphs.errors import HostErrors

POLL_SECONDS = 50e-6


class EventPool:
    """CUDA events by their handles."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._spare: list[int] = []
        self._released = False

    def take(self) -> int:
        if self._spare:
            return self._spare.pop()
        with torch.cuda.device(self._device):
            return self._driver.event_create()

    def give(self, event: int) -> None:
        """Return an event for reuse. From any thread."""
        if self._released:
            with contextlib.suppress(RuntimeError):
                self._driver.cuEventDestroy_v2(event)
        else:
            self._spare.append(event)

    def release(self) -> None:
        """Destroy the spare events, and each event that is given back later."""
        self._released = True
        while self._spare:
            self.give(self._spare.pop())


class EventOwner(Protocol):
    """What an event needs of its backend."""

    driver: Driver
    errors: HostErrors
    stats: BackendStats

    def refuse_while_capturing(self, call: str) -> None: ...


class CudaEvent:
    """A point in the main stream of a CudaBackend. Its CUDA event is reused after this object is freed."""

    def __init__(self, backend: EventOwner, pool: EventPool) -> None:
        self._backend, self._pool = backend, pool
        self.handle = pool.take()

    def query(self) -> bool:
        return bool(self._backend.driver.cuEventQuery(self.handle))

    def wait(self, seconds: float | None = None) -> bool:
        self._backend.refuse_while_capturing("Event.wait()")
        self._backend.stats.event_waits += 1
        if seconds is None:
            self._backend.driver.cuEventSynchronize(self.handle)
        elif not self._poll(until=time.monotonic() + seconds):
            return False
        self._backend.errors.raise_first()
        return True

    def _poll(self, until: float) -> bool:
        """Query until the event is reached; the driver has no wait with a time-out."""
        while not self.query():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def __del__(self) -> None:
        self._pool.give(self.handle)
