"""The driver calls that are used, and their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any


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


def declared(library: ctypes.CDLL, signatures: Mapping[str, tuple[Any, ...]], version: str) -> dict[str, Any]:
    """The functions of the library by their names. RuntimeError if it is older than this version of CUDA."""
    calls = dict[str, Any]()
    for name, signature in signatures.items():
        try:
            call: Any = library[name]
        except AttributeError as error:
            raise RuntimeError(f"the CUDA driver library has no {name}: {error}; expected a driver for CUDA {version} or newer") from error
        call.restype, call.argtypes = c_int, signature
        calls[name] = call
    return calls
