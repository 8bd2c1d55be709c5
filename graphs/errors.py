"""Errors of a step that cannot be recorded or replayed, and the line of the step that causes them."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NamedTuple

import torch

from stepgraph.graphs.memory import available_bytes

MEMORY_SETTINGS = "max_rows, buckets, num_speculative_tokens, max_length or num_pages; greedy_only=True halves the graphs"
_GRAPHS = os.path.dirname(os.path.abspath(__file__))
_SKIPPED_FILES = {
    contextlib.__file__,
    threading.__file__,
    os.path.join(os.path.dirname(_GRAPHS), "sampling", "cuda_graphs.py"),
    *(
        os.path.join(_GRAPHS, name)
        for name in ("backends.py", "buffer_spec.py", "buffers.py", "capture.py", "context.py", "errors.py", "memory.py")
    ),
}
_SKIPPED_FOLDERS = (
    *(os.path.join(_GRAPHS, name) + os.sep for name in ("tape", "cuda")),
    *(os.path.join(os.path.dirname(os.path.abspath(threading.__file__)), name) + os.sep for name in ("concurrent", "multiprocessing")),
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    "<eval_with_key>",  # code that torch.fx generates
    "<frozen",
)


class CaptureError(RuntimeError):
    """A step cannot be replayed as a graph. Names the rule and the line of the step that breaks it."""

    def __init__(self, rule: str, message: str, file: str = "", line: int = 0, source: str = "") -> None:
        super().__init__(rule, message, file, line, source)  # from which pickle makes the error again
        self.rule, self.message, self.file, self.line, self.source = rule, message, file, line, source

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}" + (f"\n  {self.file}:{self.line}\n    {self.source}" if self.file else "")


class HostNodeError(RuntimeError):
    """A host node raised an exception in a replay; the cause is chained."""

    def __init__(self, node: str, cause: BaseException) -> None:
        super().__init__(node, cause)  # from which pickle makes the error again
        self.node, self.__cause__ = node, cause

    def __str__(self) -> str:
        node, cause = self.args
        return f"host node {node!r} failed: {type(cause).__name__}: {cause}"


class StepError(RuntimeError):
    """A step raised an exception, which is chained. Names its line."""


class Site(NamedTuple):
    """A line of the step."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def site_of(innermost_first: Iterable[tuple[FrameType, int]]) -> Site:
    """The innermost line outside torch and the code that records."""
    for frame, line in innermost_first:
        if not _is_skipped(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, line)
    return Site("", 0)


def site_of_error(error: BaseException) -> Site:
    """The innermost line of the step that an exception was raised through."""
    return site_of(reversed(list(traceback.walk_tb(error.__traceback__))))


def call_site() -> Site:
    """The line of the step that runs now."""
    return site_of(traceback.walk_stack(sys._getframe(1)))


@functools.cache
def _is_skipped(file: str) -> bool:
    return file in _SKIPPED_FILES or file.startswith(_SKIPPED_FOLDERS)


def fail(rule: str, message: str, site: Site | None = None) -> CaptureError:
    """The error of a rule that the line at `site` breaks; None: the line that runs now."""
    file, line = site = site or call_site()
    return CaptureError(rule, message, file, line, site.source)


@contextlib.contextmanager
def step_errors(what: str, device: torch.device) -> Iterator[None]:
    """CaptureError if memory runs out, ValueError for an invalid model, StepError with the line for any other error of the step."""
    try:
        yield
    except (CaptureError, HostNodeError, StepError, ValueError):
        raise
    except Exception as error:
        site = site_of_error(error)
        # torch's CPU allocator raises a plain RuntimeError
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            wanted, free = re.search(r"allocate ([\d.]+ \w+)", str(error)), available_bytes(device)
            sizes = f"{wanted[1] if wanted else 'more'} wanted, {'?' if free is None else f'{free:,}'} bytes free on {device}"
            raise fail("memory", f"{what} needs more memory than available ({sizes}); lower {MEMORY_SETTINGS}", site) from error
        where = f"\n  {site}\n    {site.source}" if site.file else ""
        raise StepError(f"{what}: the step raised {type(error).__name__}: {error}{where}") from error
