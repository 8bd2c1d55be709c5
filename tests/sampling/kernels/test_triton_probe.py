"""The probe that launches a Triton program on a device, and the reason that reports give if it fails."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepgraph.graphs.attention.choose import choose_attention
from stepgraph.graphs.model import AttentionShape
from stepgraph.sampling import kernels
from stepgraph.sampling.kernels import filters
from stepgraph.sampling.kernels import triton as programs

ROOT = Path(__file__).resolve().parent.parent.parent.parent
CUDA = torch.device("cuda:0")
SHAPES = (AttentionShape(heads=4, kv_heads=2, size=64, dtype=torch.bfloat16),)
PROBE = "stepgraph.sampling.kernels.triton.probe"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can launch here")


@pytest.fixture(autouse=True)
def _no_result_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the cached result of the probe between tests."""
    monkeypatch.setattr(filters, "_chosen", {})
    programs.why_no_triton.cache_clear()
    yield
    programs.why_no_triton.cache_clear()


def check_choices(why: str) -> None:
    """Kernels, filters and attention run as the references, with the reason in each choice."""
    assert kernels.describe(CUDA) == f"torch ({why})"
    filters = kernels.choose_filters(CUDA)
    assert filters.name == "torch" and filters.unavailable[0] == f"no triton: {why}"
    with pytest.raises(ValueError, match="filters: got 'triton'") as refused:
        kernels.choose_filters(CUDA, "triton")
    assert str(refused.value).endswith(why)
    with pytest.raises(ValueError, match="attention: got 'triton'") as refused:
        choose_attention(CUDA, "triton", SHAPES, 16)
    assert str(refused.value).endswith(why)


@needs_triton
@without_gpu
def test_failed_launch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The probe itself fails here: it cannot create a tensor on a GPU."""
    why = programs.why_no_triton(CUDA)
    assert "CUDA" in why or "NVIDIA" in why
    check_choices(why)
    (record,) = (record for record in caplog.records if record.name == programs.log.name)
    assert record.getMessage() == f"Triton cannot launch on cuda:0, so kernels run as plain torch: {why}"


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, PROBE, raising=False)
    assert programs.why_no_triton(CUDA).startswith("ModuleNotFoundError: import of triton")
    check_choices(programs.why_no_triton(CUDA))


# Without a GPU a launch ends before it needs a compiler, so this probe calls the function that builds launchers.
BUILD = """
import os, sys
from tests.stub_cuda.preload import preload_where_needed
preload_where_needed()
from triton.runtime.build import compile_module_from_src
from stepgraph.sampling.kernels.triton import probe
from tests.sampling.kernels.test_triton_probe import CUDA, check_choices, filters, programs
probe.launch = lambda device: compile_module_from_src("int launcher;", "launcher")
os.environ.pop("CC", None)
for changed in ({"PATH": sys.argv[1]}, {"PATH": os.environ["PATH"], "CC": "false"}):  # triton keeps the compiler that it found
    os.environ.update(changed)
    programs.why_no_triton.cache_clear()
    filters._chosen.clear()
    why = programs.why_no_triton(CUDA)
    check_choices(why)
    print(why.splitlines()[0])
"""


@needs_triton
def test_missing_or_failing_c_compiler_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    missing, failing = done.stdout.splitlines()
    assert missing.startswith("RuntimeError: Failed to find C compiler.") and failing.startswith("CalledProcessError: Command ")


@needs_triton
def test_one_launch_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepgraph.sampling.kernels.triton import probe

    launched: list[torch.device] = []
    monkeypatch.setattr(probe, "launch", launched.append)
    for _ in range(3):
        assert kernels.describe(CUDA) == kernels.describe("cuda:1") == "triton"
        assert filters.why_not("triton", CUDA) == ""
    assert launched == [CUDA, torch.device("cuda:1")]
