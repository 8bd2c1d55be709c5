"""`python -m tests.helpers.line_counts`: the counts of `tests/helpers/probes` as a data file of coverage, for its reports."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.documents import ROOT
from tests.helpers.probes.sitecustomize import CORE, COUNTS, LINES_PER_FILE, number_of


def lines_of(counts: Iterable[bytes]) -> dict[str, set[int]]:
    """By file of the core: the lines that any of the processes ran."""
    files = {number_of(str(file)): str(file) for folder in CORE for file in (ROOT / folder).rglob("*.py")}
    found: dict[str, set[int]] = {file: set() for file in files.values()}
    for number in set(itertools.chain.from_iterable(array("Q", each) for each in counts)):
        line = number % LINES_PER_FILE
        found[files[number - line]].add(line)
    return found


def main() -> None:
    from coverage import CoverageData  # not in every environment that runs the tests

    data = CoverageData(basename=str(ROOT / ".coverage"))
    data.erase()
    data.add_lines(lines_of(file.read_bytes() for file in Path(COUNTS).iterdir()))
    data.write()


if __name__ == "__main__":
    main()
