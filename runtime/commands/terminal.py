"""What commands share of a terminal: help, colours, progress, and how a process leaves.

Exit codes: 0 done, 1 what was asked for failed, 2 bad input, 130 Ctrl-C, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TextIO

FAILED, BAD_INPUT, INTERRUPTED, UNREAD = 1, 2, 130, 141


class Command(Protocol):
    """A module of this package."""

    SUMMARY: str  # one line of `stepgraph --help`

    def add(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


def describe(parser: argparse.ArgumentParser, description: str, examples: Sequence[str]) -> None:
    """What --help says around the flags. Every example is run by a test."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = description.strip()
    parser.epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples)


def wants_colour(stream: TextIO) -> bool:
    """Only for eyes, and only for those that did not ask to be spared (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shows_progress() -> bool:
    """Bars go where errors go, so that a pipe carries the result alone."""
    return sys.stderr.isatty()


@contextlib.contextmanager
def waiting(told: str) -> Iterator[None]:
    """For what takes seconds and has no bar. What is printed meanwhile takes the words' place."""
    if not shows_progress():
        yield
        return
    print(told, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(told), end="\r", file=sys.stderr, flush=True)


def load_libraries(module: str = "stepgraph.runtime.engine") -> None:
    with waiting("loading libraries ..."):
        importlib.import_module(module)


def print_json(document: object) -> None:
    print(json.dumps(_plain(document), indent=2, ensure_ascii=not _writes_all(sys.stdout)))


def _plain(value: object) -> object:
    """What JSON has no word for, as its text: keys of graphs, reasons."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


def _mend_streams() -> None:
    """What a daemon closed is empty, or written nowhere; what a stream's encoding has no letter for is written as its number."""
    # in this order they take the places that were closed, which the next files opened would take otherwise
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and not _writes_all(sys.stdout):
        sys.stdout.reconfigure(errors="backslashreplace")


def _writes_all(stream: TextIO) -> bool:
    return (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")


def leave(name: str, work: Callable[[], int]) -> int:
    """Do a command's work; returns the exit code. A user's mistakes are told in a line, what is a bug keeps its traceback."""
    _mend_streams()
    try:
        with _everything_written():
            return work()
    except BrokenPipeError:
        # The interpreter flushes once more as it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\n" * sys.stdout.isatty() + f"{name}: interrupted", file=sys.stderr)  # an answer may stand there half
        return INTERRUPTED


@contextlib.contextmanager
def _everything_written() -> Iterator[None]:
    """Flush on the way out of a parser's SystemExit too: a closed pipe shows here or nowhere."""
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
