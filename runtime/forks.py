"""What becomes in a fork of what belongs to its parent: threads, devices, files and locks of other threads are of no use there."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

LEFT = "it is the parent's of this fork, want calls in that process: its threads and its device are there"

_leaving: set[weakref.WeakMethod[Callable[[], None]]] = set()


def leave_in_forks(leave: Callable[[], None]) -> None:
    """Call this method of an object that lives in every fork of this process. It must neither wait nor take a lock."""
    _leaving.add(weakref.WeakMethod(leave, _leaving.discard))


def _leave() -> None:
    for method in tuple(_leaving):
        if leave := method():
            leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)
