"""Long runs that the documents name, as records of commit, date and counts. `make soak` runs the same as tests.

python -m tests.helpers.long_runs schedules --json FILE     # 10,000 simulated schedules
python -m tests.helpers.long_runs masks --json FILE         # 20,000 masks per library and vocabulary
python -m tests.helpers.long_runs examples --json FILE      # 200 random examples per engine setup, against a plain loop
python -m tests.helpers.long_runs formats --json FILE       # 10,000 texts of each format of JSON Schema, against a validator
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from tqdm import tqdm

from stepgraph import Job
from stepgraph.sampling.grammar.compile.backends import BACKENDS
from stepgraph.sampling.grammar.schema.formats import FORMATS
from tests.graphs import test_proposing
from tests.helpers.format_texts import FORMAT_TEXTS, compare_format
from tests.helpers.simulation import run_many
from tests.helpers.toy_engines import Setup
from tests.helpers.vocabularies import VOCABULARIES
from tests.laws import test_greedy_oracle
from tests.laws.test_draft_chains import MASKS, walk_all
from tests.laws.test_simulation import PART, SCHEDULES
from tests.runtime import test_engine_processors
from tools.origin import origin

EXAMPLES = 200  # per setup
Oracle = tuple[list[Setup], Callable[[Setup, Any], list[Job]], SearchStrategy[Any]]  # setups, comparison of a batch, batches
ORACLES: dict[str, Oracle] = {
    "greedy": ([*test_greedy_oracle.ANYWHERE, *test_greedy_oracle.LOOPS], test_greedy_oracle.run_schedule, test_greedy_oracle.batches),
    "proposers": ([*test_proposing.SETUPS, *test_proposing.MORE_SETUPS], test_greedy_oracle.run_schedule, test_proposing.batches),
    "processors": (test_engine_processors.SETUPS, test_engine_processors.run_batch, test_engine_processors.batches),
}


def schedules(count: int, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A Failure names the first schedule that is wrong."""
    total = Counter[str](kept.get("counts", {}))
    with tqdm(total=count, disable=not sys.stderr.isatty()) as bar:
        for first in range(total["schedules"], count, PART):
            total.update(run_many(range(first, min(first + PART, count))))
            bar.update(total["schedules"] - bar.n)
            yield {"first_seed": 0, "counts": dict(total)}


def masks(count: int, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = kept.get("masks", [])
    for name, backend in list(product(VOCABULARIES, BACKENDS))[len(found) :]:
        walkers = walk_all(name, backend, count, 7)
        names = ("num_masks", "differences", "illegal", "ends", "rollbacks")
        sums = {key: sum(getattr(each, key) for each in walkers) for key in names}
        found.append({"vocabulary": name, "library": backend, "grammars": len(walkers)} | sums)
        yield {"masks": found}


def name_of(setup: Setup) -> str:
    """The fields that differ from the defaults."""
    values = {field.name: getattr(setup, field.name) for field in fields(setup) if getattr(setup, field.name) != field.default}
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def examples_of(oracle: str, setup: Setup, count: int) -> Counter[str]:
    _, run, batches = ORACLES[oracle]
    sums = Counter[str]()

    # without shrinking: the tests of these oracles find the same wrong output and shrink the batch
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
    @seed(0)
    @given(batch=batches)
    def check(batch: Any) -> None:
        jobs = run(setup, batch)
        sums.update(examples=1, jobs=len(jobs), tokens=sum(len(job.tokens) for job in jobs))

    check()
    return sums


def examples(count: int, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = kept.get("setups", [])
    pairs = [(oracle, setup) for oracle, (setups, *_) in ORACLES.items() for setup in setups]
    for oracle, setup in tqdm(pairs[len(found) :], unit="setup", disable=not sys.stderr.isatty()):
        found.append({"oracle": oracle, "setup": name_of(setup)} | examples_of(oracle, setup, count))
        yield {"setups": found}


def formats(count: int, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = kept.get("formats", {})
    for name in tqdm([name for name in FORMATS if name not in found], unit="format", disable=not sys.stderr.isatty()):
        found[name] = compare_format(name, count, 2)
        yield {"formats": found}


RUNS: dict[str, tuple[Callable[[int, dict[str, Any]], Iterator[dict[str, Any]]], int]] = {
    "schedules": (schedules, SCHEDULES),
    "masks": (masks, MASKS),
    "examples": (examples, EXAMPLES),
    "formats": (formats, FORMAT_TEXTS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=[*RUNS])
    parser.add_argument("--count", type=int, help=f"default: {', '.join(f'{count} {name}' for name, (_, count) in RUNS.items())}")
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="written after each part; a file of the same commit is continued"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    run, count = RUNS[options.run]
    document, begun = {"what": options.run, **origin(), "count": options.count or count}, time.process_time()
    kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    if "+" not in document["commit"] and all(kept.get(name) == document[name] for name in ("what", "commit", "count")):
        document = kept
    before = document.get("processor_seconds", 0.0)
    for found in run(document["count"], document):
        document |= found | {"processor_seconds": round(before + time.process_time() - begun, 1)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(each["differences"] for each in document.get("masks", ())))


if __name__ == "__main__":
    sys.exit(main())
