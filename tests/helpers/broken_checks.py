"""Checks that fail in every way that gpu_check must handle, and a run of them."""

from __future__ import annotations

import ctypes
import math
import sys

from tools import gpu_check
from tools.gpu.checks.catalogue import Entry

if __name__ != "__main__":  # in the worker; the supervisor does not import torch
    from tools.gpu.checks.context import Context, Figures, Skipped


def breaks(context: Context) -> Figures:
    """Fails."""
    raise AssertionError("3 bytes differ")


def breaks_in_part(context: Context) -> Figures:
    """Fails in one of three parts."""
    for index in range(3):
        with context.part(f"part {index}"):
            assert index != 1, "3 bytes differ"
            context.figures[f"part {index}"] = context.fits("the next one")
    return context.figures


def lacks(context: Context) -> Figures:
    """Is skipped."""
    raise Skipped("no such thing here")


def means_nothing(context: Context) -> Figures:
    """Returns a figure that is not valid JSON."""
    return {"ratio": math.nan}


def works(context: Context) -> Figures:
    """Passes, and prints to stdout."""
    print("output of a check")
    return {"count": sum(1 for _ in context.turns(7))}


def dies(context: Context) -> Figures:
    """Crashes its process."""
    ctypes.string_at(0)
    return {}


if __name__ == "__main__":
    names = ("breaks", "breaks_in_part", "lacks", "means_nothing", "works", "dies")
    sys.exit(gpu_check.main(sys.argv[1:], [Entry(name, "tests.helpers.broken_checks", 4.0) for name in names]))
