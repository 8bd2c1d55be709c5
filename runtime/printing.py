"""Text for a terminal: control characters of model outputs, paths and quoted inputs are escaped. And warnings of running engines."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from typing import TextIO

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all control characters except tab and newline


def printable(text: str, stream: TextIO) -> str:
    """`text` with control characters written as escapes (\\x1b) if the stream is a terminal, otherwise unchanged.

    Model output and quoted input could otherwise retitle or clear the terminal, or write to its clipboard.
    """
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if stream.isatty() else text


def print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # the exit code is the one of the error that is reported
        print(printable(text, sys.stderr), file=sys.stderr)


def warn(message: str) -> None:
    """Warn of a loss with which requests continue, also if warnings are errors."""
    with contextlib.suppress(Warning):
        warnings.warn(message, RuntimeWarning, stacklevel=3)
