"""Loads the stub libraries into this process, before torch is imported: torch finds its CUDA libraries loaded by their sonames."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from tests.stub_cuda import build


def is_stub_environment() -> bool:
    """Whether `make stub-cuda` made this environment: it creates a marker file there."""
    return (Path(sys.prefix) / ".stub-cuda").exists()


def preload() -> None:
    """Build the stubs where they are missing or old, and load them."""
    assert "torch" not in sys.modules, "the stubs must be loaded before torch"
    folder = build.build()
    for name in build.library_names():
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    found = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if str(folder) not in found:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), *filter(None, found)])  # for child processes that import torch
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)  # Triton links its launcher with the driver's library
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder.with_name("stub_cuda_triton")))


def preload_where_needed() -> bool:
    if not is_stub_environment():
        return False
    preload()
    return True
