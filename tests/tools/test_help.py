"""Every tool has --help, and its examples parse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.documents import ROOT
from tests.helpers.tool_runs import parse_flags, run_tool

FILES = (*sorted((ROOT / "tools").glob("*.py")), *sorted((ROOT / "tools").glob("*/__main__.py")))
TOOLS = [path for path in FILES if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")]
EXAMPLE = re.compile(r"^ {4}(?:[A-Z_]+=\S+ )?python (?:tools/(\w+)\.py|-m tools\.(\w+))(.*)$", re.MULTILINE)


def name_of(path: Path) -> str:
    """For example `soak` for tools/soak/__main__.py."""
    return path.parent.name if path.stem == "__main__" else path.stem


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""


def examples() -> Iterator[Any]:
    """File and flags. `...` repeats the flags of the previous example; text after two blanks or `>` is a comment."""
    for path in TOOLS:
        before: list[str] = []
        for found in EXAMPLE.finditer(docstring_of(path)):
            assert name_of(path) in found.groups(), found[0]
            flags = re.split(r" {2,}| > ", found[3])[0].split()
            before = before + flags[1:] if flags[:1] == ["..."] else flags
            yield pytest.param(path, before, id=f"{name_of(path)} {' '.join(before)}")


@pytest.mark.parametrize("path", TOOLS, ids=name_of)
def test_help_prints_the_docstring(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_tool(path, ["--help"], monkeypatch)
    assert left.value.code == 0
    assert " ".join(docstring_of(path).split()) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("path", TOOLS, ids=name_of)
def test_flags_are_not_abbreviated(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_tool(path, ["--hel"], monkeypatch)
    assert left.value.code == 2 and not capsys.readouterr().out


@pytest.mark.parametrize(("path", "flags"), list(examples()))
def test_examples_parse(path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse_flags(path, flags, monkeypatch)
