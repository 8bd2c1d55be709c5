"""Counts lines per folder and file, and fails over budget: a file of the core may have 300 lines, the core 7,500.

The core is the runtime proper, its kernels and its grammar translators. A file that needs more stands in the table below with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("runtime", "graphs", "sampling")
FOLDERS = (*CORE, "tools", "tests")
FILE_BUDGET = 300
CORE_BUDGET = 7500

# path: (budget, reason)
LONGER: dict[str, tuple[int, str]] = {
    "tests/test_tape.py": (750, "one short test per promise of replay: order, memory, threads, recovery"),
    "tests/test_tape_rules.py": (900, "one snippet per thing that a graph cannot hold, each with the message that refuses it"),
}


@dataclass(frozen=True)
class Count:
    files: dict[str, int]  # path from the root: lines, blank ones and comments included

    def of(self, folder: str) -> int:
        return sum(lines for path, lines in self.files.items() if path.startswith(folder + "/"))

    @property
    def core(self) -> int:
        return sum(self.of(folder) for folder in CORE)


def count(root: Path) -> Count:
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return Count({path.relative_to(root).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in paths})


def over_budget(counted: Count, longer: dict[str, tuple[int, str]] = LONGER) -> list[str]:
    """One sentence per budget that is not kept, and per entry of the table that has no use any more."""
    found = []
    for path, lines in counted.files.items():
        budget, _ = longer.get(path, (FILE_BUDGET, ""))
        if lines > budget:
            found.append(f"{path}: {lines} lines, budget {budget}")
    for path, (_, reason) in longer.items():
        if not reason or counted.files.get(path, 0) <= FILE_BUDGET:
            found.append(f"{path}: listed as longer than {FILE_BUDGET} lines without a reason or a need")
    if counted.core > CORE_BUDGET:
        found.append(f"{' + '.join(CORE)}: {counted.core} lines, budget {CORE_BUDGET}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to count (default: this repository)")
    options = parser.parse_args(arguments)
    counted = count(options.root)
    problems = over_budget(counted)
    if options.json:
        folders = {folder: counted.of(folder) for folder in FOLDERS}
        print(json.dumps({"folders": folders, "core": counted.core, "files": counted.files, "over_budget": problems}, indent=2))
    else:
        for folder in FOLDERS:
            print(f"{counted.of(folder):6}  {folder}/")
            for path, lines in counted.files.items():
                if path.startswith(folder + "/"):
                    print(f"{lines:6}    {path}")
        print(f"{counted.core:6}  core, budget {CORE_BUDGET}")
        print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
