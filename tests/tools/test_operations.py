"""docs/operations.md is what tools/operations.py generates, and every kernel belongs to an operation."""

from __future__ import annotations

import re

import pytest

from stepgraph.sampling.kernels.operation import OPERATIONS
from tools import operations


def test_the_page_is_up_to_date() -> None:
    assert operations.PAGE.read_text(encoding="utf-8") == operations.page(), "run python -m tools.operations --write"


def test_every_operation_has_a_row_and_every_kernel_in_c_an_operation() -> None:
    page = operations.page()
    assert len(OPERATIONS) > 15
    assert all(f"| `{name.removeprefix('stepgraph::')}` |" in page for name in OPERATIONS)
    descriptions = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| `")]
    assert len(set(descriptions)) == len(descriptions) == len(OPERATIONS)
    sources = [path.read_text() for folder in operations.C_SOURCES for path in (operations.ROOT / folder).glob("*.c")]
    exported = {name for text in sources for name in re.findall(r"int stepgraph_(\w+)\(const argument", text)}
    of_replays = {"small_operation", "run_kernels", "call_host"}  # for operations of torch, for several kernels, and for host nodes
    assert exported == {found.c for found in OPERATIONS.values() if found.c} | of_replays


def test_a_missing_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    operations.load_all()
    monkeypatch.setattr(OPERATIONS["stepgraph::draw"], "name", "no_such_program")
    with pytest.raises(AssertionError, match="has no no_such_program"):
        operations.page()


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert operations.main([]) == 0
    assert capsys.readouterr().out == operations.page()
