"""Checks that go wrong in every way that gpu_check has to live with, and a run of them."""

from __future__ import annotations

import ctypes
import math
import sys

from tools import gpu_check
from tools.gpu.checks.catalogue import Entry

if __name__ != "__main__":  # the worker's side; the other one needs no torch
    from tools.gpu.checks.context import Context, Figures, Skipped


def breaks(context: Context) -> Figures:
    """Fails."""
    raise AssertionError("3 bytes differ")


def breaks_in_part(context: Context) -> Figures:
    """Fails in one part of three, and in none of the others."""
    for index in range(3):
        with context.part(f"part {index}"):
            assert index != 1, "3 bytes differ"
            context.found[f"part {index}"] = context.fits("the next one")
    return context.found


def lacks(context: Context) -> Figures:
    """Cannot be made here."""
    raise Skipped("no such thing here")


def means_nothing(context: Context) -> Figures:
    """Has a figure that is no JSON."""
    return {"ratio": math.nan}


def works(context: Context) -> Figures:
    """Passes, and prints where the document should stand alone."""
    print("a check's own words")
    return {"count": sum(1 for _ in context.turns(7))}


def dies(context: Context) -> Figures:
    """Takes its process with it."""
    ctypes.string_at(0)
    return {}


if __name__ == "__main__":
    names = ("breaks", "breaks_in_part", "lacks", "means_nothing", "works", "dies")
    sys.exit(gpu_check.main(sys.argv[1:], [Entry(name, "tests.helpers.broken_checks", 4.0) for name in names]))
