"""Kernels of the C library: the types that they support, and calls with arguments that are packed once."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgraph.sampling.native import ARGUMENT, kernel, why_not

NONE = bytes(ARGUMENT.size)
_CALL = struct.Struct("=QQ")  # a kernel and its arguments, as `packed_call` in chain.c
FLOATS = (torch.float32, torch.bfloat16)
Run = Callable[[], object]


class PackedCall(functools.partial[int]):
    """A call of a kernel with packed arguments. Without a method `__call__`, which would take longer than some kernels."""

    arguments: Sequence[object]  # whose memory the kernel uses

    @classmethod
    def of(cls, function: Callable[..., int], packed: bytes, arguments: Sequence[object]) -> PackedCall:
        call = cls(function, packed)
        call.arguments = arguments
        return call


def join_calls(calls: Sequence[PackedCall]) -> PackedCall:
    """All of them, in order, with one call from Python. If one fails, the error has its number."""
    if len(calls) == 1:
        return calls[0]
    function = kernel("run_kernels")
    assert function is not None
    table = b"".join([_CALL.pack(_address(call.func), _address(call.args[0])) for call in calls])
    return PackedCall.of(function, ARGUMENT.pack(_address(table), len(calls), *[0] * 9, 0.0), (table, *calls))


def _address(of: Any) -> int:
    return ctypes.cast(of, ctypes.c_void_p).value or 0


def pack_argument(value: Tensor | float | torch.dtype | None) -> bytes:
    """An argument as C reads it."""
    if isinstance(value, Tensor):
        padding = (0,) * (4 - value.dim())
        bfloat16 = value.dtype is torch.bfloat16
        return ARGUMENT.pack(value.data_ptr(), *value.shape, *padding, *value.stride(), *padding, bfloat16, value.element_size(), 0.0)
    if value is None or isinstance(value, torch.dtype):
        return NONE
    return ARGUMENT.pack(0, *[0] * 9, int(value), value)


def same_float_type(*tensors: Tensor) -> bool:
    """Whether all are float32 or all bfloat16: what kernels in C compute with."""
    return tensors[0].dtype in FLOATS and all(tensor.dtype is tensors[0].dtype for tensor in tensors)


def why_no_c(*dtypes: torch.dtype) -> str:
    """Why layers of these types do not run in C on the CPU; empty if they do."""
    unknown = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in FLOATS]
    return why_not() or (f"it supports float32 and bfloat16, not {unknown[0]}" if unknown else "")
