"""`pytest -m MARKER`: the files without a test of that marker, which are not imported."""

from __future__ import annotations

import functools
from pathlib import Path

HELPERS = Path(__file__).resolve().parent


def may_have(path: Path, marker: str) -> bool:
    """Whether a file may have tests with the marker: it names the marker, or a module of helpers that does."""
    return _names_any(path, _names_of(marker))


@functools.cache
def _names_of(marker: str) -> frozenset[str]:
    names, before = {f"mark.{marker}"}, 0
    while len(names) > before:
        before = len(names)
        names |= {f"helpers.{helper.stem}" for helper in HELPERS.glob("*.py") if _names_any(helper, frozenset(names))}
    return frozenset(names)


def _names_any(path: Path, names: frozenset[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(name in text for name in names)
