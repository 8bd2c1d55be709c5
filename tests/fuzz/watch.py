"""Detects forbidden effects of an input: long run times, memory growth, file writes, processes, connections and changed process state."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

SECONDS = 60.0  # wall-clock limit per input, generous for loaded machines
WORK_SECONDS = 10.0  # processor time limit per input
GROWN_BYTES = 256 << 20  # memory growth allowed per input
LOOK_EVERY = 64  # inputs between two full checks of the process state
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ACTS = (
    "os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.truncate os.chmod os.chown os.putenv os.unsetenv os.system os.exec"
    " os.posix_spawn os.fork subprocess.Popen socket.connect socket.bind pickle.find_class shutil.rmtree tempfile.mkdtemp tempfile.mkstemp"
    " ctypes.dlopen signal.pthread_kill"
).split()


class TooLong(BaseException):
    """Time limit exceeded. A BaseException, so that no entry point catches it."""


class Watch:
    """Watches each input. `allowed`: audit events of the entry point itself, such as the start of a compile worker."""

    def __init__(self, allowed: frozenset[str] = frozenset()) -> None:
        self._acts = frozenset(_ACTS) - allowed
        self._opens = "open" not in allowed
        self._seen: list[str] = []
        self._state = _full_state()
        self._files: int | None = None
        self._inputs = 0
        self.grown = 0  # bytes: the largest growth of one input
        self._hook = _the_hook()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Watch one input."""
        self._seen.clear()
        before, start, old = _resident(), time.process_time(), signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        self._hook.current, self._hook.thread = self, threading.get_ident()
        try:
            yield
        finally:
            self._hook.current = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
            self.grown = max(self.grown, _resident() - before)
            if time.process_time() - start > WORK_SECONDS:
                self._seen.append(f"worked for more than {WORK_SECONDS:g} s")

    def faults(self) -> list[str]:
        """Forbidden effects of the last input; every LOOK_EVERY inputs also changes since the last full check. Updates the reference."""
        self._inputs += 1
        found = [f"it did: {event}" for event in dict.fromkeys(self._seen)]
        state = self._state | (_full_state() if self._inputs % LOOK_EVERY == 0 else _cheap_state())
        for name, value in state.items():
            if value != self._state[name]:
                found.append(f"{name}: {self._state[name]!r:.200} became {value!r:.200}")
        self._state = state
        if self.grown > GROWN_BYTES:
            found.append(f"memory grew by {self.grown:,} bytes")
            self.grown = 0
        return found + (self._more_files() if self._inputs % LOOK_EVERY == 0 else [])

    def record(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self._acts:
            self._seen.append(f"{event} {arguments!r:.120}")
        elif event == "open" and self._opens:
            path, mode, flags = arguments
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITES):
                self._seen.append(f"open {path!r:.80} {mode}")

    def _more_files(self) -> list[str]:
        try:
            count = len(os.listdir("/proc/self/fd"))
        except OSError:
            return []
        before, self._files = self._files, count
        return [f"open files grew from {before} to {count}"] if before is not None and count > before + 8 else []


class _Hook:
    """The one audit hook of the process, because hooks cannot be removed. Inactive without a current watch."""

    def __init__(self) -> None:
        self.current: Watch | None = None
        self.thread = 0
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.current is not None and threading.get_ident() == self.thread:
            self.current.record(event, arguments)


@functools.cache
def _the_hook() -> _Hook:
    return _Hook()


def limit_memory(more: int) -> None:
    """Limit the address space of this process to its current size plus `more` bytes."""
    size = _pages(0)
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong(f"it took longer than {SECONDS:g} s")


def _resident() -> int:
    return _pages(1)


def _pages(column: int) -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[column]) * resource.getpagesize()
    except OSError:
        return 0


def _cheap_state() -> dict[str, Any]:
    """Process-wide state that is cheap to read."""
    return {
        "working directory": os.getcwd(),
        "variables": len(os.environ),
        "recursion limit": sys.getrecursionlimit(),
        "warning filters": len(warnings.filters),
        "torch type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "standard output": id(sys.stdout),
    }


def _full_state() -> dict[str, Any]:
    return _cheap_state() | {
        "environment": dict(os.environ),
        "import path": tuple(sys.path),
        "random state": hash(random.getstate()),
        "torch random state": hash(torch.get_rng_state().numpy().tobytes()),
        "interrupt handler": signal.getsignal(signal.SIGINT),
        "excepthook": sys.excepthook,
    }
