"""Counts lines per folder and file, and fails over budget: a file may have 300 lines; the core and each of its parts have their own.

The core is what every round goes through. Its parts are the things of which there may be many: kernels, grammars, models.
A file that needs more stands in the table below with its reason.
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
# 1,300 of the core are the tape, which stands in for a GPU; 1,100 are what drafts without models and what requests leave behind:
# look-up, forced tokens, users' functions, shared prefixes, saved states; 1,300 tell what happened: statistics, metrics, timelines,
# profiles; 500 serve event loops; 500 record what was asked, and ask it again;
# 350 are for graphs that cannot be captured and devices that hang; 250 say where tokens lie and which drafts stand, in one operation each;
# 150 are for forks, and for interpreters that end in the midst of things.
CORE_BUDGET = 11_200
# Attention is a kernel, its row tables, and the plans of another library. Of the grammars, 850 lines compile them, in a process of
# its own, under limits, into a cache; 100 read Lark as its library does, to see what would not hold; 130 compute what a grammar wants
# at the least; another 1,050 read tokenizers of five kinds, and drive llguidance, markers and checks from C. Commands are what the
# `stepgraph` command does besides parsing its flags; 300 lines are the doctor, who has to know every part by name, and what is lost
# without it; 90 are the replay of recordings; 50 are what a terminal is told while it waits.
# Of the CPU kernels, 200 lines are matrix products, which bring more speed than all others together; 150 spare a round half of its nodes.
# Of the sampling kernels, 350 lines are masked choices and acceptance in C for the CPU, and what loads it.
PARTS = {
    "graphs/attention_kernels": 800,
    "graphs/cpu_kernels": 1050,
    "sampling/kernels": 2350,
    "sampling/grammar": 7550,
    "runtime/commands": 1700,
    "runtime/models": 3000,
}

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
        """The core without its parts."""
        return sum(self.of(folder) for folder in CORE) - sum(self.of(part) for part in PARTS)

    @property
    def budgets(self) -> dict[str, tuple[int, int]]:
        """What has a budget of its own: lines, and how many it may have."""
        return {"core": (self.core, CORE_BUDGET)} | {part: (self.of(part), budget) for part, budget in PARTS.items()}


def count(root: Path) -> Count:
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in (".py", ".c", ".h"))
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
    found += [f"{name}: {lines} lines, budget {budget}" for name, (lines, budget) in counted.budgets.items() if lines > budget]
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
        print(json.dumps({"folders": folders, "budgets": counted.budgets, "files": counted.files, "over_budget": problems}, indent=2))
    else:
        for folder in FOLDERS:
            print(f"{counted.of(folder):6}  {folder}/")
            for path, lines in counted.files.items():
                if path.startswith(folder + "/"):
                    print(f"{lines:6}    {path}")
        for name, (lines, budget) in counted.budgets.items():
            print(f"{lines:6}  {name}, budget {budget}")
        print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
