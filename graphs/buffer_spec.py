"""Declarations of static tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from stepgraph.graphs.memory import check_memory
from stepgraph.sampling.fields import clip_repr, is_int


@dataclass(frozen=True)
class BufferSpec:
    """Declaration of one static tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: Literal["device", "pinned"] = "device"
    fill: float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name.startswith("_"):
            raise ValueError(f"BufferSpec.name: got {clip_repr(self.name)}, expected a public Python identifier")
        if self.memory not in ("device", "pinned"):
            raise ValueError(f"BufferSpec.memory of {self.name!r}: got {clip_repr(self.memory)}, expected 'device' or 'pinned'")
        if self.name.endswith("_host") != (self.memory == "pinned"):
            raise ValueError(
                f"BufferSpec.name: got {self.name!r} in {self.memory} memory, expected the suffix _host for pinned memory only"
            )
        if not isinstance(self.shape, tuple) or not all(is_int(size) and size >= 0 for size in self.shape):
            raise ValueError(f"BufferSpec.shape of {self.name!r}: got {clip_repr(self.shape)}, expected a tuple of integers >= 0")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"BufferSpec.dtype of {self.name!r}: got {clip_repr(self.dtype)}, expected a torch.dtype")
        try:
            torch.full((), self.fill, dtype=self.dtype, device="cpu")
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise ValueError(f"BufferSpec.fill of {self.name!r}: got {clip_repr(self.fill)}, expected a number of {self.dtype}") from None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_fit(name: str, specs: Iterable[BufferSpec], device: torch.device, remedy: str = "") -> None:
    """ValueError if the tensors need more memory than there is."""
    host, needed = torch.device("cpu"), Counter[torch.device]()
    for spec in specs:
        needed[host if spec.memory == "pinned" else device] += spec.nbytes
    for place, nbytes in needed.items():
        check_memory(name, nbytes, place, remedy)
