"""What static buffers hold, kept aside while a step runs over them, and put back afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers

_SMALL = 1 << 20  # bytes that are not worth a look before they are copied
_CHUNK = 1 << 26  # elements compared at once: the comparison's own memory stays small beside a cache
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BufferBackup:
    """The contents of all buffers but the constants. Taken and restored on the current stream, while nothing else runs.

    A large buffer that still holds what its spec declares, as a cache before the first request does, is not copied: its
    spec is enough. What does not fit beside itself into device memory is kept on the host.
    """

    def __init__(self, buffers: StaticBuffers) -> None:
        self._kept: list[tuple[Tensor, Tensor | None, float]] = []
        for spec in buffers.specs:
            tensor = buffers[spec.name]
            fresh = spec.nbytes > _SMALL and holds_only(tensor, spec.fill)
            self._kept.append((tensor, None if fresh else _copy_of(tensor), spec.fill))

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return sum(copy.nbytes for _, copy, _ in self._kept if copy is not None)

    def restore(self) -> None:
        for tensor, copy, fill in self._kept:
            if copy is None:
                tensor.fill_(fill)
            else:
                tensor.copy_(copy)


def holds_only(tensor: Tensor, fill: float) -> bool:
    """True where every element has the bits of `fill`."""
    bits = _BITS.get(tensor.element_size())
    if bits is None:
        return False
    pattern = torch.full((1,), fill, dtype=tensor.dtype, device=tensor.device).view(bits)
    return all(bool((chunk == pattern).all()) for chunk in tensor.view(bits).flatten().split(_CHUNK))


def _copy_of(tensor: Tensor) -> Tensor:
    if tensor.is_cuda and 2 * tensor.nbytes > torch.cuda.mem_get_info(tensor.device)[0]:
        return tensor.cpu()
    return tensor.clone()
