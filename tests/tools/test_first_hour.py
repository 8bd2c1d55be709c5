"""The first hour of a user: its programs run, and take no more lines than with other libraries."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools import first_hour


@pytest.mark.parametrize("task", first_hour.PAGES)
def test_no_program_takes_more_lines_than_with_another_library(task: str) -> None:
    own, others = first_hour.our_program(task), first_hour.other_programs(task)
    assert all(0 < first_hour.count(own) <= first_hour.count(other) for other in others.values())
    assert all(len(line) <= 140 for program in (own, *others.values()) for line in program.splitlines())
    assert others or task.startswith("Your own"), "the headings of first_hour.md have these names"


def test_the_printed_lines_are_those_of_the_documentation() -> None:
    page = (first_hour.ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.split("| lines of code |")[1].splitlines()[2:7]]
    documented = [[re.sub(r"\[(.*)\]\(.*\)", r"\1", task), *counts] for task, *counts in rows]
    assert [re.split(r" {2,}", line) for line in first_hour.lines_table()[1:]] == documented


@pytest.mark.models
def test_the_first_hour_runs_from_an_empty_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert first_hour.run(tmp_path), capfd.readouterr().err
    printed = capfd.readouterr().out
    booking = printed.split("== JSON into a pydantic object")[1].split("\n")[1]
    assert booking == "nights=3 breakfast=False"
    users = printed.split("== A chat of 8 users in asyncio")[1].split("\n")[1]
    assert len(ast.literal_eval(users)) == 8
    assert (tmp_path / "site" / "stepgraph" / "__init__.py").exists() and "== the step from the shell" in printed
