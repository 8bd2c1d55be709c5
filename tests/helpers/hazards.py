"""Hazards in Triton programs: two accesses of one address, one of them a store, by different programs of a launch, or by different threads
of a program without a barrier between.

In the interpreter a program has one thread, and the programs of a launch run in turn, so a hazard does not change results. On a GPU all
threads load a scalar and one stores it; the thread of an element follows from its index and the shape of its block. Barriers that the
compiler adds for reductions do not count. A program may read what others stored before a releasing atomic, after an acquiring one of its
own.
Not found: hazards where elements have the same index in blocks of one shape but another layout; stores of another program that do not
change the memory, as those of several batch rows to the dummy row.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder

# by method: what it does, and the indices of its pointers and mask
_ACCESSES = {"create_masked_load": ("load", 0, 1), "create_masked_store": ("store", 0, 2), "create_atomic_rmw": ("atomic", 1, 3)}


def _function() -> str:
    """The innermost function of the program that runs."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_globals["__name__"].startswith("stepgraph."))
    return next(frames).f_code.co_name


class Launch:
    """Accesses of the programs of one launch: by address, those of each program, and its number of releasing atomics before."""

    def __init__(self) -> None:
        self.program: object = None
        self.accesses = defaultdict[int, dict[tuple[object, str], tuple[str, int]]](dict)
        self.releases = defaultdict[object, int](int)  # by program, as the next one
        self.acquires = defaultdict[object, bool](bool)

    def others(self, kind: str, address: int) -> Iterator[str]:
        """The accesses by other programs that this one is not ordered after."""
        for (program, other_kind), (access, releases) in self.accesses.get(address, {}).items():
            ordered = self.acquires[self.program] and releases < self.releases[program]
            if program != self.program and not ordered and (kind != other_kind or kind == "store"):
                yield access

    def add(self, kind: str, address: int, access: str) -> None:
        self.accesses[address][self.program, kind] = access, self.releases[self.program]

    def order(self, atomic: Any) -> None:
        self.releases[self.program] += atomic in (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
        self.acquires[self.program] |= atomic in (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


@contextmanager
def hazards() -> Iterator[set[tuple[str, str]]]:
    """The two accesses of each hazard in programs that run in this context, as ("load in f", "store in g")."""
    found = set[tuple[str, str]]()
    accesses = defaultdict[int, dict[tuple[object, str], str]](dict)  # since the last barrier, by address: thread, kind and description
    launch = Launch()

    def record(kind: str, pointers: Any, mask: Any, values: Any) -> None:
        access, shape = f"{kind} in {_function()}", pointers.data.shape
        addresses, size = pointers.data.ravel().tolist(), max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for index in np.flatnonzero(np.broadcast_to(mask.data, shape)).tolist():
            thread = (shape, index) if len(addresses) > 1 else "all" if kind == "load" else "one"
            changes = values is None or ctypes.string_at(addresses[index], size) != values[index].tobytes()[:size]
            for address in range(addresses[index], addresses[index] + size):
                done = accesses[address]
                found.update(
                    (before, access)
                    for (other, other_kind), before in done.items()
                    if thread != other and (kind != other_kind or kind == "store")
                )
                done[thread, kind] = access
                if changes:
                    found.update((f"{before} of another program", access) for before in launch.others(kind, address))
                    launch.add(kind, address, access)

    def recorded(name: str) -> Callable[..., Any]:
        original, (kind, pointers, mask) = getattr(InterpreterBuilder, name), _ACCESSES[name]

        def record_first(builder: InterpreterBuilder, *given: Any) -> Any:
            values = np.broadcast_to(given[1].data, given[0].data.shape).ravel() if kind == "store" else None
            record(kind, given[pointers], given[mask], values)
            if kind == "atomic":
                launch.order(given[4])
            return original(builder, *given)

        return record_first

    def separated(name: str) -> Callable[..., Any]:
        original = getattr(InterpreterBuilder, name)

        def separate(builder: InterpreterBuilder, *given: Any) -> Any:
            accesses.clear()
            if name == "set_grid_dim":
                launch.__init__()  # type: ignore[misc]
            elif name == "set_grid_idx":
                launch.program = given
            return original(builder, *given)

        return separate

    methods: dict[str, Any] = {name: recorded(name) for name in _ACCESSES}
    methods |= {name: separated(name) for name in ("create_barrier", "set_grid_idx", "set_grid_dim")}
    with patch.multiple(InterpreterBuilder, **methods):
        yield found
