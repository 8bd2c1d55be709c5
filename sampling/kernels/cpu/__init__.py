"""What a round decides of its rows on the CPU, in C: masked choices, masks that may be used, drafts that hold.

Each gives the bits of its reference in torch, which takes dozens of small operations for it, and stands in where the library was not
built. A call runs on the thread that makes it, without the GIL.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from stepgraph.sampling.grammar.link.unavailable import Unavailable
from stepgraph.sampling.kernels.cpu import calls
from stepgraph.sampling.kernels.cpu.loader import find_library, open_library
from stepgraph.sampling.kernels.operation import Prepare, Run

FOLDER = Path(__file__).parent
OUTSIDE = "a row, an id or a place lies outside of its table"


@functools.cache
def load() -> ctypes.CDLL | Unavailable:
    """The library of this installation, or why it cannot be used."""
    try:
        path = find_library(FOLDER, "_choices")
        return open_library(path, calls.FUNCTIONS, "stepgraph_choices_layout", calls.OWN_LAYOUT, OUTSIDE)
    except Unavailable as error:
        return error


def why_not() -> str:
    """Empty where it can be used."""
    library = load()
    return str(library) if isinstance(library, Unavailable) else ""


def prepared(prepare: Prepare) -> Prepare:
    """`prepare` with the library as its first argument; None for every call where there is no library."""

    def with_library(*arguments: object) -> Run | None:
        library = load()
        return None if isinstance(library, Unavailable) else prepare(library, *arguments)

    return with_library
