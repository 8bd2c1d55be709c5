"""INVARIANTS.md names tests that are there, at least one for each law, and the README has the same laws."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.helpers.documents import ROOT

NODE = re.compile(r"((?:\w+/)*test_\w+\.py)((?:::\w+)+)")
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
LAWS = range(1, 11)


def table(text: str) -> dict[int, tuple[str, list[str]]]:
    """By number: the law, and what stands between the back quotes of its row's last column."""
    return {int(number): (law, re.findall(r"`([^`]+)`", tests)) for number, law, tests in ROW.findall(text)}


@functools.cache
def defined_in(file: str) -> frozenset[str]:
    """As pytest names them: functions of the module, and methods of its classes, that begin with `test_`."""
    found = set[str]()
    for node in ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found |= {f"{node.name}::{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return frozenset(name for name in found if name.rsplit("::")[-1].startswith("test_"))


def wrong(laws: dict[int, tuple[str, list[str]]]) -> list[str]:
    """One line for each law that is missing, has no test, or names one that is not there."""
    found = [f"{number}: no test" for number in LAWS if not laws.get(number, ("", []))[1]]
    for number, (_, names) in laws.items():
        for name in names:
            node = NODE.fullmatch(name)
            if node is None or not (ROOT / "tests" / node[1]).exists() or node[2].removeprefix("::") not in defined_in(node[1]):
                found.append(f"{number}: {name}")
    return found


TABLE = table((ROOT / "tests" / "INVARIANTS.md").read_text(encoding="utf-8"))


def test_every_invariant_names_existing_tests() -> None:
    assert list(TABLE) == list(LAWS) and wrong(TABLE) == []


def test_readme_links_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](tests/INVARIANTS.md)" in readme and list(table(readme)) in ([], list(LAWS))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "3: no test"),
        (["laws/test_sampling_law.py::test_that_is_gone"], "3: laws/test_sampling_law.py::test_that_is_gone"),
        (["laws/test_sampling_law.py::TestControls::test_that_is_gone"], "3: laws/test_sampling_law.py::TestControls::test_that_is_gone"),
        (["laws/test_sampling_law.py"], "3: laws/test_sampling_law.py"),
        (["test_gone.py::test_gone"], "3: test_gone.py::test_gone"),
        (["laws/test_sampling_law.py::part"], "3: laws/test_sampling_law.py::part"),
    ],
)
def test_missing_test_name_is_reported(names: list[str], told: str) -> None:
    assert wrong({**TABLE, 3: ("a law", names)}) == [told]
