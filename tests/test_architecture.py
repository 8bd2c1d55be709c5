"""docs/architecture.md lists the files that a value passes through, as found by a trace of a small engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepgraph.graphs import GraphKey
from stepgraph.graphs.context import use_context
from stepgraph.sampling.native import why_not
from tests.helpers import architecture, node_counts
from tests.helpers.documents import ROOT
from tools.gpu.checks.shapes import SHAPES
from tools.lines import DECODE_RING

ON_CUDA = {
    "graphs/tape/backend.py": "graphs/cuda/launcher.py",
    "graphs/tape/player.py": "graphs/cuda/driver.py",
    "graphs/backends.py": "graphs/cuda/context.py",
    "runtime/models/toy.py": "runtime/models/llama.py",
}
NOT_ON_CUDA = {"sampling/fields.py", "sampling/native.py", "sampling/kernels/c_kernel.py"}  # checks of the eager call, kernels in C
TEXT = architecture.PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def traced() -> dict[str, dict[str, list[str]]]:
    if why_not():
        pytest.skip(f"no C library: {why_not()}")
    return {name: files() for name, files in architecture.LISTS.items()}


@pytest.mark.parametrize("name", architecture.LISTS)
def test_file_list_equals_a_new_trace(name: str, traced: dict[str, dict[str, list[str]]]) -> None:
    """If this fails after an intended change: python -m tests.helpers.architecture --write"""
    listed = TEXT.split(f"<!-- {name} -->\n")[1].split("\n<!-- end -->")[0]
    assert listed == architecture.table(traced[name])


@pytest.mark.parametrize(("name", "most"), [("constraint", 12), ("result", 12)])
def test_few_files_per_path(name: str, most: int, traced: dict[str, dict[str, list[str]]]) -> None:
    assert len(traced[name]) <= most


def test_decode_ring_has_every_file_of_a_steady_constrained_round(traced: dict[str, dict[str, list[str]]]) -> None:
    files = {ON_CUDA.get(path, path) for path in (*traced["draft token"], *traced["result"])} - NOT_ON_CUDA
    programs = {path.replace(name, f"triton/{name}") for path in files for name in [Path(path).name]}
    assert files | {path for path in programs if (ROOT / path).exists()} <= set(DECODE_RING)


def test_decode_ring_has_every_file_of_a_llama_round_with_an_eagle_head() -> None:
    step, buffers = node_counts.make_round(next(iter(SHAPES.values())), GraphKey(1, constrained=True, device=True), node_counts.META)
    counter = node_counts.NodeCounter()

    def run() -> None:
        with torch.no_grad(), use_context(node_counts.CountingContext(counter)), counter:
            step(buffers)

    assert set(architecture.traced(run)) - set(ON_CUDA) <= set(DECODE_RING)
