"""tools/gpu_check.py in rehearsal: every check passes on the tape, faults are reported, and the document matches its schema."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from stepgraph.sampling.grammar.link.native import NativeLibrary
from stepgraph.sampling.kernels.operation import OPERATIONS
from tests.helpers.c_library import needs_c
from tools.gpu.checks import link, short_kernels, smoke
from tools.gpu.checks.catalogue import CATALOGUE, FULL_SECONDS, QUICK_SECONDS, QUICK_SHARE, SMOKE, Entry
from tools.gpu.checks.context import Context
from tools.gpu.checks.document import GOALS, Goal, assess, compose, file_name, save
from tools.gpu.checks.supervisor import Row, Supervisor, rows

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCHEMA = json.loads((ROOT / "tools" / "results" / "gpu_check.schema.json").read_text(encoding="utf-8"))
FACTS = {"mode": "gpu", "device": "NVIDIA X100 (80 GB)", "date": "2026-11-20T08:00:00+00:00"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT, check=False)


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("tools/gpu_check.py", *arguments)


def document_of(result: subprocess.CompletedProcess[str]) -> Any:
    document = json.loads(result.stdout.strip().splitlines()[-1])
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


@needs_c
@pytest.mark.slow
def test_rehearsal_passes_and_ends_with_one_json_document() -> None:
    result = gpu_check("--rehearse", "--quick")
    document, lines = document_of(result), result.stdout.strip().splitlines()
    failed = [check for check in document["checks"] if check["verdict"] == "failed"]
    assert not failed, result.stderr
    assert result.returncode == 0
    assert (document["mode"], document["passed"], document["quick"], document["whole"]) == ("rehearsal", True, True, True)
    assert [check["name"] for check in document["checks"]] == [entry.name for entry in CATALOGUE]
    for check in document["checks"]:
        assert check["verdict"] in ("passed", "skipped")
        assert (check["verdict"] == "passed") == (check["error"] == ""), "a skipped check has a reason"
    for entry, line in zip(CATALOGUE, lines, strict=False):
        assert entry.name in line, "the table has one row per check, in order"
    for goal in document["goals"]:
        assert goal["verdict"] == "not run"
        assert goal["found"] is not None, f"{goal['name']}: the rehearsal measures it, too"


def test_failing_checks_do_not_stop_the_others(tmp_path: Path) -> None:
    result = run("-m", "tests.helpers.broken_checks", "--rehearse", "--out", str(tmp_path))
    document = document_of(result)
    assert result.returncode == 1 and document["passed"] is False
    assert [check["verdict"] for check in document["checks"]] == ["failed", "failed", "skipped", "failed", "passed", "crashed"]
    errors = [check["error"] for check in document["checks"]]
    assert errors[:3] == ["AssertionError: 3 bytes differ", "part 1: AssertionError: 3 bytes differ", "no such thing here"]
    assert errors[3].startswith("figures are not valid JSON") and errors[5] == "the worker was ended by SIGSEGV"
    assert document["checks"][1]["figures"] == {"part 0": True, "part 2": True}, "figures of the other parts are reported"
    assert document["checks"][4]["figures"] == {"count": 7}
    assert "output of a check" not in result.stdout
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text(encoding="utf-8")) == document


def test_document_survives_crash_hang_and_interrupt_of_the_worker(tmp_path: Path) -> None:
    """The worker is a small script without torch; a new one starts after every loss but the last."""
    result = run("tests/helpers/broken_worker.py", str(tmp_path))
    document = document_of(result)
    results = [(check["name"], check["verdict"]) for check in document["checks"]]
    assert results == [
        ("exits", "crashed"),
        ("answers", "passed"),
        ("hangs", "timed out"),
        ("loses_the_device", "passed"),
        ("is_a_new_worker", "passed"),
        ("is_interrupted", "interrupted"),
        ("answers", "not run"),
    ]
    assert document["checks"][0]["error"] == "the worker ended with exit code 7"
    assert document["passed"] is False and result.returncode == 1
    assert json.loads(next(tmp_path.iterdir()).read_text(encoding="utf-8")) == document


def test_killed_run_leaves_its_results(tmp_path: Path) -> None:
    assert run("tests/helpers/broken_worker.py", str(tmp_path), "answers", "exits", "is_killed").returncode == -signal.SIGKILL
    document = json.loads(next(tmp_path.iterdir()).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert [(check["name"], check["verdict"]) for check in document["checks"]] == [("answers", "passed"), ("exits", "crashed")]


def with_worker(entries: Sequence[Entry], seconds: float, *arguments: str) -> list[Row]:
    supervisor = Supervisor([sys.executable, "tests/helpers/broken_worker.py", *arguments, "--worker"], "tape", False)
    try:
        return list(rows(supervisor, entries, seconds))
    finally:
        supervisor.end()


def test_a_check_that_hangs_takes_no_time_from_later_checks() -> None:
    """The check is ended when only the budgets of the later checks are left."""
    results = with_worker([Entry(name, "none", 10.0) for name in ("answers", "hangs", "answers")], 3.0)
    assert [row["verdict"] for row in results] == ["passed", "timed out", "passed"]
    assert 0.9 < results[0]["budget"] <= 1.0, "its share, a third, of the 3 s"
    assert results[1]["seconds"] < 2.5, "the limit of the check itself is a minute"
    assert results[2]["budget"] > 0.9, "the same budget as before the hang"


@pytest.mark.slow
def test_the_start_of_a_worker_takes_no_time_from_a_check() -> None:
    """The start takes longer here than the budgets of all checks."""
    entries = [Entry(name, "none", 1.0) for name in ("exits", "answers")]
    results = with_worker(entries, 2.0, "--slow", "2.5")
    assert [row["verdict"] for row in results] == ["crashed", "passed"]
    assert results[1]["seconds"] < 2 and results[1]["budget"] > 0.9, "its budget is what is left of 2 s, at most 1 s"


def test_a_worker_that_cannot_be_started_again_is_not_started_for_every_check(tmp_path: Path) -> None:
    results = with_worker([Entry(name, "none", 1.0) for name in ("exits", "answers", "answers")], 60.0, "--once", str(tmp_path / "started"))
    assert [row["verdict"] for row in results] == ["crashed"] * 3
    assert [row["error"] for row in results] == ["the worker ended with exit code 7", *["the worker ended with exit code 1"] * 2]


def test_part_without_budget_is_reported_as_cut() -> None:
    spent = Context(rehearsal=False, quick=True, budget_seconds=1e-9)
    assert [spent.fits("one"), Context(rehearsal=True, quick=True, budget_seconds=1e-9).fits("two")] == [False, True]
    assert spent.cut == ["one"]


@pytest.mark.soak
def test_the_host_link_is_compiled_where_it_was_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host where stepgraph is not installed."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("CC", "false")
    assert link.compile_library(tmp_path).endswith("/false: exit code 1") and not list(tmp_path.glob("_native*"))
    monkeypatch.delenv("CC")
    monkeypatch.setenv("CFLAGS", "-O0")  # what is built here is loaded, but not timed
    assert link.compile_library(tmp_path) == ""
    library = NativeLibrary(tmp_path / "_native.so")
    assert library.node_address and library.with_gil.stepgraph_automaton_compile
    before = (tmp_path / "_native.so").stat().st_mtime_ns
    assert link.compile_library(tmp_path) == "" and (tmp_path / "_native.so").stat().st_mtime_ns == before, "compiled once"


@needs_c
def test_the_smoke_stage_reports_programs_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program runs in its own process. One that ends without a result fails the check, which reports the others."""
    context = Context(rehearsal=True, quick=True)
    assert "masked_argmax" in short_kernels.programs(torch.device("cpu"))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert smoke.every_program_equals_its_reference(context) == {"masked_argmax": "exit code 1: "}
    assert context.failures == ["masked_argmax: exit code 1: "]


