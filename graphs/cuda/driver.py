"""CUDA driver calls that torch does not expose, and events for reuse.

Calls go through ctypes, which releases the GIL. The driver may hold a lock while a Python host node waits for the GIL, so a
thread that called the driver with the GIL held could deadlock.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        ("shape", c_uint * 7),  # grid, block, dynamic shared memory
        ("kernel_params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamGetCaptureInfo_v2": (c_void_p, POINTER(c_int), POINTER(c_uint64), POINTER(c_void_p), POINTER(c_void_p), POINTER(c_size_t)),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuLaunchHostFunc": (c_void_p, c_void_p, c_void_p),
    "cuGraphUpload": (c_void_p, c_void_p),
    "cuGraphGetNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_int)),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
}


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
        """Make these calls. RuntimeError if the library is older than this version of CUDA, which has them."""
        for name, signature in signatures.items():
            try:
                call: Any = self._library[name]
            except AttributeError as error:
                raise RuntimeError(
                    f"the CUDA driver library has no {name}: {error}; expected a driver for CUDA {version} or newer"
                ) from error
            call.restype, call.argtypes = c_int, signature
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
