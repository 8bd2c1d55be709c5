"""The contents of a static tensor, kept while a step runs only to be recorded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_SMALL = 1 << 20  # bytes; smaller tensors are copied without a comparison
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}  # words per comparison: on the CPU they stay in its cache


class Backup:
    """Copied and restored on the current stream, while nothing else runs.

    A large tensor that holds only its declared fill value, such as a cache before the first request, is not copied. A copy that does not
    fit into device memory is on the host.
    """

    def __init__(self, tensor: Tensor, fill: float) -> None:
        self._tensor, self._fill = tensor, fill
        self._copy = None if tensor.nbytes > _SMALL and holds_only(tensor, fill) else _copy_of(tensor)

    def restore(self) -> None:
        if self._copy is not None:
            self._tensor.copy_(self._copy)
        else:
            for chunk, pattern in _changed(self._tensor, self._fill):
                chunk.copy_(pattern.expand_as(chunk))


def holds_only(tensor: Tensor, fill: float) -> bool:
    """Whether every element has the bits of `fill`. False for tensors that are not whole words."""
    return tensor.nbytes % 8 == 0 and tensor.element_size() <= 8 and next(_changed(tensor, fill), None) is None


def _changed(tensor: Tensor, fill: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of words that hold something else, and a word that holds only `fill`."""
    word = torch.full((8 // tensor.element_size(),), fill, dtype=tensor.dtype, device=tensor.device).view(torch.int64)
    for chunk in tensor.view(-1).view(torch.int64).split(_CHUNK[tensor.device.type]):
        if not bool((chunk == word).all()):
            yield chunk, word


def _copy_of(tensor: Tensor) -> Tensor:
    if tensor.is_cuda and 2 * tensor.nbytes > torch.cuda.mem_get_info(tensor.device)[0]:
        return tensor.cpu()
    return tensor.clone()
