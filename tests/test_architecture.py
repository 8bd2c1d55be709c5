"""docs/architecture.md lists the files that a value passes through, as a trace of a small engine finds them."""

from __future__ import annotations

import pytest

from tests.helpers import architecture

TEXT = architecture.PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def traced() -> dict[str, list[str]]:
    return {name: files() for name, files in architecture.LISTS.items()}


@pytest.mark.parametrize("name", architecture.LISTS)
def test_file_list_equals_a_new_trace(name: str, traced: dict[str, list[str]]) -> None:
    """If this fails after an intended change: python -m tests.helpers.architecture --write"""
    listed = TEXT.split(f"<!-- {name} -->\n")[1].split("\n<!-- end -->")[0]
    assert listed == architecture.table(traced[name])


@pytest.mark.parametrize(("name", "most"), [("constraint", 12), ("result", 12)])
def test_few_files_per_path(name: str, most: int, traced: dict[str, list[str]]) -> None:
    assert len(traced[name]) <= most
