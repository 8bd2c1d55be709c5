"""What wakes the thread that steps: one lock used as a signal."""

from __future__ import annotations

import contextlib
import threading


class WakeSignal:
    """Wakes one sleeper. A ring that nobody waits for is kept, once.

    Ringing is one C call that waits for nothing, so a finaliser may ring wherever it is run; an Event's own lock may be held there.
    """

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._silence.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep until it rings, and silence it; False where it did not ring in time."""
        return self._silence.acquire(timeout=-1 if seconds is None else seconds)
