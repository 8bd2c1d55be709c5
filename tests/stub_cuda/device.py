"""Device memory as numpy arrays, and calls of the runtime API that torch does not expose."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.stub_cuda import build

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # capture modes
NON_BLOCKING = 1  # flag of a stream

SUCCESS = 0
NOT_READY = 600
NOT_PERMITTED = 800
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(900, 909)

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def device_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a contiguous CUDA tensor of a dtype that numpy has. Kernels do nothing, so tests write their results."""
    assert tensor.is_cuda and tensor.is_contiguous()
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    memory = (ctypes.c_char * (tensor.numel() * dtype.itemsize)).from_address(tensor.data_ptr())
    array: npt.NDArray[Any] = np.frombuffer(memoryview(memory).cast("B"), dtype=dtype).reshape(tensor.shape)
    return array


class Runtime:
    """Calls of the runtime API that return their code. Pointers are integers."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(next(name for name in build.library_names() if name.startswith("libcudart.so")))

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = self._library[name]
        call.restype = ctypes.c_int

        def checked(*arguments: object) -> int:
            code = call(*(ctypes.c_void_p(value) if isinstance(value, int) and value > 0xFFFF else value for value in arguments))
            self._library.cudaGetLastError()  # clears the error, which torch would find later
            return int(code)

        return checked

    def made(self, name: str, *arguments: object) -> int:
        """The handle that a call returns through its first parameter."""
        handle = ctypes.c_void_p()
        assert getattr(self, name)(ctypes.byref(handle), *arguments) == SUCCESS
        return handle.value or 0

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.made("cudaStreamCreateWithPriority", flags, 0)

    def event(self) -> int:
        return self.made("cudaEventCreateWithFlags", 2)

    def end_capture(self, stream: int) -> tuple[int, int]:
        """The code and the graph."""
        graph = ctypes.c_void_p()
        code = self.cudaStreamEndCapture(stream, ctypes.byref(graph))
        return code, graph.value or 0


@cache
def runtime() -> Runtime:
    torch.cuda.init()
    return Runtime()
