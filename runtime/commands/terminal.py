"""Terminal output of the commands: help, colours, progress, escaping, and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar

from stepgraph.runtime.printing import CONTROL, print_error, printable

Document = TypeVar("Document")
FAILED, BAD_INPUT, INTERRUPTED, OUTPUT_CLOSED = 1, 2, 130, 141
ORIGINS = {"draft": "from the draft", "look_up": "looked up in the text", "forced": "forced by the grammar", "target": "from the target"}
ORIGIN_COLOURS = {"draft": "\x1b[32m", "look_up": "\x1b[36m", "forced": "\x1b[35m", "target": "\x1b[1m"}


class Parser(argparse.ArgumentParser):
    """Escapes control characters of quoted arguments in error messages. Flags are not abbreviated: --n would be --no-chat."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status, printable(message, sys.stderr) if message else None)


def colour_enabled(stream: TextIO) -> bool:
    """Whether the stream is a terminal with colours that NO_COLOR (https://no-color.org) does not turn off."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shows_progress() -> bool:
    """Whether stderr is a terminal. Progress bars are written there, so that a pipe receives the result only."""
    return sys.stderr.isatty()


def coloured(text: str, origin: str) -> str:
    return f"{ORIGIN_COLOURS[origin]}{text}\x1b[0m"


def print_text(text: str, end: str = "\n", origin: str = "") -> None:
    """Print to stdout, in the colour of `origin` if it is given and colours are enabled."""
    text = printable(text, sys.stdout)
    print(coloured(text, origin) if origin and text and colour_enabled(sys.stdout) else text, end=end, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column left-aligned and the others right-aligned."""
    widths = [max(8, *map(len, column)) + 2 for column in zip(head, *rows, strict=True)]
    lines = []
    for name, *cells in (head, *rows):
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("".join([f"{name:<{widths[0]}}", *numbers]).rstrip())
    return lines


def report_failures(command: str, failures: Iterable[str]) -> int:
    """Print the failures to stderr. Returns the exit code."""
    code = 0
    for failure in failures:
        print_error(f"stepgraph {command}: {failure}")
        code = FAILED
    return code


@contextlib.contextmanager
def waiting(message: str) -> Iterator[None]:
    """Show `message` while a step runs that takes seconds and has no progress bar."""
    if not shows_progress():
        yield
        return
    print(message, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(message), end="\r", file=sys.stderr, flush=True)


@contextlib.contextmanager
def keeping_interrupt() -> Iterator[None]:
    """Interrupt at the end of a block, too: code that torch runs at its import drops some KeyboardInterrupts."""
    dropped = list[int]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        dropped.append(number)
        signal.default_int_handler(number, frame)

    replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if replaced:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if dropped:
        raise KeyboardInterrupt


def print_json(document: object) -> None:
    """Print the document as JSON. Values without a JSON type become strings."""
    encodes_everything = (sys.stdout.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    text = json.dumps(document, indent=2, default=str, ensure_ascii=not encodes_everything)
    print(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))  # json.dumps leaves U+007F to U+009F


def print_document(document: Document, as_json: bool, lines: Callable[[Document], Iterable[str]]) -> None:
    """Print the document as JSON, or its lines for people."""
    if as_json:
        print_json(document)
    else:
        print_text("\n".join(lines(document)))


def _repair_streams() -> None:
    """Replace closed standard streams by the null device, and escape control characters of warnings and what stdout's encoding lacks."""
    # Opened in this order, they take the closed file descriptors 0, 1 and 2; otherwise files opened later would take these.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - stays open until the process ends
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr.isatty():
        warnings.showwarning = lambda *warning: print_error(warnings.formatwarning(*warning[:4]).rstrip())
    if isinstance(sys.stdout, io.TextIOWrapper):  # UTF-8 lacks the surrogates that stand for other bytes of a path
        sys.stdout.reconfigure(errors="backslashreplace")


def run_command(name: str, work: Callable[[], int]) -> int:
    """Run `work` and return the exit code. Bad input becomes one line on stderr, another exception its traceback."""
    _repair_streams()
    try:
        try:
            return work()
        finally:  # also after a parser's SystemExit: a closed pipe raises here or not at all
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout again when it exits and would report the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except (ValueError, OSError) as error:
        print_error(f"{name}: {error}")
        return BAD_INPUT
    except Exception:  # an error of the program: its message may quote input
        print_error(traceback.format_exc().rstrip())
        return FAILED
    except KeyboardInterrupt:
        print_error("\n" * sys.stdout.isatty() + f"{name}: interrupted")  # the cursor may be inside a line of the answer
        return INTERRUPTED
