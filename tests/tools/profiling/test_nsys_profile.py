"""tools/nsys_profile.py as a process on the tape, its nsys command line, and profiling set by the environment."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stepgraph import Constraint, Engine, EngineConfig
from stepgraph.runtime import profiled
from stepgraph.runtime.in_flight import InFlight
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tests.helpers import nsys_files
from tests.helpers.tool_runs import examples
from tests.helpers.toy_engines import VOCABULARY, finish
from tools import nsys_profile, nsys_report
from tools.profiling import command

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCHEMA = json.loads((ROOT / "tests" / "data" / "profile_report.schema.json").read_text())
GOLDEN = {  # flags for nsys, and their reasons
    "--trace=cuda,nvtx": "launches, nodes and the ranges of stages and rounds",
    "--cuda-graph-trace=node": "the default shows a graph as a whole, without stages",
    "--capture-range=cudaProfilerApi": "the engine starts and stops the recording",
    "--capture-range-end=repeat:2": "two ranges: the capture, then the rounds",
    "--sample=none": "nothing interrupts the host nodes",
    "--cpuctxsw=none": "nothing interrupts the host nodes",
    "--wait=primary": "does not wait for grammar workers",
    "--force-overwrite=true": "a second run may use the same name",
    "--output=/tmp/p": "where the reports go",
}


def tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "tools" / "nsys_profile.py"), *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, cwd=ROOT.parent
    )


def test_nsys_command_has_the_flags_the_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert nsys_profile.main(["--rounds", "5-9", "--out", "/tmp/p", "--print", "--", "serve.py", "--port", "80 00"]) == 0
    *why, line = capsys.readouterr().out.splitlines()
    words = shlex.split(line)
    variables, (nsys, profile, *rest) = words[:4], words[4:]
    assert variables == [
        "STEPGRAPH_PROFILE_ROUNDS=5-9",
        "STEPGRAPH_PROFILE_FILE=/tmp/p.rounds.json",
        "STEPGRAPH_PROFILE_WITH=nsys",
        "STEPGRAPH_NVTX=1",
    ]
    assert (nsys, profile) == ("nsys", "profile")
    assert rest == [*GOLDEN, sys.executable, "serve.py", "--port", "80 00"]
    assert [reason.split(": ")[0] for reason in why] == [f"# {flag}" for flag in GOLDEN]
    assert (command.ROUNDS, command.FILE, command.TOOL) == (profiled.ROUNDS_VARIABLE, profiled.FILE_VARIABLE, profiled.TOOL_VARIABLE)


@pytest.mark.slow
def test_profile_of_the_bench_end_to_end(tmp_path: Path) -> None:
    """The first example of --help, as a process, with the engine's own timeline: the printed report is the saved one, and adds up."""
    out, first = tmp_path / "folder" / "bench", examples(nsys_profile.__doc__, "nsys_profile.py")[0]
    assert first[:4] == ["--rounds", "20-40", "--out", "/tmp/bench"]
    done = tool(*(word.replace("/tmp/bench", str(out)) for word in first), "--with", "trace", "--json", "-k", "2", "--grammar-lane", "host")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    assert json.loads(out.with_name("bench.report.json").read_text()) == report
    assert report["backend"] == "tape" and report["rounds"]["count"] == 21 and report["rounds"]["first"] == 20
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert {"target_verify", "accept", "draft_prefill", "choose_draft 1", "draft_decode 1", "choose_draft 2"} <= set(stages)
    assert all(stages[name]["rounds"] == 21 for name in ("target_verify", "accept"))
    hosts = report["host_nodes"]
    assert [(node["name"], node["runs"]) for node in hosts["nodes"]] == [("verify", 21), ("commit", 21), ("advance 1", 21)]
    assert hosts["hidden_ns"] + hosts["exposed_ns"] == hosts["total_ns"]
    found = report["acceptance"]
    assert 21 <= found["row_rounds"] <= 84 and found["tokens"] > found["accepted_drafts"] > 0
    assert "STEPGRAPH_PROFILE_ROUNDS=20-40" in done.stderr


