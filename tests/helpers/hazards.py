"""Hazards in Triton programs: two accesses of one address by different threads of a program, one of them a store, and no barrier between.

In the interpreter a program has one thread, so a hazard does not change results. On a GPU all threads load a scalar and one stores it; the
thread of an element follows from its index and the shape of its block. Barriers that the compiler adds for reductions do not count.
Not found: hazards between programs, or where elements have the same index in blocks of one shape but another layout.
"""

from __future__ import annotations

import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

# by method: what it does, and the indices of its pointers and mask
_ACCESSES = {"create_masked_load": ("load", 0, 1), "create_masked_store": ("store", 0, 2), "create_atomic_rmw": ("atomic", 1, 3)}


def _function() -> str:
    """The innermost function of the program that runs."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_globals["__name__"].startswith("stepgraph."))
    return next(frames).f_code.co_name


@contextmanager
def hazards() -> Iterator[set[tuple[str, str]]]:
    """The two accesses of each hazard in programs that run in this context, as ("load in f", "store in g")."""
    found = set[tuple[str, str]]()
    accesses = defaultdict[int, dict[tuple[object, str], str]](dict)  # since the last barrier, by address: thread, kind and description

    def record(kind: str, pointers: Any, mask: Any) -> None:
        access, shape = f"{kind} in {_function()}", pointers.data.shape
        addresses, size = pointers.data.ravel().tolist(), max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for index in np.flatnonzero(np.broadcast_to(mask.data, shape)).tolist():
            thread = (shape, index) if len(addresses) > 1 else "all" if kind == "load" else "one"
            for address in range(addresses[index], addresses[index] + size):
                done = accesses[address]
                found.update(
                    (before, access)
                    for (other, other_kind), before in done.items()
                    if thread != other and (kind != other_kind or kind == "store")
                )
                done[thread, kind] = access

    def recorded(name: str) -> Callable[..., Any]:
        original, (kind, pointers, mask) = getattr(InterpreterBuilder, name), _ACCESSES[name]

        def record_first(builder: InterpreterBuilder, *given: Any) -> Any:
            record(kind, given[pointers], given[mask])
            return original(builder, *given)

        return record_first

    def separated(name: str) -> Callable[..., Any]:
        original = getattr(InterpreterBuilder, name)

        def separate(*given: Any) -> Any:
            accesses.clear()
            return original(*given)

        return separate

    methods: dict[str, Any] = {name: recorded(name) for name in _ACCESSES}
    methods |= {name: separated(name) for name in ("create_barrier", "set_grid_idx")}
    with patch.multiple(InterpreterBuilder, **methods):
        yield found
