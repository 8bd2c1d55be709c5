"""Kernels without a GPU: values in Triton's interpreter, registers by compiling ahead of time, registration."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stepgraph.sampling import kernels, native
from stepgraph.sampling.kernels import triton as programs
from stepgraph.sampling.native import Unavailable, why_not
from tests.helpers.c_library import needs_c
from tools.aot_kernels import compile_usage, resident_blocks, spill_warnings, variants
from tools.gpu.checks import operations

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent.parent.parent
SUITES = sorted(path.name for path in (ROOT / "tests/helpers/interpreted").glob("*.py") if path.name != "advance.py" or not why_not())
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
MAX_REGISTERS = 64  # 1,024 threads fit a multiprocessor
# 512 threads: a draft's own vocabulary, read through a table; one program per row; weights compared with several edges at a time.
# 384: rows of unaligned masks. 256: attention and products of adapters, which keep sums in registers; products with packed weights, which
# also keep the numbers of four groups.
MOST_REGISTERS = {"mapped": 128, "advance": 168, "find": 128, "bucket": 128, "attend": 255, "multiply": 168, "packed": 224}


def run(*command: str, interpret: bool) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    result = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
    return result.stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("suites", [SUITES[::2], SUITES[1::2]], ids=" ".join)
def test_programs_equal_the_references_in_the_interpreter(suites: list[str]) -> None:
    """Several suites share a process: importing torch and triton takes as long as half a suite."""
    paths = [f"tests/helpers/interpreted/{suite}" for suite in suites]
    result = run("pytest", "-v", "-p", "no:cacheprovider", *paths, interpret=True)
    assert "SKIPPED" not in result and all(f"{path}::" in result for path in paths)


@needs_triton
@pytest.mark.soak
@pytest.mark.parametrize("suite", [pytest.param("advance.py", marks=needs_c), "choice.py", "filters.py", "layers.py", "processors.py"])
def test_programs_equal_the_references_for_all_parameters(suite: str) -> None:
    result = run("pytest", "-q", "-p", "no:cacheprovider", "-m", "soak", f"tests/helpers/interpreted/{suite}", interpret=True)
    assert "skipped" not in result and " passed" in result


@needs_c  # an automaton is among the arguments
@needs_triton
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        pytest.param(90, ("--first",), marks=pytest.mark.slow),
        *(pytest.param(arch, ("--all",), marks=pytest.mark.soak, id=f"{arch}-all") for arch in (80, 90, 100)),
    ],
)
def test_programs_compile_ahead_of_time_without_spills(arch: int, options: Sequence[str]) -> None:
    options = ("--arch", str(arch), "--vocabulary", "1003", "--size", "512", "--bandwidth", "1000", *options)
    table = json.loads(run("tools.aot_kernels", *options, interpret=False).splitlines()[-1])
    assert {entry["arch"] for entry in table} == {arch}
    for entry in table:
        assert entry["spill_bytes"] == 0 and entry["stack_bytes"] == 0, entry
        assert entry["registers"] <= MOST_REGISTERS.get(entry["kernel"].split("_")[0].split()[0], MAX_REGISTERS), entry
        assert 0 < entry["occupancy"] <= 1 and entry["least_us"] == round(entry["bytes"] / 1e6, 3), entry
        publishes = entry["kernel"].startswith(("find_least", "decide_end"))
        assert (entry["fences"] > 0) == publishes, f"only these programs publish to other programs or to the host: {entry}"
        if entry["kernel"].startswith("gate_tile"):
            assert entry["bytes"] == 3 * 8 * 512 * 2, f"two inputs and the product of {entry['launch']}"
        if entry["kernel"].startswith("masked_candidates"):
            assert entry["wide_loads"] > 0, f"logits are read 16 bytes at a time: {entry}"
        if entry["kernel"].startswith("advance_rows"):
            assert (entry["wide_loads"] > 0) == ("aligned" in entry["kernel"]), f"mask rows are read 16 bytes at a time: {entry}"


@needs_triton
def test_a_program_that_spills_is_reported_by_name() -> None:
    program = next(variant for variant in variants() if variant.label == "masked_candidates fp32")
    table = [compile_usage(program._replace(registers=registers), 90)._asdict() for registers in (None, 24)]
    (warning,) = spill_warnings(table)
    assert warning == f"warning: masked_candidates fp32 spills {table[1]['spill_bytes']} bytes on sm_90"


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "arch", "blocks"),
    [
        (32, 0, 1, 90, 32),  # limit of blocks
        (32, 0, 4, 90, 16),  # limit of warps
        (64, 0, 4, 90, 8),  # limit of registers: 8 warps in each of four partitions
        (129, 0, 8, 80, 1),
        (168, 0, 8, 80, 1),
        (128, 0, 8, 80, 2),
        (32, 100 << 10, 4, 80, 1),  # limit of shared memory
        (32, 100 << 10, 4, 90, 2),
    ],
)
def test_resident_blocks_of_a_multiprocessor(registers: int, shared: int, warps: int, arch: int, blocks: int) -> None:
    assert resident_blocks(registers, shared, warps, arch) == blocks


def test_distributions_of_different_shapes_are_refused() -> None:
    target, draft, *others = operations.reject_sample(CPU, 6, 2, 50).inputs
    with pytest.raises(AssertionError, match=r"draft torch\.Size"):
        kernels.reject_sample(target, draft[:, :1], *others)
    with pytest.raises(AssertionError, match="bfloat16"):
        kernels.reject_sample(target.bfloat16(), draft, *others)


def test_masks_and_statuses_of_another_size_than_the_logits_are_refused() -> None:
    logits, masks, rows, constrained, *_ = operations.masked_argmax(CPU, 3, 2, 101).inputs
    with pytest.raises(AssertionError, match="masks"):
        kernels.masked_argmax(logits, masks[..., :3], rows, constrained)
    with pytest.raises(AssertionError, match="status"):
        kernels.masked_argmax(logits, masks, rows, constrained, status=torch.ones(3, 1, dtype=torch.int64))


def test_describe_names_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    run = "C where" if not native.why_not() else "torch (no C: it was not built"
    assert kernels.describe("cpu").startswith(run)
    monkeypatch.setattr(native, "load", lambda: Unavailable("planted"))
    assert kernels.describe("cpu") == "torch (no C: planted)"
    monkeypatch.setattr(programs, "why_no_triton", lambda device: f"planted for {device}")
    assert kernels.describe("cuda") == "torch (planted for cuda)"
    monkeypatch.setattr(programs, "why_no_triton", lambda device: "")
    assert kernels.describe("cuda:0") == "triton"
