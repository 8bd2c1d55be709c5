"""INVARIANTS.md names only existing tests, at least one for each invariant, and the README lists the same invariants."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.helpers.documents import ROOT

NODE = re.compile(r"((?:\w+/)*test_\w+\.py)((?:::\w+)+)")
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
NUMBERS = range(1, 11)


def table(text: str) -> dict[int, tuple[str, list[str]]]:
    """The invariant and the test names (in back quotes in the last column) by row number."""
    return {int(number): (invariant, re.findall(r"`([^`]+)`", tests)) for number, invariant, tests in ROW.findall(text)}


@functools.cache
def defined_in(file: str) -> frozenset[str]:
    """Test functions and methods of a file, as named in pytest node ids."""
    found = set[str]()
    for node in ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found |= {f"{node.name}::{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return frozenset(name for name in found if name.rsplit("::")[-1].startswith("test_"))


def wrong(invariants: dict[int, tuple[str, list[str]]]) -> list[str]:
    """One line for each invariant that is missing, has no test, or names a test that does not exist."""
    found = [f"{number}: no test" for number in NUMBERS if not invariants.get(number, ("", []))[1]]
    for number, (_, names) in invariants.items():
        for name in names:
            node = NODE.fullmatch(name)
            if node is None or not (ROOT / "tests" / node[1]).exists() or node[2].removeprefix("::") not in defined_in(node[1]):
                found.append(f"{number}: {name}")
    return found


TABLE = table((ROOT / "tests" / "INVARIANTS.md").read_text(encoding="utf-8"))


def test_every_invariant_names_existing_tests() -> None:
    assert list(TABLE) == list(NUMBERS) and wrong(TABLE) == []


def test_readme_links_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](tests/INVARIANTS.md)" in readme and not table(readme), "only one table is checked"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "3: no test"),
        (["laws/test_sampling_law.py::test_that_is_gone"], "3: laws/test_sampling_law.py::test_that_is_gone"),
        (["laws/test_sampling_law.py::TestControls::test_that_is_gone"], "3: laws/test_sampling_law.py::TestControls::test_that_is_gone"),
        (["laws/test_sampling_law.py"], "3: laws/test_sampling_law.py"),
        (["test_gone.py::test_gone"], "3: test_gone.py::test_gone"),
        (["laws/test_sampling_law.py::part"], "3: laws/test_sampling_law.py::part"),
    ],
)
def test_missing_test_name_is_reported(names: list[str], expected: str) -> None:
    assert wrong({**TABLE, 3: ("an invariant", names)}) == [expected]
