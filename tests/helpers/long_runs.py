"""Long runs that the documents name, as records of commit, date and counts. `make soak` runs the same as tests.

python -m tests.helpers.long_runs schedules --json FILE     # 10,000 simulated schedules
python -m tests.helpers.long_runs masks --json FILE         # 20,000 masks per library and vocabulary
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stepgraph.sampling.grammar.compile.backends import BACKENDS
from tests.helpers.simulation import run_many
from tests.helpers.vocabularies import VOCABULARIES
from tests.laws.test_draft_chains import MASKS, walk_all
from tests.laws.test_simulation import PART, SCHEDULES
from tools.origin import origin


def schedules(count: int) -> Iterator[dict[str, Any]]:
    """A Failure names the first schedule that is wrong."""
    total = Counter[str]()
    with tqdm(total=count, disable=not sys.stderr.isatty()) as bar:
        for first in range(0, count, PART):
            total.update(run_many(range(first, min(first + PART, count))))
            bar.update(total["schedules"] - bar.n)
            yield {"first_seed": 0, "counts": dict(total)}


def masks(count: int) -> Iterator[dict[str, Any]]:
    found = []
    for name in VOCABULARIES:
        for backend in BACKENDS:
            walkers = walk_all(name, backend, count, 7)
            names = ("num_masks", "differences", "illegal", "ends", "rollbacks")
            sums = {key: sum(getattr(each, key) for each in walkers) for key in names}
            found.append({"vocabulary": name, "library": backend, "grammars": len(walkers)} | sums)
            yield {"masks": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=["schedules", "masks"])
    parser.add_argument("--count", type=int, help=f"default: {SCHEDULES} schedules, {MASKS} masks per library and vocabulary")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="written after each part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    document, begun = {"what": options.run, **origin()}, time.process_time()
    for found in schedules(options.count or SCHEDULES) if options.run == "schedules" else masks(options.count or MASKS):
        document |= found | {"processor_seconds": round(time.process_time() - begun, 1)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(each["differences"] for each in document.get("masks", ())))


if __name__ == "__main__":
    sys.exit(main())
