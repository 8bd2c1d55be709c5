"""CUDA driver calls that torch does not expose, and events for reuse.

Calls go through ctypes, which releases the GIL. The driver may hold a lock while a Python host node waits for the GIL, so a
thread that called the driver with the GIL held could deadlock.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import torch

from stepgraph.graphs.cuda.driver_calls import SIGNATURES, declared

_NOT_READY = 600  # CUDA_ERROR_NOT_READY, the result of a query
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING; waits spin, for low latency


class Driver:
    """Calls into libcuda by their names. Handles are integers, as in torch.

    A failed call raises a RuntimeError that names the call and the error. A query returns whether everything before it is done.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.declare(SIGNATURES, "12.0")

    def declare(self, signatures: Mapping[str, tuple[Any, ...]], version: str) -> None:
        """Make these calls, which the drivers from this version of CUDA on have."""
        for name, call in declared(self._library, signatures, version).items():
            setattr(self, name, call)
            if name != "cuGetErrorName":
                call.errcheck = self._check

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not declared in SIGNATURES")

    def _check(self, result: int, call: Any, arguments: tuple[Any, ...]) -> bool:
        if result not in (0, _NOT_READY):
            text = c_char_p()
            self.cuGetErrorName(result, byref(text))
            error = (text.value or b"an unknown error").decode()
            raise RuntimeError(f"{call.__name__} failed: {error} ({result})")
        return result == 0

    def context(self) -> int:
        """The calling thread's context; 0 if it has none."""
        context = c_void_p()
        self.cuCtxGetCurrent(byref(context))
        return context.value or 0

    def event_create(self) -> int:
        event = c_void_p()
        self.cuEventCreate(byref(event), _NO_TIMING)
        assert event.value
        return event.value

    def captured_nodes(self, stream: int) -> int:
        """Number of nodes so far in the capture that `stream` belongs to, on all its streams."""
        status, graph, count = c_int(), c_void_p(), c_size_t()
        self.cuStreamGetCaptureInfo_v2(stream, byref(status), None, byref(graph), None, None)
        self.cuGraphGetNodes(graph.value, None, byref(count))
        return count.value


class EventPool:
    """CUDA events by their handles."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._spare: list[int] = []
        self._released = False

    def take(self) -> int:
        if self._spare:
            return self._spare.pop()
        with torch.cuda.device(self._device):
            return self._driver.event_create()

    def give(self, event: int) -> None:
        """Return an event for reuse. From any thread."""
        if self._released:
            with contextlib.suppress(RuntimeError):
                self._driver.cuEventDestroy_v2(event)
        else:
            self._spare.append(event)

    def release(self) -> None:
        """Destroy the spare events, and each event that is given back later."""
        self._released = True
        while self._spare:
            self.give(self._spare.pop())
