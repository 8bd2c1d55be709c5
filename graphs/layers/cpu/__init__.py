"""What a round does to a few tokens on the CPU, in C: products, paged attention, rotary positions, norms, gates, places, drafts.

Plain torch spends tens of microseconds on each of its many small operations. The library is built when the package is installed
where there is a C compiler; without it the operations run as their references. A call runs on the thread that makes it, without the GIL.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from stepgraph.graphs.layers.cpu import calls
from stepgraph.sampling.grammar.link.unavailable import Unavailable
from stepgraph.sampling.kernels.cpu import loader
from stepgraph.sampling.kernels.operation import Prepare, Run

FOLDER = Path(__file__).parent
OUTSIDE = "a cache slot or a page lies outside of the cache"


def find_library(folder: Path = FOLDER) -> Path:
    return loader.find_library(folder, "_kernels")


def open_library(path: Path) -> ctypes.CDLL:
    return loader.open_library(path, calls.FUNCTIONS, "stepgraph_kernels_layout", calls.OWN_LAYOUT, OUTSIDE)


@functools.cache
def load() -> ctypes.CDLL | Unavailable:
    """The library of this installation, or why it cannot be used."""
    try:
        return open_library(find_library())
    except Unavailable as error:
        return error


def why_not(*dtypes: torch.dtype) -> str:
    """Why what is computed in these types does not run here; empty where it does."""
    library = load()
    if isinstance(library, Unavailable):
        return str(library)
    unknown = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in calls.NARROW]
    return f"they are for float32 and bfloat16, not for {unknown[0]}" if unknown else ""


def on_cpu(tensor: Tensor) -> bool:
    """Whether what is no floating point number may be left to the library."""
    return tensor.device.type == "cpu" and not why_not()


def serves(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not why_not(tensor.dtype)


def prepared(prepare: Prepare) -> Prepare:
    """`prepare` with the library as its first argument; None for every call where there is no library."""

    def with_library(*arguments: object) -> Run | None:
        library = load()
        return None if isinstance(library, Unavailable) else prepare(library, *arguments)

    return with_library


def wants_gradients(*tensors: Tensor | None) -> bool:
    """What is learned goes through plain torch, which knows the way back."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
