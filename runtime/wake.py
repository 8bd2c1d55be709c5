"""The signal that wakes the stepping thread: one lock used as an auto-reset event."""

from __future__ import annotations

import contextlib
import threading


class WakeSignal:
    """Wakes one waiting thread. A notification without a waiter is kept, once.

    `notify` is one C call that never blocks, so a finaliser may call it anywhere. An Event would not do: a finaliser that runs while its
    internal lock is held would deadlock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # already set
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a notification and clear it. False on time-out."""
        return self._lock.acquire(timeout=-1 if seconds is None else seconds)