@needs_c  # for the grammar of one of the calls
def test_the_smoke_stage_has_every_operation_with_a_program() -> None:
    """paged_attention is compared with a tolerance, under a name of its own."""
    names = set(short_kernels.programs(torch.device("cpu")))
    expected = {operation.name for operation in OPERATIONS.values() if operation.triton} - {"paged_attention"}
    assert {"scatter_masks", "choose_experts", "end_round"} <= expected <= names and "attention" in names


def test_a_check_repeats_as_often_as_its_budget_allows() -> None:
    assert len(list(Context(rehearsal=True, quick=True).turns(5))) == 5
    assert len(list(Context(rehearsal=True, quick=True, budget_seconds=1e-9).turns(5, least=2))) == 2


def test_the_budgets_of_all_checks_fit_into_a_run() -> None:
    spent = sum(entry.seconds for entry in CATALOGUE)
    assert spent <= 0.9 * FULL_SECONDS, f"{spent:.0f} s of {FULL_SECONDS:.0f}; making weights and loading kernels take time too"
    assert spent * QUICK_SHARE <= 0.9 * QUICK_SECONDS
    assert CATALOGUE[: len(SMOKE)] == SMOKE and sum(entry.seconds for entry in SMOKE) <= 60
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE)
    assert {goal.check for goal in GOALS} <= {entry.name for entry in CATALOGUE}


