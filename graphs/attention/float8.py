"""Cache entries in eight bits: float8_e4m3fn without a scale, as bytes. Numbers beyond 448 become 448; NaN stays NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling.kernels.c_kernel import same_float_type

FLOAT8 = "fp8_e4m3"
ENTRIES = torch.uint8  # the type of such a cache: torch does not index float8 on every device
MAX_C_HEAD_SIZE = 256  # the largest that the kernels in C support
_LARGEST = 448.0


def to_entries(states: Tensor, cache: Tensor) -> Tensor:
    """States as the cache holds them."""
    if cache.dtype is not ENTRIES:
        return states
    return states.float().clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(ENTRIES)


def from_entries(entries: Tensor) -> Tensor:
    """In float32."""
    return (entries.view(torch.float8_e4m3fn) if entries.dtype is ENTRIES else entries).float()


def c_supports_cache(*states: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernels in C support the types of a cache and of states."""
    return same_float_type(*states) and keys.dtype is values.dtype and keys.dtype in (states[0].dtype, ENTRIES)
