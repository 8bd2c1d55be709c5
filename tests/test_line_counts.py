"""The lines that probes count are those that a trace function sees, in every process."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.helpers.documents import ROOT
from tests.helpers.line_counts import lines_of
from tests.helpers.probes import sitecustomize as probes

FILE = str(ROOT / "graphs" / "round.py")  # the name under which the statements below are compiled
STATEMENTS = '''
"""A docstring."""
from __future__ import annotations

import contextlib


def same(function):
    return function


class Kind:
    """A docstring."""

    number: int = 1

    @same
    @staticmethod
    def method(value):
        """A docstring."""
        global seen
        seen = value
        return value


def branches(value):
    if value == 1:
        value += 1
    elif value == 2:
        value += 2
    else:
        value += 3
    for each in range(value):
        if each == 1:
            continue
        if each == 3:
            break
    else:
        value = 0
    while value:
        value -= 1
        with contextlib.suppress(KeyError):
            raise KeyError
    try:
        value.missing
    except AttributeError:
        value = 5
    else:
        value = 6
    finally:
        value += 1
    match value:
        case 1:
            return 1
        case 6 if value:
            return [lambda: 1, *(each for each in "ab")]
    return None


def never():
    return 2


async def later():
    async with contextlib.AsyncExitStack():
        return Kind.method(3)


branches(0), branches(1), branches(2)
with contextlib.suppress(StopIteration):
    later().send(None)
if seen: seen = 1
'''


def traced_lines() -> set[int]:
    found = set[int]()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename == FILE and event == "line":
            found.add(frame.f_lineno)
        return trace

    code, before = compile(STATEMENTS, FILE, "exec", dont_inherit=True), sys.gettrace()
    sys.settrace(trace)
    try:
        exec(code, {"__name__": "traced"})
    finally:
        sys.settrace(before)
    return found


def counted_lines(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    numbers, tree, base = dict[int, None](), ast.parse(STATEMENTS), probes.number_of(FILE)
    probes.add_probes(tree, FILE)
    monkeypatch.setattr(builtins, "__reached__", numbers, raising=False)
    exec(compile(tree, FILE, "exec", dont_inherit=True), {"__name__": "counted"})
    return {number - base for number in numbers if 0 < number - base < probes.LINES_PER_FILE}  # in `make coverage` others count, too


def test_probes_count_the_lines_that_a_trace_function_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.strip() for line in STATEMENTS.splitlines()]
    found = counted_lines(monkeypatch), traced_lines()
    counted, traced = ({lines[number - 1] for number in each} - {'"""A docstring."""'} for each in found)
    # A branch of `match`, or of `except`, is counted where it is taken, not where it is compared.
    assert traced - counted == {"case 1:"} and counted - traced == {"global seen"}
    assert {"number: int = 1", "@same", "elif value == 2:", "except AttributeError:", "case 6 if value:", "async def later():"} <= counted
    assert "return 2" in lines and "return 2" not in counted, "in a function that is never called"


def test_a_process_counts_the_lines_of_the_core_in_all_its_threads(tmp_path: Path) -> None:
    program = f"""
import sys, threading
import sitecustomize
sitecustomize.COUNTS = {str(tmp_path)!r}
import stepgraph.sampling.fields as fields
threading.Thread(target=lambda: fields.clip_repr("text")).start()
"""
    path = os.pathsep.join([str(Path(probes.__file__).parent), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=True)
    lines = lines_of([file.read_bytes() for file in tmp_path.iterdir()])
    assert {*lines} == {str(file) for folder in probes.CORE for file in (ROOT / folder).rglob("*.py")}
    assert not lines[FILE], "a file that was not imported"
    file = ROOT / "sampling" / "fields.py"
    functions = {each.name: each for each in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(each, ast.FunctionDef)}
    entered = {name for name, each in functions.items() if each.body[-1].lineno in lines[str(file)]}
    assert "clip_repr" in entered and "call" not in entered and {each.lineno for each in functions.values()} <= lines[str(file)]