def test_goals_are_met_missed_or_not_run() -> None:
    most = Goal("gap", "measured", ("gap", "median"), 5.0, at_most=True)
    noisy = Goal("ratio", "measured", ("ratio",), 1.0, at_most=True, noise=("noise",))
    least = Goal("share", "measured", ("share",), 0.9)
    row = {
        "name": "measured",
        "verdict": "passed",
        "error": "",
        "figures": {"gap": {"median": 6}, "ratio": 1.01, "noise": 0.02, "share": 0.9},
    }
    verdicts = {goal.name: assess(goal, [row], False) for goal in (most, noisy, least)}
    assert {name: results["verdict"] for name, results in verdicts.items()} == {"gap": "missed", "ratio": "met", "share": "met"}
    assert verdicts["gap"]["reason"] == "found 6, expected <= 5"
    assert (
        assess(noisy, [{**row, "figures": {"ratio": 1.03, "noise": 0.02}}], False)["reason"] == "found 1.03, expected <= 1 + noise of 0.02"
    )
    assert assess(most, [{**row, "figures": {}, "error": "no GPU"}], False) | {"name": ""} == {
        "name": "", "expected": "<= 5", "found": None, "verdict": "not run", "reason": "no GPU"
    }  # fmt: skip
    assert assess(most, [], False)["reason"] == "its check was not selected"
    assert assess(least, [row], True)["verdict"] == "not run"
    failed = {**row, "verdict": "failed", "error": "half of it"}
    results = {goal.name: assess(goal, [failed], False) for goal in (most, least)}
    assert {name: (each["verdict"], each["found"]) for name, each in results.items()} == {"gap": ("missed", 6.0), "share": ("not run", 0.9)}
    assert results["share"]["reason"] == "its check failed: half of it", "parts that did not run may have been worse"


def test_document_is_saved_under_device_and_date(tmp_path: Path) -> None:
    document = compose(FACTS, (), quick=False, whole=True, seconds=1.0)
    path = save(document, tmp_path / "results")
    assert path.name == "nvidia-x100-80-gb-2026-11-20.json"
    assert json.loads(path.read_text(encoding="utf-8")) == document
    part = compose({**FACTS, "mode": "rehearsal", "device": "x86_64"}, (), quick=True, whole=False, seconds=1.0)
    assert file_name(part) == "x86-64-2026-11-20-rehearsal-quick-part.json"


@pytest.mark.slow
def test_an_unknown_name_and_a_missing_gpu_are_refused() -> None:
    unknown = gpu_check("--rehearse", "--only", "speed")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "--only: got speed, expected names of --list" in unknown.stderr
    if not torch.cuda.is_available():
        missing = gpu_check()
        assert missing.returncode == 2
        assert "sees no GPU here; --rehearse runs the same checks" in missing.stderr


def test_list_has_one_line_per_check(capsys: pytest.CaptureFixture[str]) -> None:
    from tools import gpu_check as tool

    assert tool.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [entry.name for entry in CATALOGUE]
    assert all(len(line.split()) > 3 for line in listed)
