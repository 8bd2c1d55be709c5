"""Round time-outs: a step that waits too long for the device raises an error, and a report of all threads and streams is logged.

Only waits for the device count, not a step without work or one that waits for a grammar. A hanging host node or kernel cannot be ended
from outside: its thread and memory are not freed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from typing import Any, cast

from stepgraph.graphs.capture import Backend, Event
from stepgraph.runtime.in_flight import InFlight
from stepgraph.sampling.grammar.link.protocol import HostLink

log = logging.getLogger("stepgraph")


class RoundTimeoutError(RuntimeError):
    """The launched work did not finish within EngineConfig.round_timeout_seconds."""


class Watchdog:
    """`watchdog.backend` wraps a backend so that waits for its events time out after `seconds`; None: never."""

    def __init__(self, backend: Backend, seconds: float | None) -> None:
        self._backend, self._seconds, self._expired = backend, seconds, False
        self.backend = backend if seconds is None else cast("Backend", _Watched(backend, self))

    def wait(self, event: Event) -> None:
        """RoundTimeoutError if the event is not reached in time."""
        if not event.wait(self._seconds):
            self._expired = True
            doing = "; ".join(self._backend.active_work())
            limit = f"{self._seconds:g} s (EngineConfig.round_timeout_seconds)"
            raise RoundTimeoutError(f"the device did not finish within {limit}{doing and ': ' + doing}")

    def end(self, in_flight: InFlight, host: HostLink) -> None:
        """Wait for the device, and close the backend and the host link. After a time-out: log the report, and free nothing."""
        with contextlib.suppress(Exception):  # work in flight fails for the reason that already ends the engine
            if self._seconds is not None and not self._expired:
                self.wait(self._backend.event())
        if self._expired:
            log.error("%s", self._report(in_flight, host))
            self._backend.close_without_waiting()
            return
        in_flight.clear()
        with contextlib.suppress(Exception):
            self._backend.synchronize()
        self._backend.close()
        host.close()

    def _report(self, in_flight: InFlight, host: HostLink) -> str:
        stats = host.stats
        counters = f"{sum(stats.nodes)} ended, {stats.fills} masks, {stats.accepts} accepted tokens, {stats.rollbacks} rollbacks"
        lines = [
            f"the device of an engine did not finish within {self._seconds:g} s; in flight: {in_flight.describe() or 'no rounds'}",
            *(self._backend.active_work() or ("no information about its streams",)),
            f"host nodes, {host.name}: {counters}",
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += [f"thread {names.get(ident, ident)}:", *(line.rstrip() for line in traceback.format_stack(frame))]
        return "\n".join(lines)


class _Watched:
    """A backend whose events time out."""

    def __init__(self, backend: Backend, watchdog: Watchdog) -> None:
        self._backend, self._watchdog = backend, watchdog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def event(self) -> _WatchedEvent:
        return _WatchedEvent(self._backend.event(), self._watchdog)


class _WatchedEvent:
    def __init__(self, event: Event, watchdog: Watchdog) -> None:
        self._event, self._watchdog = event, watchdog

    def query(self) -> bool:
        return self._event.query()

    def wait(self, seconds: float | None = None) -> bool:
        if seconds is not None:
            return self._event.wait(seconds)
        self._watchdog.wait(self._event)
        return True
