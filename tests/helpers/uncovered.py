"""`python -m tests.helpers.uncovered FILE`: unexecuted lines of a `coverage json` report that COVERAGE.md does not list.

`make coverage` ends with it. The table names functions, because line numbers change. A name includes everything nested in it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.helpers.documents import ROOT

ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.+?) \| .+ \|$", re.MULTILINE)
MODULE = "the module"  # the lines that run on import
Table = dict[str, frozenset[str]]


def table() -> Table:
    """By file: the functions and classes with lines that no test runs."""
    rows = ROW.findall((ROOT / "tests" / "COVERAGE.md").read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {}
    for file, names in rows:
        found.setdefault(file, set()).update(re.findall(r"`([^`]+)`", names))
    return {file: frozenset(names) for file, names in found.items()}


def definitions(source: str) -> Iterator[tuple[str, int, int]]:
    """The qualified name of every function and class with its first and last line, outer ones first."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                yield name, child.lineno, child.end_lineno or child.lineno
                yield from below(child, name + ".")
            else:
                yield from below(child, prefix)

    yield from below(ast.parse(source), "")


def unlisted(files: Mapping[str, Mapping[str, object]], listed: Mapping[str, frozenset[str]]) -> list[str]:
    """One line per function with unexecuted lines that is not listed, neither itself nor an enclosing definition."""
    found = []
    for file, report in sorted(files.items()):
        known, lines = list(definitions((ROOT / file).read_text(encoding="utf-8"))), dict[str, list[int]]()
        missing = report["missing_lines"]
        assert isinstance(missing, list)
        for line in missing:
            around = [name for name, first, last in known if first <= line <= last]
            if not listed.get(file, frozenset()) & {MODULE if not around else "", *around}:
                lines.setdefault(around[-1] if around else MODULE, []).append(line)
        found += [f"{file}: {name}: {', '.join(map(str, numbers))}" for name, numbers in lines.items()]
    return found


def main(path: str) -> None:
    rest = unlisted(json.loads(Path(path).read_text(encoding="utf-8"))["files"], table())
    print(
        "\n".join(["not run, and not listed in tests/COVERAGE.md:", *rest])
        if rest
        else "all unexecuted lines are listed in tests/COVERAGE.md"
    )


if __name__ == "__main__":
    main(sys.argv[1])
