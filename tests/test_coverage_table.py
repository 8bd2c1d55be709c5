"""COVERAGE.md lists existing files and functions, once each, and unlisted functions are reported."""

from __future__ import annotations

import re

import pytest

from tests.helpers.documents import ROOT
from tests.helpers.uncovered import MODULE, ROW, definitions, table, unlisted

TABLE = table()


@pytest.mark.parametrize("file", TABLE)
def test_listed_functions_exist(file: str) -> None:
    known = {name for name, _, _ in definitions((ROOT / file).read_text(encoding="utf-8"))}
    assert TABLE[file] - {MODULE} <= known and TABLE[file]


def test_rows_are_parsed_and_names_are_unique() -> None:
    text = (ROOT / "tests" / "COVERAGE.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == sum(line.startswith("| `") for line in text.splitlines()) > 0
    assert sum(len(re.findall(r"`[^`]+`", names)) for _, names in rows) == sum(map(len, TABLE.values()))


def test_unlisted_functions_are_reported_with_their_lines() -> None:
    file = "runtime/page_cache.py"
    lines = {name: range(first, last + 1) for name, first, last in definitions((ROOT / file).read_text(encoding="utf-8"))}
    take, free = lines["PageCache.allocate"], lines["PageCache.free"]
    report = {file: {"missing_lines": [1, take[2], take[3], free[1]]}}
    expected = f"{file}: PageCache.allocate: {take[2]}, {take[3]}"
    assert unlisted(report, {}) == [f"{file}: {MODULE}: 1", expected, f"{file}: PageCache.free: {free[1]}"]
    assert unlisted(report, {file: frozenset({MODULE, "PageCache.free"})}) == [expected]
    assert unlisted(report, {file: frozenset({MODULE, "PageCache"})}) == []
