"""Loads the C library of the native host link. It is built at installation if there is a C compiler."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_void_p
from pathlib import Path

from stepgraph.sampling.grammar.compile.backends import installed
from stepgraph.sampling.grammar.link.layout import OWN_LAYOUT, declare, layout_of
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceBinding, llguidance_api
from stepgraph.sampling.grammar.link.xgrammar_binding import XGrammarBinding, check_versions, versions_are_known
from stepgraph.sampling.native import Unavailable, find_library

__all__ = ["NativeLibrary", "Unavailable", "find_library", "load"]


class NativeLibrary:
    """The loaded library, and the grammar libraries that it calls; Unavailable if one of them is installed and cannot be called.

    Functions called on `quick` keep the GIL because they only access a few words; `waiting` releases it.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.quick, self.waiting = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
            declare(self.quick)
            declare(self.waiting)
        except (OSError, AttributeError) as error:
            raise Unavailable(f"{path.name} cannot be loaded: {error}") from error
        if layout_of(self.quick) != OWN_LAYOUT:
            raise Unavailable(f"{path.name} was built from other sources; install stepgraph again")
        check_versions()
        if not versions_are_known():
            _ = self.xgrammar
        self.llguidance = LLGuidanceBinding(self.waiting, llguidance_api()) if installed("llguidance") else None
        self.node_address = int(ctypes.cast(self.waiting.stepgraph_node, c_void_p).value or 0)
        self.run_calls_address = int(ctypes.cast(self.waiting.stepgraph_run_calls, c_void_p).value or 0)

    @functools.cached_property
    def xgrammar(self) -> XGrammarBinding:
        """Bound when a grammar first needs it, since xgrammar imports transformers; at once where its version is not known to fit."""
        return XGrammarBinding(self.quick)


def available_processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def load() -> NativeLibrary:
    """The library of this installation. Raises Unavailable with the reason if it cannot be used."""
    return NativeLibrary(find_library())
