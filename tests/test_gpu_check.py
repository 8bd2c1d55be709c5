"""tools/gpu_check.py in rehearsal: every check passes on the tape, and the JSON document has the shape that results are kept in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("mode", "device", "driver", "cuda", "python", "torch", "triton", "xgrammar", "date")


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT.parent, check=False)


def names() -> list[str]:
    listed = gpu_check("--list")
    assert listed.returncode == 0
    return [line.split()[0] for line in listed.stdout.splitlines()]


def test_rehearsal_passes_and_ends_with_one_json_document() -> None:
    result = gpu_check("--rehearse", "--quick")
    lines = result.stdout.strip().splitlines()
    report = json.loads(lines[-1])
    failed = [check for check in report["checks"] if check["verdict"] == "failed"]
    assert not failed, result.stderr
    assert result.returncode == 0
    assert report["mode"] == "rehearsal"
    assert report["passed"] is True
    assert report["quick"] is True
    assert all(isinstance(report[field], str) for field in TEXTS)
    assert [check["name"] for check in report["checks"]] == names()
    for check in report["checks"]:
        assert set(check) == {"name", "verdict", "seconds", "figures", "error"}
        assert check["verdict"] in ("passed", "skipped")
        assert isinstance(check["seconds"], float)
        assert isinstance(check["figures"], dict)
        assert (check["verdict"] == "passed") == (check["error"] == ""), "a check that is skipped says why"
    for name, line in zip(names(), lines, strict=False):
        assert name in line, "the table tells the progress"


def test_a_failed_check_is_told_and_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    from tools import gpu_check as tool
    from tools.checks.context import Check, Context, Figures, Skipped

    def breaks(context: Context) -> Figures:
        raise AssertionError("3 bytes differ")

    def lacks(context: Context) -> Figures:
        raise Skipped("no such thing here")

    def works(context: Context) -> Figures:
        return {"count": 1}

    checks: dict[str, Check] = {check.__name__: check for check in (breaks, lacks, works)}
    assert tool.run(tool.parse(["--rehearse"]), checks) == 1
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["passed"] is False
    assert [check["verdict"] for check in report["checks"]] == ["failed", "skipped", "passed"]
    assert report["checks"][0]["error"] == "AssertionError: 3 bytes differ"
    assert report["checks"][2]["figures"] == {"count": 1}


def test_save_keeps_the_document_under_device_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import gpu_check as tool

    monkeypatch.setattr(tool, "RESULTS", tmp_path / "results")
    path = tool.save({"device": "NVIDIA X100 (80 GB)", "date": "2026-11-20T08:00:00+00:00", "mode": "gpu"})
    assert path.name == "nvidia-x100-80-gb-2026-11-20.json"
    assert json.loads(path.read_text())["mode"] == "gpu"
    assert tool.save({"device": "x86_64", "date": "2026-11-20T08", "mode": "rehearsal"}).name == "x86-64-2026-11-20-rehearsal.json"


def test_an_unknown_name_and_a_missing_gpu_are_refused() -> None:
    unknown = gpu_check("--rehearse", "--only", "speed")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "--only: got speed, want names of --list" in unknown.stderr
    if not torch.cuda.is_available():
        missing = gpu_check()
        assert missing.returncode == 2
        assert "sees no GPU here; --rehearse runs the same checks" in missing.stderr
