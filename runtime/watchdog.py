"""What becomes of an engine whose device does not answer: a step waits so long for it, tells what everybody was doing, and fails.

Only waits for the device are counted. A step that has nothing to wait for, and one that waits for a grammar, is as good as done.
What hangs cannot be ended from outside: neither a host node nor a kernel. It keeps its thread and its memory.
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
    """What was launched did not finish within EngineConfig.round_timeout_seconds."""


class Watchdog:
    """`backend` is for all who launch and wait: its events do not wait longer than `seconds`; None: as long as it takes."""

    def __init__(self, backend: Backend, seconds: float | None) -> None:
        self._backend, self._seconds, self._expired = backend, seconds, False
        self.backend = backend if seconds is None else cast("Backend", _Watched(backend, self))

    def wait(self, event: Event) -> None:
        """RoundTimeoutError where it is not reached in time."""
        if not event.wait(self._seconds):
            self._expired = True
            doing = "; ".join(self._backend.active_work())
            limit = f"{self._seconds:g} s (EngineConfig.round_timeout_seconds)"
            raise RoundTimeoutError(f"the device did not finish within {limit}{doing and ': ' + doing}")

    def end(self, flights: InFlight, host: HostLink) -> None:
        """Wait for the device, and free what is its own and the host nodes'. Where it hangs: say so in the log, and free nothing."""
        with contextlib.suppress(Exception):  # whatever was still on its way fails for the reason that is being told
            if self._seconds is not None and not self._expired:
                self.wait(self._backend.event())
        if self._expired:
            log.error("%s", self._report(flights, host))
            self._backend.close_without_waiting()
            return
        flights.forget()
        with contextlib.suppress(Exception):
            self._backend.synchronize()
        self._backend.close()
        host.close()

    def _report(self, flights: InFlight, host: HostLink) -> str:
        stats = host.stats
        counted = f"{sum(stats.nodes)} ended, {stats.fills} masks, {stats.accepts} accepted tokens, {stats.rollbacks} rollbacks"
        lines = [
            f"the device of an engine did not finish within {self._seconds:g} s; on their way: {flights.told or 'no rounds'}",
            *(self._backend.active_work() or ("nothing is known of its streams",)),
            f"host nodes, {host.name}: {counted}",
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += [f"thread {names.get(ident, ident)}:", *(line.rstrip() for line in traceback.format_stack(frame))]
        return "\n".join(lines)


class _Watched:
    """A backend but for its events."""

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
