"""Matchers that are not from a known library, called back from C."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from ctypes import addressof, c_void_p

from torch import Tensor

from stepgraph.sampling.grammar.link import layout
from stepgraph.sampling.grammar.matchers.forced import forced_bytes
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import MaskStatus


class PythonCallbacks:
    """The functions of one Python matcher for a native row. Each call takes the GIL. The matcher checks ids and fuel itself."""

    def __init__(self, matcher: Matcher, masks_host: Tensor) -> None:
        rows = masks_host.view(-1, masks_host.shape[-1])
        start, stride = rows.data_ptr(), rows.shape[-1] * rows.element_size()

        def fill(words: int, _: int) -> int:
            return matcher.fill_next_token_bitmask(rows, (words - start) // stride)

        def rollback(tokens: int) -> int:
            matcher.rollback(tokens)
            return 0

        def forced(text: int, room: int) -> int:
            found = bytes(forced_bytes(matcher)[:room])
            ctypes.memmove(text, found, len(found))
            return len(found)

        functions: dict[str, Callable[..., int]] = {"accept": matcher.accept_token, "fill": fill, "rollback": rollback, "forced": forced}
        self._entries = {name: layout.callbacks[name](_guarded(function, matcher)) for name, function in functions.items()}
        self._entries["is_terminated"] = layout.callbacks["is_terminated"](lambda *_: 0)  # the other functions check it
        self._struct = layout.structs.matcher_library(**{name: c_void_p.from_buffer(entry).value for name, entry in self._entries.items()})

    @property
    def address(self) -> int:
        return addressof(self._struct)


def _guarded(function: Callable[..., int], matcher: Matcher) -> Callable[..., int]:
    """`function` for C: -1 and a message in `error` if it raises, or returns 0 or FAULT because the matcher has a fault."""

    def run(_: int, __: int, *arguments: int) -> int:
        *given, error = arguments
        collecting = gc.isenabled()
        gc.disable()  # no garbage collection on a thread of the CUDA driver
        try:
            result = int(function(*given))
            message = matcher.fault if result in (0, MaskStatus.FAULT) else ""
        except Exception as raised:  # becomes the fault of this row
            result, message = -1, f"{type(raised).__name__}: {raised}"
        finally:
            if collecting:
                gc.enable()
        if not message:
            return result
        text = message.encode(errors="replace")[: layout.constants.FAULT_BYTES - 1] + b"\0"
        ctypes.memmove(error, text, len(text))
        return -1

    return run
