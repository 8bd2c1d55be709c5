"""What has threads of its own is ended before its interpreter goes: a thread that comes back from a library then aborts the process."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

EXIT_SECONDS = 10.0  # that an interpreter waits for each, which ends before they were closed


class Ending(Protocol):
    def close(self, seconds: float) -> None:
        """End, and wait for it so long at most."""


_open: weakref.WeakSet[Ending] = weakref.WeakSet()


def end_at_exit(one: Ending) -> None:
    """Close it when the interpreter ends, if it lives until then; in this process only."""
    _open.add(one)


@atexit.register
def _end_all() -> None:
    for one in tuple(_open):
        one.close(EXIT_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # their threads are not there
