"""The launch that decides whether Triton is used, with and without a C compiler, in processes with an empty Triton cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CAPTURE = """
from tests.stub_cuda.preload import preload
preload()
import torch
from stepgraph import Engine, EngineConfig
from tools.gpu.checks.context import VOCABULARY, toy_draft, toy_target
device = torch.device("cuda", 0)
config = EngineConfig(
    max_rows=1, num_speculative_tokens=2, draft_length=2, grammar_lane="host", max_length=96, compile_isolation="none"
)
with Engine(toy_target(device), toy_draft(device, 0.7), vocabulary=VOCABULARY, config=config) as engine:
    report = engine.capture()
    print(*report.notes, f"{len(report.keys)} keys captured, {len(report.failed)} failed", sep="\\n")
"""
DOCTOR = """
from tests.stub_cuda.preload import preload
preload()
from stepgraph.runtime.commands.doctor import triton_launch
print(triton_launch()[1])
"""
NO_COMPILER = "RuntimeError: Failed to find C compiler."


def run(script: str, path: str, cache: Path) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": path, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()


def line(lines: list[str], start: str) -> str:
    (found,) = (line for line in lines if line.startswith(start))
    return found


@pytest.mark.parametrize("compiler", [True, False])
def test_an_engine_without_a_c_compiler_captures_the_references_and_reports_why(tmp_path: Path, compiler: bool) -> None:
    lines = run(CAPTURE, os.environ["PATH"] if compiler else str(tmp_path), tmp_path / "cache")
    assert lines[-1] == "4 keys captured, 0 failed"
    kernels, filters = line(lines, "kernels: "), line(lines, "filters: ")
    if compiler:
        assert kernels == "kernels: triton" and "no triton" not in filters
    else:
        assert kernels.startswith(f"kernels: torch ({NO_COMPILER}")
        assert filters.startswith("filters: torch; ") and f"no triton: {NO_COMPILER}" in filters


def test_the_doctor_reports_why_triton_cannot_launch(tmp_path: Path) -> None:
    lines = run(DOCTOR, str(tmp_path), tmp_path / "cache")
    assert lines[-1].startswith(NO_COMPILER)
