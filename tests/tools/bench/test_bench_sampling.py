"""tools/bench_sampling.py: the plain pipeline is equivalent, and the JSON document is printed last."""

from __future__ import annotations

import json

import pytest
import torch

from stepgraph.graphs.row_layout import ResultLayout
from stepgraph.sampling import bitmask, kernels, sampler
from stepgraph.sampling.sampler import Param
from tests.helpers.chi_square import chi_square_p
from tools import bench_sampling
from tools.bench.plain_sampling import plain_filters, plain_sampling
from tools.gpu.checks.stopwatch import ratio_of


def test_quartiles_of_ratios() -> None:
    assert ratio_of([3.0], [2.0]) == dict.fromkeys(("p25", "p50", "p75"), 1.5)
    assert ratio_of([1.0, 2.0, 3.0, 4.0], [1.0] * 4) == {"p25": 1.75, "p50": 2.5, "p75": 3.25}


def test_plain_filters_equal_the_sampler() -> None:
    scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 3
    requested = torch.tensor([[1.0, 300, 1.0, 0], [1.0, 5, 1.0, 0], [1.0, 300, 0.7, 0], [1.0, 40, 0.9, 0]])
    found = plain_filters(scores, requested[:, 1:2], requested[:, 2:3])
    torch.testing.assert_close(found, sampler.distribution(scores[:, None], requested)[:, 0])


def test_the_plain_loop_draws_from_the_masked_target() -> None:
    rows, made = 20_000, torch.Generator().manual_seed(2)
    logits, near = torch.randn(1, 2, 6, generator=made), torch.randn(1, 2, 6, generator=made)
    allowed = torch.tensor([[[True, True, False, True, True, True]] * 2])
    one = torch.ones(rows, 1)
    params = torch.tensor([[0.9, 0, 1.0, 0]])
    truth = sampler.distribution(logits.masked_fill(~allowed, float("-inf")), params)[0]
    offered = sampler.distribution(near.masked_fill(~allowed, float("-inf")), params)[:, :1].expand(rows, 1, 6)
    torch.manual_seed(3)
    drafts = torch.multinomial(offered[:, 0], 1)
    masks = bitmask.pack(allowed).expand(rows, 2, 1)
    tokens, accepted = plain_sampling(logits.expand(rows, 2, 6), masks, one * 0.9, one * 6, one, drafts, offered)
    assert 0 < int(accepted.sum()) < rows
    assert chi_square_p(torch.bincount(tokens[:, 0], minlength=6), truth[0].double()) > 1e-6
    assert chi_square_p(torch.bincount(tokens[accepted == 1, 1], minlength=6), truth[1].double()) > 1e-6


def test_every_operation_of_the_sampled_path_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_sampling.main(["--rows", "2", "-k", "0", "2", "--vocabulary", "200", "--seconds", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    document = json.loads(printed[-1])
    assert [(shape["rows"], shape["drafts"]) for shape in document["shapes"]] == [(2, 0), (2, 2)]
    names = {entry["name"] for shape in document["shapes"] for entry in shape["operations"]}
    assert {"whole stage", "reject_sample", "masked_argmax", "chain_accept"} <= names
    assert names <= {"whole stage", "count_output", "select_draft", "write_emission", "process_logits", "scatter_masks", *kernels.__all__}
    for shape in document["shapes"]:
        assert shape["turns"] >= 3
        assert shape["accept_over_plain"]["p50"] > 0
        for entry in shape["operations"]:
            assert entry["us"] > 0 and abs(entry["us_per_row"] - entry["us"] / 2) < 0.1
            whole = entry["name"] == "whole stage"
            assert 1 <= entry["operations"] < entry["plain_operations"] and (entry["operations"] == 1) != whole
    assert any("accept sampled / plain pipeline" in line for line in printed)


def test_rows_match_their_columns() -> None:
    scene = bench_sampling.Scene(torch.device("cpu"), rows=2, k=1, width=40)
    for column in Param:
        expected = torch.full((2,), float(bench_sampling.ROW_PARAMS.get(column, 0)))
        assert torch.equal(scene.buffers.row_params[:2, column], expected)
    scene.accept(True)()
    assert bool((scene.buffers.results[:2, ResultLayout(1).columns["emitted"]] >= 1).all()), "every row emits"
