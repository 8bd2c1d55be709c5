"""CUDA driver calls that torch does not expose, and the C side of host nodes.

Calls go through ctypes, which releases the GIL. The driver may hold a lock while a Python host node waits for the GIL, so a
thread that called the driver with the GIL held could deadlock.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from stepgraph.graphs.capture import C_HOST_FUNCTION, HostNodeError, native_entry

_NOT_READY = 600
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING; waits spin, for low latency

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

_NODE_KINDS = (  # in the order of CUgraphNodeType; shared kinds have the names that the tape uses
    *("kernel", "copy", "fill", "host", "graph", "empty", "wait", "record", "semaphore-signal", "semaphore-wait"),
    *("alloc", "free", "memory-operations", "conditional"),
)


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        ("shape", c_uint * 7),  # grid, block, dynamic shared memory
        ("kernel_params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class GraphNode(NamedTuple):
    """Kind and launch shape of a node, without its arguments."""

    kind: str
    launch: tuple[int, ...] = ()  # of a kernel: handle, grid, block, shared memory


class Driver:
    """Typed calls into libcuda. Handles are integers, as in torch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls: dict[str, Any] = {}
        for name, signature in _SIGNATURES.items():
            try:
                call = library[name]
            except AttributeError as error:
                raise RuntimeError(f"the CUDA driver library has no {name}: {error}; expected a driver for CUDA 12.0 or newer") from error
            call.restype, call.argtypes = c_int, signature
            self._calls[name] = call

    def _do(self, name: str, *arguments: Any) -> None:
        result = self._calls[name](*arguments)
        if result:
            raise RuntimeError(f"{name} failed: {self._error_name(result)}")

    def _error_name(self, result: int) -> str:
        text = c_char_p()
        self._calls["cuGetErrorName"](result, byref(text))
        return (text.value or b"an unknown error").decode() + f" ({result})"

    def _ready(self, name: str, handle: int) -> bool:
        result = self._calls[name](handle)
        if result not in (0, _NOT_READY):
            raise RuntimeError(f"{name} failed: {self._error_name(result)}")
        return bool(result == 0)

    def version(self) -> int:
        """CUDA version that the driver supports: 13000 for 13.0."""
        version = c_int()
        self._do("cuDriverGetVersion", byref(version))
        return version.value

    def context(self) -> int:
        """The calling thread's context; 0 if it has none."""
        context = c_void_p()
        self._do("cuCtxGetCurrent", byref(context))
        return context.value or 0

    def use_context(self, context: int) -> None:
        self._do("cuCtxSetCurrent", context)

    def stream_idle(self, stream: int) -> bool:
        return self._ready("cuStreamQuery", stream)

    def stream_synchronize(self, stream: int) -> None:
        self._do("cuStreamSynchronize", stream)

    def stream_wait(self, stream: int, event: int) -> None:
        self._do("cuStreamWaitEvent", stream, event, 0)

    def captured_nodes(self, stream: int) -> int:
        """Number of nodes so far in the capture that `stream` belongs to, on all its streams."""
        status, graph, count = c_int(), c_void_p(), c_size_t()
        self._do("cuStreamGetCaptureInfo_v2", stream, byref(status), None, byref(graph), None, None)
        self._do("cuGraphGetNodes", graph.value, None, byref(count))
        return count.value

    def event_create(self) -> int:
        event = c_void_p()
        self._do("cuEventCreate", byref(event), _NO_TIMING)
        assert event.value
        return event.value

    def event_record(self, event: int, stream: int) -> None:
        self._do("cuEventRecord", event, stream)

    def event_reached(self, event: int) -> bool:
        return self._ready("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        self._do("cuEventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        self._do("cuEventDestroy_v2", event)

    def launch_host(self, stream: int, callback: HostCallback) -> None:
        """Call `callback` in the order of `stream`; in a capture this becomes a host node."""
        self._do("cuLaunchHostFunc", stream, callback.address, callback.data)

    def graph_upload(self, graph_exec: int, stream: int) -> None:
        """Upload a cudaGraphExec_t in the order of `stream`, so that its first launch does not."""
        self._do("cuGraphUpload", graph_exec, stream)

    def graph_nodes(self, graph: int) -> list[GraphNode]:
        """The nodes of a cudaGraph_t."""
        count = c_size_t()
        self._do("cuGraphGetNodes", graph, None, byref(count))
        handles = (c_void_p * max(count.value, 1))()
        self._do("cuGraphGetNodes", graph, handles, byref(count))
        return [self._node(handle or 0) for handle in handles[: count.value]]

    def _node(self, handle: int) -> GraphNode:
        number = c_int()
        self._do("cuGraphNodeGetType", handle, byref(number))
        kind = _NODE_KINDS[number.value] if number.value < len(_NODE_KINDS) else f"type-{number.value}"
        if kind != "kernel":
            return GraphNode(kind)
        params = _KernelParams()
        if self._calls["cuGraphKernelNodeGetParams_v2"](handle, byref(params)):
            return GraphNode(kind)  # not available for some kernels
        return GraphNode(kind, (params.func or params.kern or 0, *params.shape))


@functools.cache
def open_driver() -> Driver:
    """The CUDA driver; RuntimeError if there is none."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"no NVIDIA driver: {error}; use backend 'tape' on the CPU") from error
    return Driver(library)


class HostErrors:
    """The first error of a host node, kept until it is raised. Written by the driver's thread, read by the launching thread."""

    def __init__(self) -> None:
        self._first: HostNodeError | None = None

    def store(self, node: str, cause: BaseException) -> None:
        if self._first is None:
            error = HostNodeError(node, cause)
            error.__cause__ = cause
            self._first = error

    def take(self) -> HostNodeError | None:
        first, self._first = self._first, None
        return first

    def raise_first(self) -> None:
        error = self.take()
        if error is not None:
            raise error


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
        # A host node must not call CUDA; a garbage collection could, by freeing a graph or an event.
        collecting = gc.isenabled()
        gc.disable()
        try:
            function()
        except BaseException as error:
            errors.store(name, error)
        finally:
            if collecting:
                gc.enable()

    return C_HOST_FUNCTION(enter)
