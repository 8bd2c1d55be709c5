"""Untrusted inputs either work or are refused with an error that names the field: a fixed sample of mutated inputs, and every past failure.

python -m tests.fuzz --inputs 50000      # all entry points
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepgraph import SamplingParams
from stepgraph.runtime.request import StepEvent
from stepgraph.runtime.validate import RequestOptions
from stepgraph.sampling import fields, params
from stepgraph.sampling.grammar.compile import backends
from stepgraph.sampling.grammar.tokenizers import table
from tests.fuzz.doors import DOORS
from tests.fuzz.grammars import GrammarDoor, RegexDoor, SchemaDoor
from tests.fuzz.loop import Door, Find, attempt, fuzz
from tests.fuzz.reached import Reached
from tests.fuzz.requests import FIELDS, FIELDS_OF_SAMPLING
from tests.fuzz.server import HEAD, ServerDoor
from tests.fuzz.values import blob, built, bytes_of, form
from tests.fuzz.watch import Watch

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = sorted((ROOT / "tests" / "data" / "fuzz").glob("*.json"))
# Inputs per entry point in `make test`, including the seeds. Entry points that need an engine or a worker process cost more per input.
SAMPLE = {
    "sampling": 400,
    "constraint": 300,
    "ranks": 150,
    "states": 60,
    "safetensors": 25,
    "tokenizer": 40,
    "config": 20,
    "schema": 120,
    "regex": 30,
    "lark": 20,
    "response_format": 30,
}


@pytest.fixture(scope="module")
def doors() -> Iterator[Callable[[str], Door]]:
    """A function that opens each entry point once and returns it."""
    opened: dict[str, Door] = {}

    def door(name: str) -> Door:
        if name not in opened:
            opened[name] = DOORS[name]()
        return opened[name]

    yield door
    for each in opened.values():
        each.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name == "schema" else []) for name in SAMPLE])
def test_sample_of_inputs_is_refused_or_works(doors: Callable[[str], Door], name: str) -> None:
    report = fuzz(doors(name), SAMPLE[name])
    assert report.finds == [], report.finds[0]
    assert report.accepted + report.refused == SAMPLE[name] and report.accepted and report.refused


def test_every_field_of_a_request_is_mutated() -> None:
    assert {each.name for each in dataclasses.fields(SamplingParams)} == FIELDS_OF_SAMPLING
    assert RequestOptions.__annotations__.keys() | {"prompt"} == {*FIELDS}


@pytest.mark.parametrize("door", [SchemaDoor, RegexDoor])
def test_inputs_are_compiled_by_each_library(door: type[GrammarDoor]) -> None:
    fuzzed = door()
    found = (fuzzed.constraint(seed) for seed in fuzzed.seeds)
    assert {each.backend for each in found if each} == {*backends.available_backends()}


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_kept_inputs_are_refused_or_work(doors: Callable[[str], Door], case: Path) -> None:
    kept = json.loads(case.read_text(encoding="utf-8"))
    door = doors(kept["door"])
    found = attempt(door, kept["input"], Watch(door.allowed), Reached())
    assert not isinstance(found, Find), f"{kept['was']}\n{found}"


# Negative controls: a check that is patched out, by the kept input that must then fail.
PLANTED: dict[str, tuple[Any, str, Any]] = {
    "sampling_long_value": (fields, "clip_repr", repr),
    "constraint_ebnf_payload": (backends, "_grammar_of", lambda payload: json.loads(payload)[1]),
    "ranks_wide": (table, "MAX_IDS", 10**60),
}


@pytest.mark.parametrize("case", PLANTED)
def test_input_detects_its_removed_guard(doors: Callable[[str], Door], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[case])
    kept = json.loads((ROOT / "tests" / "data" / "fuzz" / f"{case}.json").read_text(encoding="utf-8"))
    door = doors(kept["door"])
    assert isinstance(attempt(door, kept["input"], Watch(door.allowed), Reached()), Find)


def test_search_finds_a_removed_guard(doors: Callable[[str], Door], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(params.CHECKS, "temperature", fields.optional(fields.Check(fields.is_number, "a number")))
    door = doors("sampling")
    monkeypatch.setattr(door, "seeds", [{"temperature": 0.7}])  # one field of many, so that few inputs suffice
    monkeypatch.setattr(door, "words", ["temperature"])
    report = fuzz(door, 1000)
    assert [find.what for find in report.finds if "a number that is not finite was accepted" in find.what]


@pytest.mark.parametrize("cancels", [True, False])
def test_job_may_outlive_its_answer_by_the_step_in_progress_only(
    doors: Callable[[str], Door], cancels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = doors("http")
    assert isinstance(door, ServerDoor)
    engine = door.engine
    step = engine.step

    def slow_step() -> Sequence[StepEvent]:
        time.sleep(0.02)  # the answer ends within a step
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    if not cancels:
        monkeypatch.setattr(engine.queue, "cancel", lambda job: False)
    body = b'{"prompt": "x", "max_tokens": 40, "ignore_eos": true}'
    raw = HEAD.replace(b"29", b"%d" % len(body)) + body  # after it the client leaves
    found = attempt(door, {"raw": blob(raw)}, Watch(door.allowed), Reached())
    assert found is False if cancels else isinstance(found, Find) and "tokens of jobs after their answers" in found.what


class Careless(Door):
    """An entry point with one forbidden effect per input."""

    name, words, named = "careless", ("a",), re.compile("field: ")
    seeds = ("a sentence without a name", "write", "start", "random", "another error", "bytes", "long")

    def enter(self, given: Any) -> None:
        if given == "write":
            Path("written").write_text("x")
        elif given == "start":
            subprocess.run(["true"], check=True)
        elif given == "random":
            os.environ["FUZZ_LEFT_BEHIND"] = "x"
        elif given == "another error":
            raise KeyError(given)
        elif given == "bytes":
            b"\xff".decode()
        raise ValueError("field: " * (1 if given != "long" else 1000) if given != self.seeds[0] else given)


def test_forbidden_effects_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUZZ_LEFT_BEHIND", "")
    monkeypatch.delenv("FUZZ_LEFT_BEHIND")
    door, watch, reached = Careless(), Watch(), Reached()
    found = {given: attempt(door, given, watch, reached) for given in Careless.seeds}
    expected = ("names no", "it did: open ", "it did: subprocess.Popen", "variables: ", "KeyError", "interpreter", "of 7000 characters")
    for given, sign in zip(Careless.seeds, expected, strict=True):
        find = found[given]
        assert isinstance(find, Find) and sign in find.what, find


def test_inputs_survive_serialisation() -> None:
    assert bytes_of(blob(b"\0ab")) == b"\0ab" and built(form("tuple", [1, form("pairs", [[2, 3]])])) == (1, {2: 3})
    again = [fuzz(DOORS["sampling"](), 60, seed=5) for _ in range(2)]
    assert again[0].lines == again[1].lines and again[0].accepted == again[1].accepted


@pytest.mark.soak
@pytest.mark.parametrize("name", DOORS)
def test_fifty_thousand_inputs_are_refused_or_work(name: str, tmp_path: Path) -> None:
    """Runs in a separate process, so that crashes and hangs are reported as failures."""
    result = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.fuzz", "--door", name, "--inputs", "50000", "--json", str(result)]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, result.read_text(encoding="utf-8")[:5000]
