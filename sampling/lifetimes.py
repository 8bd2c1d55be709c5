"""Closing threads and processes before the interpreter exits, and detaching objects from them in a forked process.

A thread that returns from a library, or from the release of a tensor, while the interpreter shuts down aborts the process. In a fork, the
threads, devices, files and held locks of the parent are unusable.
"""

from __future__ import annotations

import atexit
import enum
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn, Protocol

THREAD_NAME_PREFIX = "stepgraph-"  # prefix of thread names
EXIT_SECONDS = 10.0  # how long the exiting interpreter waits for all resources together
FORKED_ERROR = "the engine belongs to the parent process; call it there"


class BoundToProcess:
    """Base of objects with threads, devices or pointers. A copy would share these, and in another process they do not exist."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled; create one in each process")


class ExitStage(enum.IntEnum):
    """The order of closing at exit: a thread that launches rounds ends before the threads that run rounds."""

    STEPPER = 0
    DEVICE = 1
    BACKGROUND = 2


class Closable(Protocol):
    def close(self, seconds: float) -> None:
        """Close, and wait at most `seconds` until that is done."""


_closables: tuple[weakref.WeakKeyDictionary[Closable, None], ...] = tuple(weakref.WeakKeyDictionary() for _ in ExitStage)
_fork_hooks: weakref.WeakKeyDictionary[object, Callable[[Any], None]] = weakref.WeakKeyDictionary()  # object -> method


def close_at_exit(resource: Closable, stage: ExitStage = ExitStage.BACKGROUND) -> None:
    """Close `resource` when this interpreter exits, unless it was freed before. Not in forks."""
    _closables[stage][resource] = None


def call_after_fork(method: Callable[[], None]) -> None:
    """Call this bound method in every forked child as long as its object exists. The method must neither wait nor take a lock."""
    assert isinstance(method, MethodType)
    _fork_hooks[method.__self__] = method.__func__


@atexit.register
def _close_all() -> None:
    end = time.monotonic() + EXIT_SECONDS
    for resources in _closables:  # in the order of creation: the thread of a device uses those of its streams until it ends
        while (resource := next((one for ref in resources.keyrefs() if (one := ref()) is not None), None)) is not None:
            del resources[resource]  # closing it may add others, such as the thread of a stream whose first replay is in flight
            resource.close(max(1.0, end - time.monotonic()))  # a device that hangs leaves time to write hidden states
    for thread in threading.enumerate():  # their owners no longer exist, but the threads may release the last references to a model
        if thread.name.startswith(THREAD_NAME_PREFIX) and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def _after_fork() -> None:
    for resources in _closables:
        resources.clear()  # their threads do not exist in the child
    for owner, method in tuple(_fork_hooks.items()):
        method(owner)


os.register_at_fork(after_in_child=_after_fork)
