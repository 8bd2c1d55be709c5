"""What comes from anywhere is refused by name or works: a fixed sample of changed inputs, and every one that once did otherwise.

python -m tests.fuzz --inputs 50000      # all doors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuzz.doors import DOORS
from tests.fuzz.loop import Door, Find, attempt, fuzz
from tests.fuzz.reached import Reached
from tests.fuzz.watch import Watch

ROOT = Path(__file__).resolve().parent.parent
CASES = sorted((ROOT / "tests" / "data" / "fuzz").glob("*.json"))
# How many inputs of each door `make test` tries, the seeds among them. Those with an engine or a worker behind them cost more.
SAMPLE = {
    "sampling": 400,
    "constraint": 300,
    "ranks": 200,
    "states": 100,
    "safetensors": 40,
    "tokenizer": 60,
    "config": 30,
    "draft": 20,
    "schema": 140,
    "regex": 40,
    "lark": 40,
    "response_format": 60,
}


@pytest.fixture(scope="module")
def doors() -> Iterator[Callable[[str], Door]]:
    """Each is opened once."""
    opened: dict[str, Door] = {}

    def door(name: str) -> Door:
        if name not in opened:
            opened[name] = DOORS[name]()
        return opened[name]

    yield door
    for each in opened.values():
        each.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_refused_by_name_or_works(doors: Callable[[str], Door], name: str) -> None:
    report = fuzz(doors(name), SAMPLE[name])
    assert report.finds == [], report.finds[0]
    assert report.accepted + report.refused == SAMPLE[name] and report.accepted and report.refused


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_what_was_found_once_is_refused_or_works(doors: Callable[[str], Door], case: Path) -> None:
    told = json.loads(case.read_text(encoding="utf-8"))
    door = doors(told["door"])
    found = attempt(door, told["input"], Watch(door.allowed), Reached())
    assert not isinstance(found, Find), f"{told['was']}\n{found}"
