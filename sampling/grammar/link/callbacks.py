"""A matcher in Python behind the functions that a native row calls: it takes the GIL for each of them, and so waits for it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p

from torch import Tensor

from stepgraph.sampling.grammar.link.layout import FAULT_BYTES, LibraryStruct
from stepgraph.sampling.grammar.matchers.forced import forced_bytes
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import MaskStatus

ACCEPT = ROLLBACK = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64, c_void_p)
FILL = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)
FORCED = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)
IS_TERMINATED = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)


class PythonLibrary:
    """The functions of one matcher. Statuses, fuel and ids out of range are its own affair."""

    def __init__(self, matcher: Matcher, masks_host: Tensor) -> None:
        rows = masks_host.view(-1, masks_host.shape[-1])
        start, stride = rows.data_ptr(), rows.shape[-1] * rows.element_size()

        def accept(_: int, __: int, token: int, why: int) -> int:
            def call() -> int:
                taken = matcher.accept_token(token)
                return int(taken) if taken or not matcher.fault else _fault(matcher)

            return _guarded(call, why)

        def fill(_: int, __: int, words: int, ___: int, why: int) -> int:
            def call() -> int:
                status = matcher.fill_next_token_bitmask(rows, (words - start) // stride)
                return int(status) if status != MaskStatus.FAULT else _fault(matcher)

            return _guarded(call, why)

        def rollback(_: int, __: int, tokens: int, why: int) -> int:
            def call() -> int:
                matcher.rollback(tokens)
                return _fault(matcher) if matcher.fault else 0

            return _guarded(call, why)

        def is_terminated(_: int, __: int, ___: int) -> int:
            return 0  # its other functions know

        def forced(_: int, __: int, text: int, room: int, why: int) -> int:
            def call() -> int:
                found = bytes(forced_bytes(matcher)[:room])
                ctypes.memmove(text, found, len(found))
                return len(found) if not matcher.fault else _fault(matcher)

            return _guarded(call, why)

        self._entries = ACCEPT(accept), FILL(fill), ROLLBACK(rollback), IS_TERMINATED(is_terminated), FORCED(forced)
        self._struct = LibraryStruct(*(c_void_p.from_buffer(entry).value for entry in self._entries))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)


class _Failed(Exception):
    """What a matcher says of itself, to be told as it is."""


def _fault(matcher: Matcher) -> int:
    raise _Failed(matcher.fault)


def _guarded(call: Callable[[], int], why: int) -> int:
    """The result of a call, or -1 and the reason. It may run in a thread of the driver's: nothing is collected there."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return call()
    except Exception as error:  # one row's fault
        text = str(error) if isinstance(error, _Failed) else f"{type(error).__name__}: {error}"
        told = text.encode(errors="replace")[: FAULT_BYTES - 1] + b"\0"
        ctypes.memmove(why, told, len(told))
        return -1
    finally:
        if collecting:
            gc.enable()
