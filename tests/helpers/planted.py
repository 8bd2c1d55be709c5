"""Faults planted in a grammar library, for both host links."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

from stepgraph.sampling.c_declarations import function_types, structs
from stepgraph.sampling.grammar.automaton.grammar import AutomatonMatcher
from stepgraph.sampling.grammar.link.native import NativeRow
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher
from stepgraph.sampling.native import why_not

USUAL_MATCHER = XGrammarMatcher if why_not() else AutomatonMatcher  # of a grammar that "auto" compiles

callbacks = function_types("matcher_library")


class _NoData(ctypes.Structure):
    """A library of which the functions need no data of their own."""

    _fields_ = (("functions", structs.matcher_library),)


def innermost(matcher: Matcher) -> Matcher:
    """The matcher of the library, without the marker around it."""
    return matcher.inner if isinstance(matcher, MarkerMatcher) else matcher


def plant(row: NativeRow, name: str, bug: Callable[..., int]) -> None:
    """Replace one of the five functions that a native row calls with `bug(real, *arguments)`."""
    matcher = innermost(row.matcher)
    struct = structs.xgrammar_library if isinstance(matcher, XGrammarMatcher) else structs.llguidance_library
    if isinstance(matcher, AutomatonMatcher):
        struct = _NoData
    library = struct.from_buffer_copy(ctypes.string_at(row.struct.library, ctypes.sizeof(struct)))
    original = callbacks[name](getattr(library.functions, name))
    entry = callbacks[name](lambda *arguments: bug(original, *arguments))
    setattr(library.functions, name, ctypes.cast(entry, c_void_p).value)
    row.struct.library = ctypes.addressof(library)
    row.planted = library, entry, original  # type: ignore[attr-defined]  # lives as long as the row


def fail(error: int, message: bytes) -> int:
    """Act as a failing library function: write the message at address `error`, and return -1."""
    ctypes.memmove(error, message + b"\0", len(message) + 1)
    return -1


def break_fill(row: MatcherRow, message: str, after: int = 0) -> None:
    """Make every mask fail except the next `after` ones."""
    left = iter(range(after))
    if isinstance(row, NativeRow):
        plant(row, "fill", lambda original, *args: fail(args[-1], message.encode()) if next(left, None) is None else original(*args))
        return
    original = row.matcher.fill_next_token_bitmask

    def explode(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError(message)
        return original(*arguments)

    row.matcher.fill_next_token_bitmask = explode  # type: ignore[method-assign, assignment]


def slow_fill(row: MatcherRow, seconds: float) -> None:
    """Delay every mask by `seconds`."""
    if isinstance(row, NativeRow):

        def wait_in_c(original: Callable[..., int], *arguments: int) -> int:
            time.sleep(seconds)
            return original(*arguments)

        plant(row, "fill", wait_in_c)
        return
    original = row.matcher.fill_next_token_bitmask

    def wait(*arguments: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments)

    row.matcher.fill_next_token_bitmask = wait  # type: ignore[method-assign, assignment]


def exhaust_fuel(row: MatcherRow) -> None:
    if isinstance(row, NativeRow):
        row.struct.fuel_seconds = -1.0
    else:
        assert isinstance(row.matcher, XGrammarMatcher)
        row.matcher.fuel_seconds = -1.0