@pytest.mark.parametrize("words", examples(nsys_profile.__doc__, "nsys_profile.py")[1:])
def test_other_help_examples_parse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    here = words.index("--") if "--" in words else len(words)
    assert nsys_profile.main([*words[:here], *["--print"][: "--print" not in words], *words[here:]]) == 0
    assert " nsys profile --trace=cuda,nvtx " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--bench", "--rounds", "9-4"], 2, "--rounds: got '9-4', expected FIRST-LAST"),
        ([], 2, "got neither of --bench and -- SCRIPT"),
        (["--bench", "--", "a.py"], 2, "got both of --bench and -- SCRIPT"),
        (["--bench", "--draft", "ngram"], 2, "--draft: got one without --model"),
        (["--bench", "--with", "nsys", "--nsys", "/none/nsys"], 2, "found no '/none/nsys' here; expected it on the path"),
        (["--with", "trace", "--", "true"], 1, "no engine reached these rounds; nothing was recorded of rounds 20-40"),
        (["--with", "trace", "--", "false"], 1, "the script ended with 1; nothing was recorded"),
    ],
)
def test_profile_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str) -> None:
    assert nsys_profile.main(["--out", str(tmp_path / "p"), *arguments]) == code
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def toy_engine(eager: bool = False) -> Engine:
    sizes: dict[str, Any] = {"max_rows": 2, "num_speculative_tokens": 2, "draft_length": 2, "max_length": 96, "buckets": (2,)}
    config = EngineConfig(**sizes, greedy_only=True, compile_isolation="none", eager=eager, grammar_lane="host")
    target = ToyTarget(VOCABULARY.logits_width, seed=3)
    return Engine(target, ToyDraft(target, 0.7), vocabulary=VOCABULARY, config=config)


def decode(eager: bool = False) -> list[list[int]]:
    """The tokens of two requests, one of them with a grammar."""
    constraint = Constraint.regex("[a-c]{60}")
    with toy_engine(eager) as engine:
        engine.capture()
        engine.compile(constraint)
        jobs = [engine.submit([index + 1], constraint=one, max_new_tokens=24) for index, one in enumerate([None, constraint])]
        finish(engine)
    return [job.tokens for job in jobs]


