"""Line coverage of stepgraph that guides the search. Fully covered functions are no longer traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import stepgraph

_ROOT = Path(stepgraph.__file__).parent  # not resolved: code objects keep the path of the import
_OWN = tuple(str(_ROOT / folder) + "/" for folder in ("sampling", "graphs", "runtime"))


_MOST_CALLS = 8  # of one function traced per input: tracing every call of a hot function is too slow


@dataclass
class _Function:
    code: CodeType  # referenced, so that its id is not reused
    left: set[int]  # lines not reached yet
    number: int = -1  # index of the last input that called it
    calls: int = 0  # during that input


class Reached:
    """The number of distinct lines that this thread has reached."""

    def __init__(self) -> None:
        self.lines = 0
        self._functions: dict[int, _Function] = {}
        self._number = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Trace one input."""
        before = sys.gettrace()  # restored afterwards, for coverage measurement
        self._number += 1
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        known = self._functions.get(id(code))
        if known is None:
            own = code.co_filename.startswith(_OWN)
            known = self._functions[id(code)] = _Function(code, {line for _, _, line in code.co_lines() if line} if own else set())
        if not known.left:
            return None
        known.calls = known.calls + 1 if known.number == self._number else 1
        known.number = self._number
        return self._line if known.calls <= _MOST_CALLS else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line":
            left = self._functions[id(frame.f_code)].left
            if frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self.lines += 1
                frame.f_trace_lines = bool(left)  # fully covered loops run at full speed
        return self._line
