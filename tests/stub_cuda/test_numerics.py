"""Captured graphs whose kernels have values: operations of torch, rounds against plain decoding, and checks of gpu_check.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from triton.runtime import interpreter

if not hasattr(interpreter, "_LangPatchScope"):
    pytest.skip("values of kernels need _LangPatchScope of Triton's interpreter, which Triton 3.4 does not have", allow_module_level=True)

from stepgraph.graphs import BufferSpec, StaticBuffers, current_context
from stepgraph.runtime.commands.capture_check import _replay_equals_eager
from tests.stub_cuda import counters, numerics
from tests.stub_cuda.numerics import Numerics
from tests.stub_cuda.subject import Backend, greedy_engine
from tools.gpu.checks.context import random_requests, serve
from tools.gpu.checks.rounds import check_against_oracle

DEVICE = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "tools" / "results" / "gpu_check.schema.json").read_text(encoding="utf-8"))


@pytest.fixture
def values() -> Iterator[Numerics]:
    with Numerics().computing() as computing:
        yield computing


def test_operations_have_the_values_of_the_cpu(values: Numerics) -> None:
    generator = torch.Generator().manual_seed(1)
    on_cpu = torch.randn(7, 5, generator=generator)
    x = on_cpu.to(DEVICE)
    for compute in (
        lambda t: t.t().contiguous()[1:4, ::2] * 2,
        lambda t: (t @ t.t()).softmax(-1).to(torch.float16),
        lambda t: t[t > 0],
        lambda t: t.clone().index_fill_(0, torch.tensor([2, 3], device=t.device), 9.0).cumsum(1),
        lambda t: torch.cat([t, torch.arange(5, device=t.device, dtype=t.dtype)[None]]).argsort(0),
        lambda t: t.new_zeros(3).add_(t.sum().item()),
    ):
        assert torch.equal(compute(x).cpu(), compute(on_cpu))
    first, second = (torch.empty(3, device=DEVICE).exponential_(generator=torch.Generator(DEVICE).manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second) and first.min() > 0


def test_a_graph_computes_from_what_its_buffers_hold_at_each_replay(values: Numerics, backend: Backend) -> None:
    buffers = StaticBuffers([BufferSpec("x", (3,), torch.int64), BufferSpec("x_host", (3,), torch.int64, "pinned")], DEVICE)

    def step(b: StaticBuffers) -> None:
        b.x.copy_(b.x_host, non_blocking=True)
        b.x.mul_(b.x).add_(1)

    recorded = backend.capture(step, buffers)
    for start in (2, 5):
        buffers.x_host.copy_(torch.arange(start, start + 3))
        recorded.replay()
        backend.synchronize()
        assert buffers.x.tolist() == [value**2 + 1 for value in range(start, start + 3)]


def test_replay_and_step_are_compared_after_their_copies(values: Numerics, backend: Backend) -> None:
    buffers = StaticBuffers([BufferSpec("x", (3,), torch.int64), BufferSpec("x_host", (3,), torch.int64, "pinned")], DEVICE)
    buffers.x.fill_(7)

    def step(b: StaticBuffers) -> None:
        current_context().host_node("slow", lambda: time.sleep(0.05))
        b.x_host.copy_(b.x, non_blocking=True)

    assert _replay_equals_eager(step, buffers, backend.capture(step, buffers))


def rounds_against_the_oracle(**changes: Any) -> int:
    engine = greedy_engine(compile_isolation="none", max_length=96, **changes)
    try:
        engine.capture()
        with counters.counted() as counts:
            reqs = [req._replace(cancel_after=None) for req in random_requests(5, 8, 2)]
            for req, job in zip(reqs, serve(engine, reqs), strict=True):
                check_against_oracle(req, job)
        assert counts["graph_launches"] >= engine.stats().rounds > 0
        assert bool(engine.stats().added_pages) == ("page_allocation" in changes)
        return engine.stats().drafts.accepted
    finally:
        engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_masks": False},
        {"grammar_backend": "automaton", "grammar_lane": "device"},
        {"page_allocation": "grow", "num_pages": 12},
    ],
    ids=str,
)
def test_captured_rounds_decode_as_the_oracle(values: Numerics, changes: dict[str, Any]) -> None:
    """Programs in Triton's interpreter, with the arguments of the captured launches, between the host nodes and copies of the graph."""
    assert rounds_against_the_oracle(**changes) > 0
    assert {"masked_candidates", "take_best", "accept_chain", "publish_round"} <= values.programs
    assert ("advance_rows" in values.programs) == ("grammar_lane" in changes)


def test_the_oracle_finds_a_program_without_a_value(values: Numerics, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret = numerics._interpret

    def all_but_one(program: Any, *arguments: Any) -> None:
        if program.fn.__name__ != "check_tags":
            interpret(program, *arguments)

    monkeypatch.setattr(numerics, "_interpret", all_but_one)
    with pytest.raises(AssertionError, match="expected"):
        rounds_against_the_oracle()


# Checks that compute little in Triton's interpreter, and neither read times nor count nodes: computations add nodes.
CHECKS = (
    "tools_of_this_host capture_drop_capture capture_user_step host_nodes streams_overlap_correct "
    "capture_leaves_buffers_untouched illegal_step_raises several_engines random_numbers_equal_the_cpu"
).split()


def test_gpu_check_runs_to_its_document(tmp_path: Path) -> None:
    only = [f"--only={name}" for name in CHECKS]
    command = [sys.executable, "-m", "tests.stub_cuda.computing", "--check", "--rehearse", "cuda", "--quick", "--out", str(tmp_path), *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT, check=False)
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert (document["mode"], document["device"], document["whole"]) == ("rehearsal", "Stub CUDA device", False)
    assert {check["name"]: check["error"] for check in document["checks"]} == dict.fromkeys(CHECKS, "")
    assert document["passed"] and done.returncode == 0
    assert {goal["verdict"] for goal in document["goals"]} == {"not run"}
    assert json.loads(next(tmp_path.iterdir()).read_text(encoding="utf-8")) == document