@pytest.fixture
def profile_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Request a profile of these rounds, as the environment of a new process does."""

    def ask(rounds: str) -> Path:
        monkeypatch.setattr(profiled, "_first_engine", threading.Lock())
        monkeypatch.setenv(profiled.ROUNDS_VARIABLE, rounds)
        monkeypatch.setenv(profiled.FILE_VARIABLE, str(tmp_path / "a.rounds.json"))
        return tmp_path / "a.rounds.json"

    return ask


def test_profiled_engine_writes_its_rounds_and_has_the_same_tokens(profile_rounds: Callable[[str], Path]) -> None:
    plain = decode(eager=True)
    file = profile_rounds("3-5")
    assert decode() == plain
    document = json.loads(file.read_text())
    assert [one["round"] for one in document["rounds"]] == [3, 4, 5]
    spans = {(span[1], span[3]): span[4:] for span in document["spans"] if span[2] == "host"}
    # The link times each host node of each round, under its name and within the span that the tape records.
    assert {(name, number) for name, number, _, _ in document["host_nodes"]} == set(spans)
    assert {number for _, number in spans} == {3, 4, 5} and len(spans) == 3 * 3
    for name, number, start, end in document["host_nodes"]:
        assert spans[name, number][0] <= start <= end <= spans[name, number][1]
    assert document["counters"]["host_node_ns"] == sum(end - start for _, _, start, end in document["host_nodes"])
    assert 3 <= document["counters"]["row_rounds"] <= 6 and document["counters"]["tokens"] >= document["counters"]["row_rounds"]
    with toy_engine() as another:
        assert type(another._in_flight) is InFlight, "only the first engine of a process is profiled"


def test_rounds_before_an_early_end_are_written(profile_rounds: Callable[[str], Path]) -> None:
    file = profile_rounds("2-900")
    decode(eager=True)
    numbers = [one["round"] for one in json.loads(file.read_text())["rounds"]]
    assert numbers == list(range(2, 2 + len(numbers))) and len(numbers) > 3


def test_environment_is_read_once_when_an_engine_is_made(profile_rounds: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = profile_rounds("1-3")
    with toy_engine() as engine:
        monkeypatch.setenv(profiled.ROUNDS_VARIABLE, "x")
        engine.generate([1], max_new_tokens=24, num_speculative_tokens=0)
        assert engine._graphs.complete, "a profiled engine records all graphs before its first round"
    assert [one["round"] for one in json.loads(file.read_text())["rounds"]] == [1, 2, 3]


def test_script_with_its_own_trace_continues_unprofiled(profile_rounds: Callable[[str], Path]) -> None:
    file = profile_rounds("3-5")
    with toy_engine(eager=True) as engine:
        engine.capture()
        engine.backend.start_trace(0, 2)
        with pytest.warns(RuntimeWarning, match="STEPGRAPH_PROFILE_ROUNDS: these rounds are not profiled: .* a trace is already running"):
            job = engine.generate([1], max_new_tokens=24, num_speculative_tokens=0)
        assert (len(job.tokens), job.error) == (24, "")
        assert engine.backend.stop_trace(), "the script's own trace is still there"
    assert not file.exists()


def test_warnings_that_are_errors_do_not_end_a_profiled_engine(profile_rounds: Callable[[str], Path]) -> None:
    file = profile_rounds("1-3")
    with toy_engine(eager=True) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        file.mkdir()  # so that the profile cannot be written
        assert not engine.generate([1], max_new_tokens=24, num_speculative_tokens=0).error
        assert not engine.generate([1], max_new_tokens=24, num_speculative_tokens=0).error


def test_report_of_eager_rounds_raises(profile_rounds: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    file = profile_rounds("3-5")
    with toy_engine(eager=True) as engine:
        engine.generate([1], max_new_tokens=24, num_speculative_tokens=0)
    code, out, err = printed(capsys, file)
    assert (code, out) == (2, "") and "without recording them, expected EngineConfig.eager=False" in err


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (profiled.ROUNDS_VARIABLE, "20", "STEPGRAPH_PROFILE_ROUNDS: got '20', expected FIRST-LAST"),
        (profiled.ROUNDS_VARIABLE, "0-9999999999999", "STEPGRAPH_PROFILE_ROUNDS: got '0-9999999999999', expected FIRST-LAST"),
        (profiled.TOOL_VARIABLE, "ncu", "STEPGRAPH_PROFILE_WITH: got 'ncu', expected 'trace' or 'nsys'"),
        (profiled.FILE_VARIABLE, "/", "STEPGRAPH_PROFILE_FILE: got '/', expected a file in an existing folder"),
        (profiled.FILE_VARIABLE, "/none/a.json", "STEPGRAPH_PROFILE_FILE: got '/none/a.json', expected a file in an existing folder"),
    ],
)
def test_invalid_environment_variable_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match="STEPGRAPH") as raised:
        profiled.read_range({profiled.ROUNDS_VARIABLE: "1-2", variable: value})
    assert message in str(raised.value)
    assert profiled.read_range({}) is None


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = nsys_report.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def nsys_stand_in(path: Path, exported: Path) -> Path:
    """A script in place of `nsys export`: checks its arguments and copies an existing file."""
    path.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3 $4 $5" = "export --type sqlite --force-overwrite=true --output" ] || {{ echo "got $*" >&2; exit 3; }}\n'
        f'case "$7" in *broken*) echo "cannot read $7" >&2; exit 4;; esac\ncp "{exported}" "$6"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_report_exports_profiles_and_finds_related_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nsys = nsys_stand_in(tmp_path / "nsys", nsys_files.rounds(tmp_path / "made.sqlite"))
    nsys_files.captures(tmp_path / "run.1.sqlite")
    (tmp_path / "run.1.nsys-rep").write_text("older than its export")
    os.utime(tmp_path / "run.1.nsys-rep", (1, 1))
    (tmp_path / "run.2.nsys-rep").write_text("not exported yet")
    (tmp_path / "run.rounds.json").write_text(json.dumps(nsys_files.sidecar_document()))
    code, out, err = printed(capsys, tmp_path / "run.2.nsys-rep", "--json", "--nsys", nsys)
    report = json.loads(out)
    assert (code, err) == (0, "")
    jsonschema.validate(report, SCHEMA)
    assert report["sources"] == ["run.1.sqlite", "run.2.sqlite"] and report["acceptance"]["tokens"] == 9 and report["notes"] == []
    kept = tmp_path / "kept.json"
    kept.write_text(out)
    assert printed(capsys, kept)[1] == printed(capsys, tmp_path / "run.2.sqlite")[1], "a saved report prints the same"


@pytest.mark.parametrize("words", examples(nsys_report.__doc__, "nsys_report.py"))
def test_every_example_of_the_report_prints_one(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--png" in words:
        pytest.importorskip("matplotlib")
    nsys_files.captures(tmp_path / "profile.1.sqlite")
    nsys_files.rounds(tmp_path / "profile.2.sqlite")
    (tmp_path / "profile.2.nsys-rep").write_text("older than its export")
    os.utime(tmp_path / "profile.2.nsys-rep", (1, 1))
    own = words[0].endswith(".json")
    spans = [[*(("side" if stream == 13 else "main"), name, "stage"), 20, *times] for name, _, stream, *times in nsys_files.ROUND]
    document = nsys_files.sidecar_document(**{"backend": "tape", "spans": spans} if own else {})
    (tmp_path / "profile.rounds.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    code, out, err = printed(capsys, *words)
    assert (code, err) == (0, "")
    assert "target_verify" in out and ("--png" not in words or (tmp_path / "timeline.png").is_file())


def test_missing_data_is_named_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nsys = nsys_stand_in(tmp_path / "nsys", tmp_path / "none")
    for name, expected in (
        ("gone.sqlite", "got no such file"),
        ("broken.nsys-rep", "ended with 4: cannot read"),
        ("other.json", "expected a file written with STEPGRAPH_PROFILE_ROUNDS"),
    ):
        if name != "gone.sqlite":
            (tmp_path / name).write_text("{}")
        code, out, err = printed(capsys, tmp_path / name, "--nsys", nsys)
        assert (code, out) == (2, "") and expected in err and name in err
    code, _, err = printed(capsys, tmp_path / "broken.nsys-rep", "--nsys", "/none/nsys")
    assert code == 2 and "no /none/nsys here to export it; run `/none/nsys export --type sqlite" in err
    (tmp_path / "a.rounds.json").write_text(json.dumps(nsys_files.sidecar_document()))
    code, _, err = printed(capsys, tmp_path / "a.rounds.json")
    assert code == 2 and "goes with a profile of nsys and holds no times" in err
    (tmp_path / "report.json").write_text('{"document": "stepgraph profile"}')
    damaged = nsys_files.rounds(tmp_path / "damaged.sqlite")
    damaged.write_bytes(damaged.read_bytes()[:8192].ljust(damaged.stat().st_size, b"Z"))
    for path in (tmp_path / "report.json", damaged):
        code, out, err = printed(capsys, path)
        assert (code, out) == (2, "") and err.startswith(f"nsys_report: {path}: incomplete or damaged: ")


def test_torch_trace_gets_stages_and_host_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, sidecar = tmp_path / "trace.json", tmp_path / "a.rounds.json"
    trace.write_text(json.dumps({"traceEvents": nsys_files.torch_trace()}))
    code, _, err = printed(capsys, trace)
    assert code == 2 and "does not name stages; expected --sidecar" in err
    sidecar.write_text(json.dumps(nsys_files.sidecar_document()))
    code, out, _ = printed(capsys, trace, "--sidecar", sidecar, "--json")
    report = json.loads(out)
    jsonschema.validate(report, SCHEMA)
    times = {stage["name"]: stage["total_ns"] for stage in report["stages"]}
    # Kernels of one stage are one span here: the 10 between two of them belong to it.
    assert (code, times) == (0, {"show verify": 150, "place verify": 120, "target_verify": 6000, "accept": 600, "draft_prefill": 3000})
    assert (report["backend"], report["host_nodes"]["total_ns"], report["host_nodes"]["exposed_ns"]) == ("torch", 3500, 400)
