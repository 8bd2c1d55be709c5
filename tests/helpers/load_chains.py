"""The longest chain of dependent loads of a Triton program, which determines the time of a program with few instances.

In the interpreter each value gets the number of loads that it waits for, one after another. A load waits for its pointers and its mask, and
for the conditions of the branches before it. Only the first read of 32 bytes counts: later ones find them in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

SECTOR = 32  # bytes that a GPU reads at a time


class Chain:
    """The longest one so far, that of the conditions, and that of each sector."""

    def __init__(self) -> None:
        self.longest = self.of_conditions = 0
        self.of_sectors: dict[int, int] = {}

    def load(self, waits: int, pointers: TensorHandle, mask: TensorHandle) -> int:
        waits = max(waits, self.of_conditions)
        live = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        sectors = np.unique(pointers.data[live] // SECTOR).tolist()
        waits = max([waits, *(self.of_sectors.setdefault(sector, waits + 1) for sector in sectors)])
        self.longest = max(self.longest, waits)
        return waits


def _waits(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return max(map(_waits, value), default=0)
    return int(getattr(getattr(value, "handle", value), "waits", 0))


def _set(value: Any, waits: int) -> None:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        handle = getattr(one, "handle", one)
        if isinstance(handle, TensorHandle):
            handle.waits = waits


@contextmanager
def load_chain() -> Iterator[Chain]:
    """The chain of the programs that run in this context. Each is to run one instance."""
    chain = Chain()

    def tracked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            result = original(*given)
            waits = max(_waits(given), _waits(result))  # of a method that calls a load
            _set(result, chain.load(waits, given[1], given[2]) if name == "create_masked_load" else waits)
            return result

        return run

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch_original(tensor, scope)
        decide = tensor.__bool__

        def decided(condition: Any) -> bool:
            chain.of_conditions = max(chain.of_conditions, _waits(condition))
            return bool(decide(condition))

        scope.set_attr(tensor, "__bool__", decided)

    patch_original = interpreter._patch_lang_tensor
    names = [name for name in vars(InterpreterBuilder) if name.startswith("create_") or name.endswith("ary_op")]
    with ExitStack() as patches:
        patches.enter_context(patch.object(interpreter, "_patch_lang_tensor", patch_tensor))
        for owner, methods in ((InterpreterBuilder, names), (ReduceOps, ["apply_impl"]), (ScanOps, ["apply_impl"])):
            for name in methods:
                patches.enter_context(patch.object(owner, name, tracked(name, getattr(owner, name))))
        yield chain
