"""Round time-outs: a step that waits too long for the device raises an error, and a report of all threads and streams is logged.

Only waits for the device count, not a step without work or one that waits for a grammar. A hanging host node or kernel cannot be ended
from outside: its thread and memory are not freed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from stepgraph.graphs.capture import Backend, Event
from stepgraph.runtime.in_flight import InFlight
from stepgraph.sampling.grammar.link.protocol import HostLink

POLL_SECONDS = 50e-6
log = logging.getLogger("stepgraph")


class RoundTimeoutError(RuntimeError):
    """The launched work did not finish within EngineConfig.round_timeout_seconds."""


class Watchdog:
    """`watchdog.backend` wraps a backend so that waits for its events time out after `seconds`; None: never."""

    def __init__(self, backend: Backend, seconds: float | None) -> None:
        self._backend, self._seconds, self._expired = backend, seconds, False
        self._copies: list[tuple[str, Event, float]] = []  # what each copies, an event at its end, and when it was launched
        self.backend = backend if seconds is None else cast("Backend", _TimedBackend(backend, self))

    def note_copy(self, what: str, end: Event) -> None:
        """Name a launched copy, for errors before its end."""
        self._copies = [*(each for each in self._copies if not each[1].query()), (what, end, time.monotonic())]

    def check_copies(self) -> None:
        """RoundTimeoutError if a launched copy has not ended in time. For steps that do not wait for it."""
        assert self._seconds is not None
        if any(time.monotonic() - launched > self._seconds and not end.query() for _, end, launched in self._copies):
            raise self._error()

    @property
    def _unfinished(self) -> tuple[str, ...]:
        copies = (f"copy of {what}" for what, end, _ in self._copies if not end.query())
        return *self._backend.active_work(), *dict.fromkeys(copies)

    def wait(self, event: Event) -> bool:
        """RoundTimeoutError if the event is not reached in time."""
        if not event.wait(self._seconds):
            raise self._error()
        return True

    def poll(self, ready: Callable[[], bool]) -> None:
        """Sleep until `ready`. RoundTimeoutError if that takes too long."""
        end = math.inf if self._seconds is None else time.monotonic() + self._seconds
        while not ready():
            if time.monotonic() > end:
                raise self._error()
            time.sleep(POLL_SECONDS)

    def _error(self) -> RoundTimeoutError:
        self._expired = True
        doing = "; ".join(self._unfinished)
        limit = f"{self._seconds:g} s (EngineConfig.round_timeout_seconds)"
        return RoundTimeoutError(f"the device did not finish within {limit}{doing and ': ' + doing}")

    def close(self, in_flight: InFlight, host: HostLink) -> None:
        """Wait for the device, and close the backend and the host link. After a time-out: log the report, and free nothing."""
        with contextlib.suppress(Exception):  # work in flight fails for the reason that already ends the engine
            if self._seconds is not None and not self._expired:
                self.backend.synchronize()
        if self._expired:
            try:
                log.error("%s", self._report(in_flight, host))
            except Exception:  # of a device that is lost
                log.exception("the report of a time-out failed")
            self._backend.close_without_waiting()
            return
        in_flight.clear()
        with contextlib.suppress(Exception):
            self._backend.synchronize()
        with contextlib.suppress(Warning):  # raised if warnings are errors: about work in flight that failed too
            self._backend.close()
        host.close()

    def _report(self, in_flight: InFlight, host: HostLink) -> str:
        stats = host.stats
        counters = f"{sum(stats.nodes)} ended, {stats.fills} masks, {stats.accepts} accepted tokens, {stats.rollbacks} rollbacks"
        rounds = ", ".join(f"{'launch' if each.is_loop else 'round'} {each.number} ({each.key})" for each in in_flight.pending)
        lines = [
            f"the device of an engine did not finish within {self._seconds:g} s; in flight: {rounds or 'no rounds'}",
            *(self._unfinished or ("no information about its streams",)),
            f"host nodes, {host.name}: {counters}",
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += [f"thread {names.get(ident, ident)}:", *(line.rstrip() for line in traceback.format_stack(frame))]
        return "\n".join(lines)


class _TimedBackend:
    def __init__(self, backend: Backend, watchdog: Watchdog) -> None:
        self._backend, self._watchdog = backend, watchdog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def event(self) -> Event:
        return self._timed(self._backend.event())

    def copy_aside(self, function: Callable[[], object], *, after_launched: bool) -> Event:
        return self._timed(self._backend.copy_aside(function, after_launched=after_launched))

    def synchronize(self) -> None:
        self._watchdog.wait(self._backend.copy_aside(lambda: None, after_launched=True))  # also for the copies beside rounds
        self._backend.synchronize()

    def wait_for(self, copied: Any) -> None:
        self._backend.wait_for(copied.untimed)

    def _timed(self, event: Event) -> Event:
        return cast("Event", SimpleNamespace(untimed=event, query=event.query, wait=functools.partial(self._watchdog.wait, event)))
