"""xgrammar's methods as C functions, looked up by name in tvm-ffi's type table.

This is not a documented C API of xgrammar. So versions and names are checked first; on any difference the binding raises Unavailable
with the reason.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from typing import Any

from stepgraph.sampling.c_declarations import structs
from stepgraph.sampling.native import Unavailable

MATCHER_TYPE_KEY = "xgrammar.tvm_ffi_binding.GrammarMatcher"
METHODS = ("accept_token", "fill_next_token_bitmask", "rollback", "is_terminated", "find_jump_forward_string")
SYMBOLS = {"call": "TVMFFIFunctionCall", "take_error": "TVMFFIErrorMoveFromRaised", "release": "TVMFFIObjectDecRef"}
TVM_VERSION = (0, 1)
TESTED_VERSIONS = {"xgrammar": ("0.2.8", "0.2.9"), "apache-tvm-ffi": ("0.1.15.post2",)}


class XGrammarBinding:
    """The bound methods. Keeps the function objects alive that the struct points to."""

    def __init__(self, library: ctypes.CDLL) -> None:
        version = (ctypes.c_uint32 * 3)()
        try:
            from tvm_ffi import libinfo
            from xgrammar.tvm_ffi_binding import _ffi_api

            # only the copy that xgrammar has loaded
            tvm = ctypes.CDLL(libinfo.find_libtvm_ffi(), mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE)
            tvm.TVMFFIGetVersion(version)
            addresses = {field: ctypes.cast(tvm[symbol], ctypes.c_void_p).value for field, symbol in SYMBOLS.items()}
            matcher_class: Any = _ffi_api.GrammarMatcher
            info = matcher_class.__tvm_ffi_type_info__
        except Exception as error:
            raise Unavailable(f"xgrammar's functions were not found: {error}") from error
        if tuple(version[:2]) != TVM_VERSION:
            raise Unavailable(f"tvm-ffi: got {'.'.join(map(str, version))}, expected {'.'.join(map(str, TVM_VERSION))}")
        if info.type_key != MATCHER_TYPE_KEY:
            raise Unavailable(f"xgrammar's matcher type: got {info.type_key!r}, expected {MATCHER_TYPE_KEY!r}")
        found = {method.name: method.func for method in info.methods}
        if missing := [name for name in METHODS if name not in found]:
            raise Unavailable(f"xgrammar's matcher has no method {missing[0]!r}")
        self._functions = {name: found[name] for name in METHODS}
        handles = {name: function.__chandle__() for name, function in self._functions.items()}
        self.struct = structs.xgrammar_library(matcher_type=int(info.type_index), **addresses, **handles)
        library.stepgraph_bind_xgrammar(ctypes.byref(self.struct))


def versions_are_tested() -> bool:
    """Whether the installed versions are those that the tests bind, so that a later binding succeeds."""
    return all(importlib.metadata.version(name) in tested for name, tested in TESTED_VERSIONS.items())


def check_versions() -> None:
    version = importlib.metadata.version("xgrammar")
    if not re.match(r"0\.2\.[89](?!\d)", version):
        raise Unavailable(f"xgrammar: got {version}, expected 0.2.8 or 0.2.9")
