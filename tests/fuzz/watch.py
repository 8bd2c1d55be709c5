"""What no input may do, whatever becomes of it: take for ever, take all memory, write, run or connect to anything, change the process."""

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

SECONDS = 60.0  # that one input may take by the clock; some machines do much else
WORK_SECONDS = 10.0  # of the processor
GROWN_BYTES = 256 << 20  # that one input may leave behind
LOOK_EVERY = 64  # inputs between two looks at all of the process's state
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ACTS = (
    "os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.truncate os.chmod os.chown os.putenv os.unsetenv os.system os.exec"
    " os.posix_spawn os.fork subprocess.Popen socket.connect socket.bind pickle.find_class shutil.rmtree tempfile.mkdtemp tempfile.mkstemp"
    " ctypes.dlopen signal.pthread_kill"
).split()


class TooLong(BaseException):
    """No door catches this one."""


class Watch:
    """Around each input. `allowed`: events that are a door's own, such as the start of a compile worker."""

    def __init__(self, allowed: frozenset[str] = frozenset()) -> None:
        self._acts = frozenset(_ACTS) - allowed
        self._opens = "open" not in allowed
        self._seen: list[str] = []
        self._world = _world()
        self._files: int | None = None
        self._inputs = 0
        self.grown = 0  # bytes, at the most, of one input
        self._hook = _the_hook()

    @contextmanager
    def around(self) -> Iterator[None]:
        """One input."""
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
        """What the last input did that none may, and now and then what any since the last look did; the process is as it is then."""
        self._inputs += 1
        found = [f"it did: {event}" for event in dict.fromkeys(self._seen)]
        world = self._world | (_world() if self._inputs % LOOK_EVERY == 0 else _often())
        for name, value in world.items():
            if value != self._world[name]:
                found.append(f"{name}: {self._world[name]!r:.200} became {value!r:.200}")
        self._world = world
        if self.grown > GROWN_BYTES:
            found.append(f"it left {self.grown:,} bytes behind")
            self.grown = 0
        return found + (self._more_files() if self._inputs % LOOK_EVERY == 0 else [])

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
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
        return [f"{before} files were open, {count} are"] if before is not None and count > before + 8 else []


class _Hook:
    """Audit hooks stay for good: there is one, and it does nothing where nobody listens."""

    def __init__(self) -> None:
        self.current: Watch | None = None
        self.thread = 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.current is not None and threading.get_ident() == self.thread:
            self.current.heard(event, arguments)


@functools.cache
def _the_hook() -> _Hook:
    return _Hook()


def limit_memory(more: int) -> None:
    """For a process of its own: what asks for much more than there is gets none."""
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


def _often() -> dict[str, Any]:
    """What belongs to the whole process and is told in no time."""
    return {
        "working directory": os.getcwd(),
        "variables": len(os.environ),
        "recursion limit": sys.getrecursionlimit(),
        "warning filters": len(warnings.filters),
        "torch type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "standard output": id(sys.stdout),
    }


def _world() -> dict[str, Any]:
    return _often() | {
        "environment": dict(os.environ),
        "import path": tuple(sys.path),
        "random state": hash(random.getstate()),
        "torch random state": hash(torch.get_rng_state().numpy().tobytes()),
        "interrupt handler": signal.getsignal(signal.SIGINT),
        "excepthook": sys.excepthook,
    }
