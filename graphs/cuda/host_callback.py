"""The C side of host nodes on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

from stepgraph.graphs.capture import C_HOST_FUNCTION, native_entry
from stepgraph.graphs.errors import HostErrors
from stepgraph.sampling.cuda_graphs import without_collection


class HostCallback:
    """The C function and user data of a host node. Must outlive every graph that contains them.

    A native function (`CaptureContext.host_node`) is called directly. A Python function is wrapped in a callback that takes the GIL and
    stores exceptions in `errors`.
    """

    def __init__(self, name: str, function: Callable[[], object], errors: HostErrors) -> None:
        self.name = name
        self._function = function  # owns the data of a native function
        entry = native_entry(name, function)
        if entry is None:
            self._entry = _python_entry(name, function, errors)
            entry = int(c_void_p.from_buffer(self._entry).value or 0), 0  # ctypes.cast would make a reference cycle
        self.address, self.data = entry


def _python_entry(name: str, function: Callable[[], object], errors: HostErrors) -> Any:
    def enter(_: int | None) -> None:
        try:
            with without_collection:  # a host node must not call CUDA
                function()
        except BaseException as error:
            errors.store(name, error)

    return C_HOST_FUNCTION(enter)
