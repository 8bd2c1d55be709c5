"""The graphs that torch and Triton capture have the nodes that the meta device counts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.layers.quantised import KINDS
from stepgraph.graphs.limits import KvCacheDtype
from tests.helpers.node_counts import count_round, make_round
from tests.stub_cuda.subject import make_backend
from tools.gpu.checks.shapes import SHAPES


@pytest.mark.parametrize(
    ("size", "key", "most", "loras", "kind", "cache"),
    [
        ("1B", GraphKey(1, False), 265, 0, None, "auto"),
        ("1B", GraphKey(1, False, draft_length=0), 184, 0, None, "auto"),
        ("1B", GraphKey(1, True), 292, 0, None, "auto"),
        ("1B", GraphKey(1, True), 292 + 8 * 16, 4, None, "auto"),
        ("8B", GraphKey(1, True), 452, 0, None, "auto"),
        ("1B", GraphKey(1, True, device=True), 265, 0, None, "auto"),
        ("1B", GraphKey(1, True, device=True), 265, 0, "INT4_128", "auto"),
        ("1B", GraphKey(1, True, device=True), 265, 0, None, "fp8_e4m3"),
        ("1B", GraphKey(1, False, True), 288, 0, None, "auto"),
        ("1B", GraphKey(1, True, True), 322, 0, None, "auto"),
        ("1B", GraphKey(1, True, True, device=True), 293, 0, None, "auto"),
    ],
    ids=str,
)
def test_captured_nodes_equal_the_counted_ones(
    size: str, key: GraphKey, most: int, loras: int, kind: str | None, cache: KvCacheDtype
) -> None:
    packed = None if kind is None else KINDS[kind]
    step, buffers = make_round(SHAPES[size], key, torch.device("cuda", 0), loras=loras, packed=packed, cache=cache)
    backend = make_backend("cuda")
    captured: Counter[str] = Counter()
    for run in backend.capture(step, buffers).report.stages:
        captured[run.name] += run.nodes
    backend.close()
    counted = count_round(SHAPES[size], key, loras=loras, packed=packed).stages
    models = [stage for stage in counted if stage.startswith(("target_verify", "draft_"))]
    assert {stage: captured[stage] for stage in models} == {stage: counted[stage] for stage in models}
    assert captured.total() <= most + 1, captured  # where two memory layouts meet, cat copies in two kernels on CUDA
