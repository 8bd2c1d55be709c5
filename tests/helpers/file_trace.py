"""Which project files and functions a call passes through, in the order in which each is first entered."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("runtime", "graphs", "sampling")


@dataclass
class FileTrace:
    """The files of the core that were entered while `active`, relative to the repository root, and their functions."""

    active: bool = False
    files: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)  # "file:qualified name"
    _known: dict[CodeType, str] = field(default_factory=dict)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.active or event != "call" or frame.f_code in self._known:
            return
        code = frame.f_code
        path = _core_file(code.co_filename)
        self._known[code] = path
        # Class bodies and comprehensions are parts of the function around them.
        if not path or code.co_name in ("<module>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"):
            return
        if path not in self.files:
            self.files.append(path)
        name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
        self.functions.append(f"{path}:{name}")


@contextmanager
def file_trace(*, all_threads: bool = False) -> Iterator[FileTrace]:
    """Trace this thread, and with `all_threads` also the threads that are started inside the block. Set `active` to begin."""
    trace, before, before_threads = FileTrace(), sys.getprofile(), threading.getprofile()
    sys.setprofile(trace._profile)
    if all_threads:
        threading.setprofile(trace._profile)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        if all_threads:
            threading.setprofile(before_threads)


def _core_file(filename: str) -> str:
    """The path relative to the repository root of a file of the core, or ""."""
    try:
        relative = Path(filename).resolve().relative_to(ROOT)
    except ValueError:
        return ""
    return relative.as_posix() if relative.parts[0] in FOLDERS else ""
