"""docs/errors.md is what tools/error_index.py generates."""

from __future__ import annotations

import functools
from dataclasses import fields

import pytest

from stepgraph import EngineConfig
from tools import error_index
from tools.error_index import Message

page = functools.cache(error_index.page)


def test_the_page_is_up_to_date() -> None:
    assert error_index.PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.error_index --write"


def test_messages_of_a_source() -> None:
    source = """
def step(path, size):
    if size:
        raise ValueError(f"{path}: got {size + 1} bytes, expected " "at most 3")
    if path:
        raise fail("host-sync", f"{path.name} blocks; use a buffer")
    check_value(f"{path}.size", size, optional(whole(1, 5)))
    check_value("path", path, PATH)
    raise RuntimeError(f"{size}: {path}")
PATH = Check(callable, "a path")
"""
    assert list(error_index.messages(source)) == [
        Message("`ValueError`", "{path}: got … bytes", "at most 3"),
        Message("CaptureError `host-sync`", "{name} blocks", "use a buffer"),
        Message("`ValueError`", "{path}.size: got …", "a whole number from 1 to 5, or None"),
        Message("`ValueError`", "path: got …", "a path"),
    ]


def test_settings_are_listed_with_what_they_accept() -> None:
    with pytest.raises(ValueError, match="page_size") as error:
        EngineConfig(page_size=0)
    expected = str(error.value).partition(", expected ")[2]
    assert f"| `EngineConfig.page_size` | {expected} |" in page()
    unlisted = {field.name for field in fields(EngineConfig) if f"| `EngineConfig.{field.name}` |" not in page()}
    assert unlisted == {"buckets"}, "its accepted values depend on max_rows"
