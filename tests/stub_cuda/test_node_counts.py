"""The graphs that torch and Triton capture have the nodes that the meta device counts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from stepgraph.graphs.shapes import GraphKey
from tests.helpers.node_counts import count_round, round_of
from tests.stub_cuda.subject import make_backend
from tools.gpu.checks.shapes import SHAPES


@pytest.mark.parametrize(
    ("size", "constrained", "sampled", "most"),
    [("1B", False, False, 268), ("1B", True, False, 315), ("8B", True, False, 475), ("1B", False, True, 295), ("1B", True, True, 342)],
)
def test_captured_nodes_equal_the_counted_ones(size: str, constrained: bool, sampled: bool, most: int) -> None:
    key = GraphKey(1, constrained, sampled)
    step, buffers = round_of(SHAPES[size], key, torch.device("cuda", 0))
    backend = make_backend("cuda")
    captured: Counter[str] = Counter()
    for run in backend.capture(step, buffers).report.stages:
        captured[run.name] += run.nodes
    backend.close()
    counted = count_round(SHAPES[size], key).stages
    models = [stage for stage in counted if stage.startswith(("target_verify", "draft_"))]
    assert {stage: captured[stage] for stage in models} == {stage: counted[stage] for stage in models}
    assert captured.total() <= most + 1, captured  # where two memory layouts meet, cat copies in two kernels on CUDA
