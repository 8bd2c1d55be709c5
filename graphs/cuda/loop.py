"""A captured step as the body of a WHILE node, so that one launch runs it until a flag in device memory is set.

The graph: a counter is set to 0, then the node runs its body while the condition is not 0. The body is the captured step as a child
graph, then a kernel that counts, and sets the condition. Needs a driver for CUDA 12.4 or newer.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_longlong, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from stepgraph.graphs.cuda.driver import Driver, KernelParams

MIN_DRIVER_VERSION = 12040  # the first version of CUDA with WHILE nodes
CONDITIONAL_NODE = 13  # CU_GRAPH_NODE_TYPE_CONDITIONAL
WHILE = 1  # CU_GRAPH_COND_TYPE_WHILE
ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT: every launch begins with the handle's default value


class ConditionalParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS."""

    _fields_ = (("handle", c_uint64), ("type", c_int), ("size", c_uint), ("phGraph_out", POINTER(c_void_p)), ("ctx", c_void_p))


class _NodeUnion(ctypes.Union):
    _fields_ = (("reserved1", c_longlong * 29), ("conditional", ConditionalParams))


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams."""

    _anonymous_ = ("of",)
    _fields_ = (("type", c_int), ("reserved0", c_int * 3), ("of", _NodeUnion), ("reserved2", c_longlong))


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("elementSize", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuGraphCreate": (POINTER(c_void_p), c_uint),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphAddMemsetNode": (POINTER(c_void_p), c_void_p, c_void_p, c_size_t, POINTER(MemsetParams), c_void_p),
    "cuGraphAddChildGraphNode": (POINTER(c_void_p), c_void_p, c_void_p, c_size_t, c_void_p),
    "cuGraphAddKernelNode_v2": (POINTER(c_void_p), c_void_p, c_void_p, c_size_t, POINTER(KernelParams)),
    "cuGraphAddNode_v2": (POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_size_t, POINTER(NodeParams)),
    "cuGraphConditionalHandleCreate": (POINTER(c_uint64), c_void_p, c_void_p, c_uint, c_uint),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
}

# The driver links cudaGraphSetConditional, which only device code can call. Arguments: handle; until, count, rounds [1] int32; limit.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry set_condition (.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u32 e)
{
    .reg .pred %unset, %again;
    .reg .b32 %flag, %ran, %limit, %value;
    .reg .b64 %handle, %until, %count, %rounds;
    ld.param.u64 %handle, [a];
    ld.param.u64 %until, [b];
    ld.param.u64 %count, [c];
    ld.param.u64 %rounds, [d];
    ld.param.u32 %limit, [e];
    ld.u32 %flag, [%until];
    ld.u32 %ran, [%count];
    add.u32 %ran, %ran, 1;
    st.u32 [%count], %ran;
    st.u32 [%rounds], %ran;
    setp.eq.u32 %unset, %flag, 0;
    setp.lt.and.u32 %again, %ran, %limit, %unset;
    selp.u32 %value, 1, 0, %again;
    {
        .param .b64 to;
        .param .b32 what;
        st.param.b64 [to], %handle;
        st.param.b32 [what], %value;
        call.uni cudaGraphSetConditional, (to, what);
    }
    ret;
}
"""


def why_no_loops(driver: Driver) -> str:
    """Why this driver has no WHILE nodes; empty if it has them."""
    version = c_int()
    driver.cuDriverGetVersion(byref(version))
    found = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return "" if version.value >= MIN_DRIVER_VERSION else f"the driver supports CUDA {found}, expected 12.4 or newer for WHILE nodes"


class LoopGraph:
    """Runs a captured step again while `until` is 0 after it, at most `limit` times in total. Build and launch it on one stream."""

    def __init__(self, driver: Driver, step: int, until: Tensor, limit: int) -> None:
        driver.declare(SIGNATURES, "12.4")
        self._driver, self._graph, self._instance, context = driver, c_void_p(), c_void_p(), driver.context()
        self._count = torch.empty(1, dtype=torch.int32, device=until.device)
        self._rounds_host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        driver.cuGraphCreate(byref(self._graph), 0)
        try:
            self._build(step, until, limit, context)
        except RuntimeError:
            driver.cuGraphDestroy(self._graph)
            raise

    def _build(self, step: int, until: Tensor, limit: int, context: int) -> None:
        driver, first, loop, child, handle = self._driver, c_void_p(), c_void_p(), c_void_p(), c_uint64()
        reset = MemsetParams(self._count.data_ptr(), 0, 0, 4, 1, 1)
        driver.cuGraphAddMemsetNode(byref(first), self._graph, None, 0, byref(reset), context)
        driver.cuGraphConditionalHandleCreate(byref(handle), self._graph, context, 1, ASSIGN_DEFAULT)
        params = NodeParams(type=CONDITIONAL_NODE)
        params.conditional = ConditionalParams(handle.value, WHILE, 1, None, context)
        driver.cuGraphAddNode_v2(byref(loop), self._graph, byref(first), None, 1, byref(params))
        body = params.conditional.phGraph_out[0]
        driver.cuGraphAddChildGraphNode(byref(child), body, None, 0, step)
        pointers = (c_uint64(tensor.data_ptr()) for tensor in (until, self._count, self._rounds_host))
        values = (handle, *pointers, c_uint(min(limit, 2**32 - 1)))
        addresses = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        kernel = KernelParams(func=_loop_kernel(driver, context), shape=(1, 1, 1, 1, 1, 1, 0), kernel_params=ctypes.addressof(addresses))
        driver.cuGraphAddKernelNode_v2(byref(c_void_p()), body, byref(child), 1, byref(kernel))
        driver.cuGraphInstantiateWithFlags(byref(self._instance), self._graph, 0)

    @property
    def rounds(self) -> int:
        return int(self._rounds_host)

    def launch(self, stream: int) -> None:
        self._driver.cuGraphLaunch(self._instance, stream)

    def free(self) -> None:
        """The device must be idle."""
        self._driver.cuGraphExecDestroy(self._instance)
        self._driver.cuGraphDestroy(self._graph)


class LoopGraphs(dict[tuple[int, int], LoopGraph]):
    """The loops of one captured step by the address of their flag and their limit. The first launch of each builds it."""

    latest: LoopGraph | None = None

    def launch(self, driver: Driver, step: int, until: Tensor, limit: int, stream: int) -> None:
        key = (until.data_ptr(), limit)
        if key not in self:
            self[key] = LoopGraph(driver, step, until, limit)
        self.latest = self[key]
        self.latest.launch(stream)

    def free(self) -> None:
        """The device must be idle."""
        while self:
            self.popitem()[1].free()


@functools.cache
def _loop_kernel(driver: Driver, context: int) -> int:
    """The condition kernel, loaded once per context."""
    module, function = c_void_p(), c_void_p()
    driver.cuModuleLoadData(byref(module), PTX)
    driver.cuModuleGetFunction(byref(function), module, b"set_condition")
    assert function.value
    return function.value
