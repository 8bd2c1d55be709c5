"""Which thread may step an engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class StepLock:
    """Serialises step(), capture() and close(), and reserves step() for one thread.

    A re-entrant call, e.g. from a draft function or a signal handler, raises RuntimeError."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """For `with`. The lock is in C: an interrupt at the begin or the end of methods in Python would leave it locked."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("Engine: re-entrant step(), capture() or close(); call it after the current one returns")
        return self._lock

    def check_owner(self) -> None:
        """RuntimeError if stepping is reserved for another thread."""
        if self._owner not in (None, threading.get_ident()):
            raise RuntimeError(
                "Engine.step(): another thread steps this engine, e.g. that of an AsyncEngine; other threads may call submit() and cancel()"
            )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Reserve stepping for this thread. RuntimeError if another thread has it."""
        with self._lock:
            self.check_owner()
            self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
