"""CUDA driver calls that torch does not expose, and the C side of host nodes.

Calls go through ctypes, which releases the GIL. The driver may hold a lock while a Python host node waits for the GIL, so a
thread that called the driver with the GIL held could deadlock.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from stepgraph.graphs.capture import C_HOST_FUNCTION, native_entry
from stepgraph.graphs.errors import HostErrors
from stepgraph.sampling.cuda_graphs import without_collection

_NOT_READY = 600  # CUDA_ERROR_NOT_READY, the result of a query
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING; waits spin, for low latency


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


_SIGNATURES: dict[str, tuple[Any, ...]] = {
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


class Driver:
    """Calls into libcuda by their names. Handles are integers, as in torch.

    A failed call raises a RuntimeError that names the call and the error. A query returns whether everything before it is done.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.declare(_SIGNATURES, "12.0")

    def declare(self, signatures: Mapping[str, tuple[Any, ...]], version: str) -> None:
        """Make these calls, which the drivers from this version of CUDA on have."""
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
        raise AttributeError(f"{name} is not declared in _SIGNATURES")

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


@functools.cache
def open_driver() -> Driver:
    """The CUDA driver; RuntimeError if there is none."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"no NVIDIA driver: {error}; use backend 'tape' on the CPU") from error
    return Driver(library)


class HostCallback:
    """The C function and user data of a host node. Must outlive every graph that contains them.

    A native function (`CaptureContext.host_node`) is called directly. A Python function is wrapped in a callback that takes the GIL and
    stores exceptions in `errors`.
    """

    def __init__(self, name: str, function: Callable[[], object], errors: HostErrors) -> None:
        self.name = name
        self._function = function  # owns the data of a native function
        entry = native_entry(name, function)
        if entry is None:
            self._entry = _python_entry(name, function, errors)
            entry = int(c_void_p.from_buffer(self._entry).value or 0), 0  # ctypes.cast would make a reference cycle
        self.address, self.data = entry


def _python_entry(name: str, function: Callable[[], object], errors: HostErrors) -> Any:
    def enter(_: int | None) -> None:
        try:
            with without_collection():  # a host node must not call CUDA
                function()
        except BaseException as error:
            errors.store(name, error)

    return C_HOST_FUNCTION(enter)
