"""The memory of intermediates on the tape. The tapes of one backend share it, since their replays run one after another."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.graphs.buffers import storage_key

_ALIGNMENT = 64  # as torch's allocator
_FIRST_CHUNK = 1 << 20


class Arena:
    """Chunks that every recording fills from the beginning. A tape holds views, so no chunk is moved or freed before its tapes."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._used: list[int] = []  # the most bytes of each chunk that a recording used
        self.restart()

    @property
    def nbytes(self) -> int:
        """Bytes that recordings used; what was never used is not resident."""
        return sum(self._used)

    def restart(self) -> None:
        """Begin a recording, whose tensors may overlap those of earlier ones."""
        self._index = self._offset = 0

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors, and with them their storages, into the arena."""
        moved: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if size := storage.nbytes():
                key = storage_key(tensor)
                if key not in moved:
                    moved[key] = self._block(size)
                    moved[key].copy_(storage)
                tensor.set_(moved[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    def _block(self, size: int) -> torch.UntypedStorage:
        """A storage of its own in a part of a chunk."""
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        while self._index < len(self._chunks) and self._offset + rounded > self._chunks[self._index].size:
            self._index, self._offset = self._index + 1, 0
        if self._index == len(self._chunks):
            total = sum(chunk.size for chunk in self._chunks)
            self._chunks.append(torch.empty(max(_FIRST_CHUNK, total, rounded), dtype=torch.uint8).numpy())
            self._used.append(0)
        chunk, begin = self._chunks[self._index], self._offset
        self._offset += rounded
        self._used[self._index] = max(self._used[self._index], self._offset)
        return torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=begin).untyped_storage()
