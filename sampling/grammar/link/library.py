"""Loads the C library of the native host link and declares its functions. It is built at installation if there is a C compiler."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_void_p
from pathlib import Path

from stepgraph.sampling.grammar.link.layout import (
    OWN_LAYOUT,
    CountsStruct,
    LLGuidanceStruct,
    RowStruct,
    ShapeStruct,
    XGrammarStruct,
    layout_of,
)
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceBinding, llguidance_api
from stepgraph.sampling.grammar.link.xgrammar_binding import XGrammarBinding
from stepgraph.sampling.native import Unavailable, find_library

__all__ = ["NativeLibrary", "Unavailable", "find_library", "load"]


class NativeLibrary:
    """The loaded library. Functions of `quick` keep the GIL because they only access a few words; those of `waiting` release it."""

    def __init__(self, path: Path) -> None:
        try:
            self.quick, self.waiting = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
            self.quick.stepgraph_layout.restype = c_int64
            self.quick.stepgraph_layout.argtypes = (POINTER(c_int64), c_int64)
            layout = layout_of(self.quick)
        except (OSError, AttributeError) as error:
            raise Unavailable(f"{path.name} cannot be loaded: {error}") from error
        if layout != OWN_LAYOUT:
            raise Unavailable(f"{path.name} was built from other sources; install stepgraph again")
        self._declare()
        self.xgrammar = XGrammarBinding(self.quick)
        self.node_address = int(ctypes.cast(self.waiting.stepgraph_node, c_void_p).value or 0)
        self.run_calls_address = int(ctypes.cast(self.waiting.stepgraph_run_calls, c_void_p).value or 0)

    def _declare(self) -> None:
        quick, waiting = self.quick, self.waiting
        quick.stepgraph_open.restype, quick.stepgraph_open.argtypes = c_void_p, (POINTER(ShapeStruct),)
        quick.stepgraph_push_batch.restype, quick.stepgraph_push_batch.argtypes = c_int, (c_void_p, POINTER(c_void_p), c_int64)
        quick.stepgraph_counts.restype, quick.stepgraph_counts.argtypes = None, (c_void_p, POINTER(CountsStruct))
        quick.stepgraph_log.restype, quick.stepgraph_log.argtypes = None, (c_void_p, c_void_p, c_int64)
        quick.stepgraph_fault.restype, quick.stepgraph_fault.argtypes = c_char_p, (POINTER(RowStruct),)
        quick.stepgraph_bind_xgrammar.restype, quick.stepgraph_bind_xgrammar.argtypes = None, (POINTER(XGrammarStruct),)
        quick.stepgraph_bind_llguidance.restype, quick.stepgraph_bind_llguidance.argtypes = None, (POINTER(LLGuidanceStruct),)
        waiting.stepgraph_open_llguidance.restype = c_void_p
        waiting.stepgraph_open_llguidance.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_uint32), c_int64)
        waiting.stepgraph_close_llguidance.restype = c_void_p
        waiting.stepgraph_close_llguidance.argtypes = (c_void_p, c_void_p, c_int)
        waiting.stepgraph_close.restype, waiting.stepgraph_close.argtypes = None, (c_void_p,)
        waiting.stepgraph_node.restype, waiting.stepgraph_node.argtypes = None, (c_void_p,)
        waiting.stepgraph_run_calls.restype, waiting.stepgraph_run_calls.argtypes = None, (c_void_p,)

    @functools.cached_property
    def llguidance(self) -> LLGuidanceBinding:
        """Raises Unavailable with the reason if llguidance cannot be called from C."""
        return LLGuidanceBinding(self.quick, llguidance_api())


@functools.cache
def load() -> NativeLibrary:
    """The library of this installation. Raises Unavailable with the reason if it cannot be used."""
    return NativeLibrary(find_library())
