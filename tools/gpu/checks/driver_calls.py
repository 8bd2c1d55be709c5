"""Driver calls for experiments: stream waits on memory values, and conditional nodes. Declarations follow cuda.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from stepgraph.graphs.cuda.loop import ASSIGN_DEFAULT, CONDITIONAL_NODE, ConditionalParams, MemsetParams, NodeParams

WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
IF = 0  # CU_GRAPH_COND_TYPE_IF


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint, c_uint),
    "cuGraphCreate": (POINTER(c_void_p), c_uint),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphAddMemsetNode": (POINTER(c_void_p), c_void_p, c_void_p, c_size_t, POINTER(MemsetParams), c_void_p),
    "cuGraphAddNode_v2": (POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_size_t, POINTER(NodeParams)),
    "cuGraphConditionalHandleCreate": (POINTER(c_uint64), c_void_p, c_void_p, c_uint, c_uint),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
}


class DriverCalls:
    """Raises a RuntimeError with the name of a missing or failed call."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"no NVIDIA driver: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        try:
            call = self._library[name]
        except AttributeError:
            raise RuntimeError(f"the driver has no {name}") from None
        call.restype, call.argtypes = c_int, SIGNATURES[name]
        code = call(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}")

    def device_address(self, host: int) -> int:
        """Device address of pinned memory."""
        found = c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", byref(found), host, 0)
        return found.value


class MemsetChain:
    """A graph of `count` memsets in a row, each by itself or inside an IF node whose condition is `condition` at every launch."""

    def __init__(self, calls: DriverCalls, address: int, count: int, condition: bool | None) -> None:
        self._calls, self._graph, self._instance, context = calls, c_void_p(), c_void_p(), c_void_p()
        calls.call("cuCtxGetCurrent", byref(context))
        calls.call("cuGraphCreate", byref(self._graph), 0)
        params, last = MemsetParams(address, 0, 1, 4, 1, 1), None
        for _ in range(count):
            node, graph = c_void_p(), self._graph
            before = None if last is None else byref(last)
            if condition is not None:
                graph = self._branch(node, before, context, condition)
                calls.call("cuGraphAddMemsetNode", byref(c_void_p()), graph, None, 0, byref(params), context)
            else:
                calls.call("cuGraphAddMemsetNode", byref(node), graph, before, int(last is not None), byref(params), context)
            last = node
        calls.call("cuGraphInstantiateWithFlags", byref(self._instance), self._graph, 0)

    def _branch(self, node: c_void_p, before: Any, context: c_void_p, condition: bool) -> c_void_p:
        """The body of a new IF node."""
        handle, params = c_uint64(), NodeParams()
        self._calls.call("cuGraphConditionalHandleCreate", byref(handle), self._graph, context, int(condition), ASSIGN_DEFAULT)
        params.type = CONDITIONAL_NODE
        params.conditional = ConditionalParams(handle.value, IF, 1, None, context)
        self._calls.call("cuGraphAddNode_v2", byref(node), self._graph, before, None, int(before is not None), byref(params))
        return c_void_p(params.conditional.phGraph_out[0])

    def launch(self, stream: int) -> None:
        self._calls.call("cuGraphLaunch", self._instance, stream)

    def close(self) -> None:
        self._calls.call("cuGraphExecDestroy", self._instance)
        self._calls.call("cuGraphDestroy", self._graph)
