"""Libraries of plain C that were built when the package was installed: found, held against the structs that they are called with."""

from __future__ import annotations

import functools
import importlib.machinery
import os
from collections.abc import Mapping
from ctypes import CDLL, POINTER, Structure, byref, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

from stepgraph.sampling.grammar.link.unavailable import Unavailable
from stepgraph.sampling.kernels.operation import Run

Functions = Mapping[str, type[Structure]]


def find_library(folder: Path, name: str) -> Path:
    if os.name != "posix":
        raise Unavailable(f"not on {os.name}")
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.exists():
            return path
    raise Unavailable("they were not built: there was no C compiler when stepgraph was installed")


def open_library(path: Path, functions: Functions, layout: str, wanted: tuple[int, ...], outside: str) -> CDLL:
    """Its `functions` take a struct each, and give 0, or 1 for an IndexError that says what lies `outside`. `layout` names the one
    that tells the sizes of the structs."""
    try:
        library = CDLL(str(path))
        found = _layout_of(library, layout)
        for name, struct in functions.items():
            function = getattr(library, name)
            function.argtypes, function.restype = (POINTER(struct),), c_int
            function.errcheck = functools.partial(_checked, outside)
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path.name} cannot be loaded: {error}") from error
    if found != wanted:
        raise Unavailable(f"{path.name} was built from other sources; install stepgraph again")
    return library


def prepared_call(function: Any, struct: Structure, tensors: tuple[Tensor, ...]) -> Run:
    run = functools.partial(function, byref(struct))
    run.__dict__["tensors"] = tensors  # kept: the struct names their memory
    return run


def fields(pointers: str, numbers: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in pointers.split()] + [(name, c_int64) for name in numbers.split()]


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layout_of(library: CDLL, name: str) -> tuple[int, ...]:
    values, tell = (c_int64 * 16)(), getattr(library, name)
    tell.argtypes, tell.restype = (POINTER(c_int64),), c_int64
    return tuple(values[: tell(values)])


def _checked(outside: str, code: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if code:
        raise IndexError(outside)
    return code
