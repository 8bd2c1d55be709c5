"""Counts the lines of the core that each process runs, for `make coverage`, which puts this folder on PYTHONPATH.

A module of the core gets an assignment before each statement when it is imported. A call would be seen by profile functions, and at one
Ctrl-C can interrupt. A trace function, as `coverage run` sets it on Python below 3.12, makes the interpreter 2 to 3.5 times as slow, in
tests and libraries too and even if no file is measured.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import marshal
import os
import sys
import time
import zlib
from array import array
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
CORE = ("graphs", "runtime", "sampling")
COUNTS = os.path.join(ROOT, "build", "lines")  # one file per process
_COMPILED = os.path.join(ROOT, "build", "probed")  # modules with probes, as a __pycache__
LINES_PER_FILE = 1 << 16
_VERSION = f"{os.stat(__file__).st_mtime_ns}-{sys.implementation.cache_tag}"  # of the probes
_reached = dict[int, None]()


def number_of(file: str) -> int:
    """Identifies a file, by its path from the root, in the numbers that probes count."""
    return zlib.crc32(_from_root(file).encode()) * LINES_PER_FILE


def in_core(file: str) -> bool:
    return _from_root(file).partition(os.sep)[0] in CORE


def _from_root(file: str) -> str:
    return os.path.relpath(os.path.realpath(file), ROOT)


def add_probes(tree: ast.AST, file: str) -> None:
    """Put an assignment with the number of its line before each statement, and into each branch of an `except` or `case`."""
    import ast

    base = number_of(file)

    def probe(line: int, at: ast.AST) -> ast.stmt:
        entry = ast.Subscript(ast.Name("__reached__", ast.Load()), ast.Constant(base + line), ast.Store())
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([entry], ast.Constant(None)), at))

    def probed(body: Sequence[ast.stmt], first: Sequence[ast.stmt] = ()) -> list[ast.stmt]:
        statements = list(first)
        for place, each in enumerate(body):
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and place == 0  # a docstring has to stay first
            lines = {each.lineno, *(decorator.lineno for decorator in getattr(each, "decorator_list", ()))} if not is_text else ()
            probes = [probe(line, each) for line in sorted(lines)]
            is_first = isinstance(each, ast.ImportFrom) and each.module == "__future__"  # nothing may be before it
            statements += [each, *probes] if is_first else [*probes, each]
            within(each)
        return statements

    def within(node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                setattr(node, name, probed(body))
        for handler in getattr(node, "handlers", ()):
            handler.body = probed(handler.body, [probe(handler.lineno, handler)])
        for case in getattr(node, "cases", ()):
            case.body = probed(case.body, [probe(case.pattern.lineno, case.pattern)])

    within(tree)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__reached__"] = _reached  # until the module is cleared, at the exit of the interpreter after the built-in names
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        status = os.stat(self.path)
        version = f"{status.st_mtime_ns}-{status.st_size}-{_VERSION}"
        kept = os.path.join(_COMPILED, f"{zlib.crc32(self.path.encode()):x}-{version}")
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError), open(kept, "rb") as file:
            code: CodeType = marshal.load(file)
            return code
        import ast

        tree = ast.parse(self.get_data(self.path))
        add_probes(tree, self.path)
        code = compile(tree, self.path, "exec", dont_inherit=True)
        with contextlib.suppress(OSError):
            os.makedirs(_COMPILED, exist_ok=True)
            with open(f"{kept}.{os.getpid()}", "wb") as file:
                marshal.dump(code, file)
            os.replace(f"{kept}.{os.getpid()}", kept)
        return code


class _Finder:
    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not fullname.startswith("stepgraph."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader or spec.origin is None:
            return spec
        if in_core(spec.origin):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _write() -> None:
    if _reached:  # other threads may still add lines
        os.makedirs(COUNTS, exist_ok=True)
        with open(os.path.join(COUNTS, f"{os.getpid()}-{time.time_ns()}"), "wb") as file:
            array("Q", list(_reached)).tofile(file)


def _write_and_exit(status: int, exit: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Instead of `os._exit`, with which ranks and forked processes end."""
    _write()
    exit(status)


if __name__ == "sitecustomize":  # imported by the interpreter at its start
    builtins.__reached__ = _reached  # type: ignore[attr-defined] # for `python -m`, which has a namespace of its own
    sys.meta_path.insert(0, _Finder)
    atexit.register(_write)
    os._exit = _write_and_exit
