"""tools/bench_stages.py: every stage of every kind of round is reported with its operation count, and host nodes with their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.tools.test_results import check as check_record
from tools import bench_stages
from tools.bench_stages import KINDS, Scene
from tools.gpu.checks.context import Context

STAGES = {"target_verify", "accept", "draft_prefill", "choose_draft", "draft_decode", "prompt"}


def test_every_stage_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_stages.main(["--rows", "2", "--drafts", "2", "--turns", "1", "--models", "toy"]) == 0
    rounds = json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"]
    assert [(entry["constrained"], entry["sampled"]) for entry in rounds] == list(KINDS)
    for entry in rounds:
        check(entry)
    greedy, sampled, masked, both = (entry["stages"]["accept"]["operations"] for entry in rounds)
    assert greedy < sampled and masked < both, "a sampled round has stages of its own"
    assert masked < greedy, "with masks, one kernel chooses the tokens and finds the finite logits"


def test_two_graphs_are_compared_by_the_times_of_their_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--two-graphs", "2", "--drafts", "2", "--turns", "1", "--models", "toy", "--out", str(tmp_path / "twographs.json")]
    assert bench_stages.main(arguments) == 0
    record = json.loads((tmp_path / "twographs.json").read_text(encoding="utf-8"))
    assert record == json.loads(capsys.readouterr().out)
    check_record(f"twographs-{record['date'][:10]}.json", record | {"commit": "0" * 7})  # the folder may not be a checkout
    (entry,) = record["rounds"]
    target, draft, half_target, half_draft = entry["us"].values()
    assert entry["gain_apart"] == pytest.approx((target + draft) / max(2 * half_target, 2 * half_draft, half_target + half_draft), rel=0.02)
    assert entry["gain_shared"] == pytest.approx((target + draft) / 2 / (half_target + half_draft), rel=0.02)


def test_llama_and_head_are_measured() -> None:
    check(bench_stages.measure(Context(rehearsal=True, quick=True), bench_stages.llama(torch.device("cpu")), 1, 2, (True, False), 1))


def check(entry: Any) -> None:
    assert set(entry["stages"]) == STAGES
    assert all(figures["us"]["median"] > 0 and figures["operations"] > 0 for figures in entry["stages"].values())
    assert set(entry["host_nodes"]) == ({"head", "commit", "advance"} if entry["constrained"] else set())
    assert len(entry["round_host_nodes"]) == (3 if entry["constrained"] else 0)


def tensors(result: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@torch.no_grad()
def test_stages_run_from_the_same_state_every_time() -> None:
    scene = Scene(bench_stages.toy(torch.device("cpu")), rows=2, drafts=2, constrained=True, sampled=False)
    with scene.engine:
        assert bool((scene.batch.state[:, 1] > 0).all()), "rows are in the middle of their texts"
        calls = scene.calls()
        first = {name: tensors(call()) for name, call in calls.items()}
        assert all(first.values())
        for name, call in calls.items():
            assert all(torch.equal(*pair) for pair in zip(tensors(call()), first[name], strict=True)), name
