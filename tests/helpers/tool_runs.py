"""Runs tools in this process, to the end or until their flags are parsed."""

from __future__ import annotations

import argparse
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest


class ParsedError(Exception):
    """The flags were accepted; the tool must not run."""


def run_tool(path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem in ("aot_kernels", "launch_bytes"):
        pytest.importorskip("triton")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    runpy.run_path(str(path), run_name="__main__")


def parse_flags(path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(*given: Any) -> None:
        parse(*given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    with pytest.raises(ParsedError):
        run_tool(path, flags, monkeypatch)


def examples(doc: str | None, name: str) -> list[list[str]]:
    """The arguments of each example in a --help, without redirections."""
    lines = [line.strip() for line in (doc or "").splitlines() if line.strip().startswith("python ")]
    return [shlex.split(line.split(" > ")[0].removeprefix(f"python tools/{name}")) for line in lines]
