"""COVERAGE.md names files and functions that are there, once each, and what it does not name is found."""

from __future__ import annotations

import re

import pytest

from tests.helpers.documents import ROOT
from tests.helpers.uncovered import MODULE, ROW, definitions, table, unlisted

TABLE = table()


@pytest.mark.parametrize("file", TABLE)
def test_every_function_of_the_table_is_there(file: str) -> None:
    known = {name for name, _, _ in definitions((ROOT / file).read_text(encoding="utf-8"))}
    assert TABLE[file] - {MODULE} <= known and TABLE[file]


def test_every_line_of_the_table_is_read_and_no_name_stands_twice() -> None:
    text = (ROOT / "tests" / "COVERAGE.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == sum(line.startswith("| `") for line in text.splitlines()) > 0
    assert sum(len(re.findall(r"`[^`]+`", names)) for _, names in rows) == sum(map(len, TABLE.values()))


def test_what_is_not_listed_is_told_with_its_lines() -> None:
    file = "runtime/page_cache.py"
    lines = {name: range(first, last + 1) for name, first, last in definitions((ROOT / file).read_text(encoding="utf-8"))}
    take, free = lines["PageCache.allocate"], lines["PageCache.free"]
    report = {file: {"missing_lines": [1, take[2], take[3], free[1]]}}
    told = f"{file}: PageCache.allocate: {take[2]}, {take[3]}"
    assert unlisted(report, {}) == [f"{file}: {MODULE}: 1", told, f"{file}: PageCache.free: {free[1]}"]
    assert unlisted(report, {file: frozenset({MODULE, "PageCache.free"})}) == [told]
    assert unlisted(report, {file: frozenset({MODULE, "PageCache"})}) == []
