"""top_logprobs: the reference against a sort in Python, and C against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from stepgraph.sampling import native
from stepgraph.sampling.kernels import top_logprobs
from stepgraph.sampling.sampler import Param
from tests.helpers.compared import compare_c
from tools.gpu.checks.operations import top_logprobs as call_of

CPU = torch.device("cpu")


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 4, 70, 1_003])
def test_c_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    call = call_of(CPU, 5, 2, width)
    compare_c(top_logprobs, call.inputs[0].to(dtype), *call.inputs[1:], tol=call.tol)


def test_each_row_gets_its_requested_number_of_tokens() -> None:
    logits = torch.tensor([[[0.0, 2.0, -math.inf, 2.0]], [[5.0, 1.0, 2.0, 3.0]]])
    probs = torch.tensor([[[0.0, 0.0, 0.0, 1.0]], [[0.5, 0.25, 0.25, 0.0]]])
    params = torch.zeros(3, len(Param))
    params[:, Param.TOP_LOGPROBS] = torch.tensor([3.0, 0.0, 2.0])
    shape = (2, 2, 1, 6)
    ids, values = torch.full(shape, -7, dtype=torch.int32), torch.full(shape, 7.5)
    top_logprobs(logits, probs, torch.tensor([0, 2]), params, torch.tensor([5]), ids, values)
    assert ids[1, :, 0].tolist() == [[1, 3, 0, 3, -1, -1], [0, 3, -7, 0, 1, -7]]
    total = math.log(2 * math.e**2 + 1)
    assert values[1, 0, 0].tolist() == pytest.approx([2 - total, 2 - total, -total, 0, -math.inf, -math.inf], abs=1e-6)
    assert values[1, 1, 0, 3:5].tolist() == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)
    assert bool((ids[0] == -7).all()) and bool((values[0] == 7.5).all()), "the other slot was written"
