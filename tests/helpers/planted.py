"""Bugs and faults planted in a grammar library, below either host link."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from typing import Any

from stepgraph.sampling.grammar.link.layout import LLGuidanceStruct, XGrammarStruct
from stepgraph.sampling.grammar.link.native_row import NativeRow
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.grammar.matchers.checked import CheckedMatcher
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.xgrammar_lib.matcher import XGrammarMatcher

SIGNATURES = {
    "accept": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64, c_void_p),
    "fill": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
    "rollback": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64, c_void_p),
    "forced": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
    "is_terminated": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p),
}


def innermost(matcher: Matcher) -> Matcher:
    """The library's own, inside a check and behind a marker."""
    while isinstance(matcher, (CheckedMatcher, MarkerMatcher)):
        matcher = matcher.inner
    return matcher


def plant(row: NativeRow, name: str, bug: Callable[..., int]) -> None:
    """Put `bug(real, *arguments)` in the place of one of the five functions that a native row calls."""
    struct = XGrammarStruct if isinstance(innermost(row.matcher), XGrammarMatcher) else LLGuidanceStruct
    library = struct.from_buffer_copy(ctypes.string_at(row.struct.library, ctypes.sizeof(struct)))
    real = SIGNATURES[name](getattr(library.functions, name))
    entry = SIGNATURES[name](lambda *arguments: bug(real, *arguments))
    setattr(library.functions, name, ctypes.cast(entry, c_void_p).value)
    row.struct.library = ctypes.addressof(library)
    row.planted = library, entry, real  # type: ignore[attr-defined]  # as long as the row lives


def fail(why: int, message: bytes) -> int:
    """What a function of the library does that fails: its text into `why`, and -1."""
    ctypes.memmove(why, message + b"\0", len(message) + 1)
    return -1


def break_fill(row: MatcherRow, message: str, behind: int = 0) -> None:
    """Every mask fails but the next ones, so many."""
    left = iter(range(behind))
    if isinstance(row, NativeRow):
        plant(row, "fill", lambda real, *told: fail(told[-1], message.encode()) if next(left, None) is None else real(*told))
        return
    real = row.matcher.fill_next_token_bitmask

    def explode(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError(message)
        return real(*arguments)

    row.matcher.fill_next_token_bitmask = explode  # type: ignore[method-assign, assignment]


def take_fuel(row: MatcherRow) -> None:
    if isinstance(row, NativeRow):
        row.struct.fuel_seconds = -1.0
    else:
        assert isinstance(row.matcher, XGrammarMatcher)
        row.matcher._fuel_seconds = -1.0
