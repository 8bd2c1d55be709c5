"""Weights in huge pages of the processor's memory. Reading weights with pages of 4 KiB, a product also waits for page tables: a round of
eight positions took a third longer in a virtual machine, where each look-up walks two of them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref

import torch
from torch import Tensor, nn

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_PAGE, _MAPPING = 1 << 21, 1 << 25  # a mapping holds several tensors; the system allocates only pages that are used
_MIN_BYTES = 1 << 16


_latest = threading.local()  # .mapping: a weak reference to the mapping of the latest tensors; .used: how many of its bytes are used


def empty_in_huge_pages(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_empty`; on the CPU in huge pages where the system grants them."""
    dtype = dtype or like.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    if not like.is_cpu or nbytes < _MIN_BYTES or _ADVICE is None:
        return like.new_empty(shape, dtype=dtype)
    mapping = getattr(_latest, "mapping", lambda: None)()
    if mapping is None or _latest.used + nbytes > len(mapping):
        mapping = mmap.mmap(-1, max(_MAPPING, nbytes) + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(_ADVICE)
        _latest.mapping, _latest.used = weakref.ref(mapping), -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % _PAGE
    found = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=_latest.used)  # keeps the mapping alive
    _latest.used += -(-nbytes // 64) * 64
    return found.view(dtype).view(shape)


def empty_weight(like: Tensor, *shape: int) -> nn.Parameter:
    """An uninitialised parameter with the dtype and device of `like`."""
    return nn.Parameter(empty_in_huge_pages(like, shape), requires_grad=False)
