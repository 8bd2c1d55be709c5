"""A copy of the contents of static buffers, to restore them after a step has run."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers

_SMALL = 1 << 20  # bytes; smaller buffers are copied without a comparison
_CHUNK = 1 << 26  # elements per comparison, to bound its memory
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BufferBackup:
    """The contents of all buffers except constants. Copied and restored on the current stream, while nothing else runs.

    A large buffer that still holds its declared fill value, such as a cache before the first request, is not copied. A buffer whose
    copy does not fit into device memory is copied to the host.
    """

    def __init__(self, buffers: StaticBuffers) -> None:
        self._copies: list[tuple[Tensor, Tensor | None, float]] = []
        for spec in buffers.specs:
            tensor = buffers[spec.name]
            untouched = spec.nbytes > _SMALL and holds_only(tensor, spec.fill)
            self._copies.append((tensor, None if untouched else _copy_of(tensor), spec.fill))

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for _, copy, _ in self._copies if copy is not None)

    def restore(self) -> None:
        for tensor, copy, fill in self._copies:
            if copy is None:
                tensor.fill_(fill)
            else:
                tensor.copy_(copy)


def holds_only(tensor: Tensor, fill: float) -> bool:
    """Whether every element has the bits of `fill`."""
    bits = _BITS.get(tensor.element_size())
    if bits is None:
        return False
    pattern = torch.full((1,), fill, dtype=tensor.dtype, device=tensor.device).view(bits)
    return all(bool((chunk == pattern).all()) for chunk in tensor.view(bits).flatten().split(_CHUNK))


def _copy_of(tensor: Tensor) -> Tensor:
    if tensor.is_cuda and 2 * tensor.nbytes > torch.cuda.mem_get_info(tensor.device)[0]:
        return tensor.cpu()
    return tensor.clone()
