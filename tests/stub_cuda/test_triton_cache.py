"""Captures with an installed Triton cache compile nothing and need no C compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.gpu.packing import triton_cache, unpack

ROOT = Path(__file__).resolve().parents[2]


def captured(cache: Path, path: str) -> dict[str, int]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_CACHE_DIR")} | {"PATH": path}
    command = [sys.executable, "-m", "tools.gpu.packing.triton_cache", "--sizes", "toy", "--out", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_captures_with_an_installed_cache_compile_nothing(tmp_path: Path) -> None:
    filled, installed, archive = tmp_path / "filled", tmp_path / "installed", tmp_path / unpack.CACHE_ARCHIVE
    first = captured(filled, os.environ["PATH"])
    assert first["compiled"] > 20
    made_by = triton_cache.pack(filled, archive)
    shutil.rmtree(filled)
    other = unpack.install_cache(archive, made_by | {"key": "0", "triton": "3.1"}, installed)
    assert other.startswith("left out the Triton cache: it is of Triton 3.1 ") and not installed.exists()
    assert unpack.install_cache(archive, made_by, installed) == f"added {first['compiled']} programs to {installed}"
    tools = tmp_path / "bin"  # without compilers; the keys of launchers depend on the output of `file` for the interpreter
    tools.mkdir()
    if found := shutil.which("file"):
        (tools / "file").symlink_to(found)
    again = captured(installed, str(tools))
    assert again["compiled"] == 0 and again["found"] == first["found"] + first["compiled"]
