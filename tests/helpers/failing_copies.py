"""Copies into one tensor that fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class FailingCopies(TorchDispatchMode):
    """Inside, copy `number` into `memory` or a part of it fails, counted from 1."""

    def __init__(self, memory: Tensor, number: int) -> None:
        super().__init__()
        self._first, self._end, self._left = memory.data_ptr(), memory.data_ptr() + memory.nbytes, number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and self._first <= args[0].data_ptr() < self._end:
            self._left -= 1
            if self._left == 0:
                raise torch.OutOfMemoryError("no memory for a copy")
        return function(*args, **(kwargs or {}))
