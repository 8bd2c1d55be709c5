"""The C library of the package: built when the package is installed on a machine with a C compiler, loaded with ctypes.

It holds the automata of grammars (grammar/automaton/c) and their host link (grammar/link/c), token choice (kernels/c), and model layers on
the CPU (graphs/layers/c). Without it grammars are driven from Python, and the operations run in torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import struct
from ctypes import c_char_p, c_int64
from pathlib import Path

from stepgraph.sampling.c_declarations import LINK_LAYOUT, declare

FOLDER = Path(__file__).parent
VERSION = 22  # of the argument struct and of the behaviour of the kernels; native.h has the same number


class Unavailable(Exception):
    """Why the library, or a part of it, cannot be used here. Shown in warnings and in the capture report."""


# One argument of a kernel, a tensor or a number, as `argument` in kernels/c/native.h: address (0 for None), four sizes, four strides in
# elements, whether elements are bfloat16, the number as an integer and as a double.
ARGUMENT = struct.Struct("=Q4q4qqqd")
LAYOUTS = {"stepgraph_kernel_sizes": (VERSION, ARGUMENT.size), "stepgraph_link_sizes": LINK_LAYOUT}  # arrays in the library


def find_library(folder: Path = FOLDER) -> Path:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if path.exists():
            return path
    if (folder.parent / "setup.py").exists():
        raise Unavailable(f"it was not built in this checkout: cd {folder.parent} && python setup.py build_ext --inplace")
    raise Unavailable("it was not built: there was no C compiler when stepgraph was installed")


def open_library(path: Path) -> ctypes.CDLL:
    """The library at `path`; Unavailable if it cannot be loaded or was built from other sources."""
    try:
        library = ctypes.CDLL(str(path))
        declare(library)
        found = {name: tuple((c_int64 * len(expected)).in_dll(library, name)) for name, expected in LAYOUTS.items()}
    except (OSError, AttributeError, ValueError) as error:
        raise Unavailable(f"{path.name} cannot be loaded: {error}") from error
    if found != LAYOUTS:
        raise Unavailable(f"{path.name} was built from other sources; install stepgraph again")
    return library


@functools.cache
def load() -> ctypes.CDLL | Unavailable:
    """The library of this installation, or the reason why it cannot be used. Raise the reason as a new error: a stored error keeps the
    frames through which it was raised, and everything that they refer to."""
    try:
        return open_library(find_library())
    except Unavailable as error:
        return Unavailable(str(error))


def why_not() -> str:
    """Why the library cannot be used; empty if it can."""
    library = load()
    return str(library) if isinstance(library, Unavailable) else ""


def kernel(name: str) -> ctypes._NamedFuncPointer | None:
    """The function stepgraph_`name` of packed arguments, which raises CallError for an index outside its table; None without library."""
    library = load()
    return None if isinstance(library, Unavailable) else _kernel_function(library, name)


@functools.lru_cache(maxsize=1)
def use_threads(count: int) -> None:
    """Set the number of threads of matrix products, including the calling thread. The cache skips a call that repeats the last count."""
    library = load()
    if not isinstance(library, Unavailable):
        library.stepgraph_use_threads(c_int64(count))


@functools.cache
def _kernel_function(library: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
    function = library[f"stepgraph_{name}"]
    function.argtypes, function.restype = (c_char_p,), _ReturnCodes(name).__getitem__
    return function


class CallError(IndexError):
    """An index outside a kernel's table; `number`: the failed call, among calls that ran as one."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name}: an index lies outside of its table")
        self.number = number


class _ReturnCodes(dict[int, int]):
    """Return codes of a kernel: 0; any other raises CallError. A dict, because a Python function takes longer than some kernels."""

    def __init__(self, name: str) -> None:
        super().__init__({0: 0})
        self._name = name

    def __missing__(self, code: int) -> int:
        raise CallError(self._name, code - 1)
