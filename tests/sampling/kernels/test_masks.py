"""The operations on tags, masks and processors: refused arguments; invalid masks are ignored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import TapeBackend, drafting
from stepgraph.graphs.batch import read_batch
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling import bitmask, kernels
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.kernels import GrammarMask
from stepgraph.sampling.sampler import Param
from tools.gpu.checks.masks import make_case
from tools.gpu.checks.states import RoundBench


@pytest.fixture
def backend() -> Iterator[TapeBackend]:
    backend = TapeBackend(poison="every")
    yield backend
    backend.close()


def test_arguments_of_wrong_shapes_are_refused() -> None:
    case = make_case(4, 2, 90, torch.float32)
    assert case.mask is not None
    with pytest.raises(AssertionError, match="masks"):
        kernels.process(*case._replace(mask=case.mask._replace(masks=case.mask.masks[..., :2])))
    with pytest.raises(AssertionError, match="status"):
        kernels.process(*case._replace(mask=case.mask._replace(status=case.mask.status[:, :1])))
    with pytest.raises(AssertionError, match="output_counts"):
        kernels.process(*case._replace(logits=case.logits[..., :80]))
    numbers = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"tags torch\.int32"):
        kernels.mask_status(torch.zeros(2, 1, 4, dtype=torch.int32), numbers, numbers, numbers)


@pytest.mark.parametrize("status", list(MaskStatus))
def test_masks_with_another_status_than_ok_allow_nothing(status: MaskStatus) -> None:
    case = make_case(2, 2, 64, torch.float32)
    statuses = torch.tensor([[int(MaskStatus.OK), int(status)]] * 2)
    mask = GrammarMask(torch.full((2, 2, 2), -1, dtype=torch.int32), None, torch.tensor([True, False]), statuses)
    case = case._replace(logits=torch.zeros(2, 2, 64), mask=mask)
    finite, _ = kernels.masked_argmax(case.logits, mask.masks, None, mask.constrained, status=statuses)
    expected = [[True, status == MaskStatus.OK], [True, True]]
    assert finite.tolist() == kernels.process(*case).finite.tolist() == expected
    assert kernels.process(*case).logits.isfinite().any(-1).tolist() == expected


def plant(bench: RoundBench, poison: int) -> Tensor:
    """Row 0 has a grammar; the mask of its first draft allows `poison` only. Returns the tag that makes the mask valid."""
    bench.randomise(3)
    b = bench.buffers
    state = {Column.OWNER: 1, Column.GENERATED: 7, Column.FINISH: FinishCode.RUNNING, Column.LENGTH: 12, Column.MAX_LENGTH: 40}
    state |= {Column.CONSTRAINED: 1, Column.DRAFT_LIMIT: 3}
    b.batch_rows[0] = 0
    b.row_state[0] = torch.tensor([state.get(column, 0) for column in Column])
    b.row_params[0] = torch.tensor(
        [1.0 if column in (Param.TEMPERATURE, Param.TOP_P, Param.REPETITION_PENALTY) else 0.0 for column in Param]
    )
    b.row_bias_ids[0] = -1
    b.row_masks[0, 0] = bitmask.pack(torch.arange(bench.limits.vocab_size) == poison)
    return torch.tensor([1, 7, 0, int(MaskStatus.OK)])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_stale_mask_is_not_used_for_a_draft(backend: TapeBackend, wrong: int | None, sampled: bool) -> None:
    bench, poison = RoundBench(backend, 3), 50
    tag = plant(bench, poison)
    if wrong is not None:
        tag[wrong] += 1  # the status OK becomes COMPLETE
    bench.buffers.row_tags[0, 0] = tag
    batch = read_batch(bench.buffers, 1)
    logits = torch.zeros(1, bench.limits.num_tokens)
    mask = drafting.grammar_mask_of(bench.buffers, batch, 1)
    draft = drafting.choose_draft(bench.buffers, batch, 1, logits, batch.live, mask, sampled=sampled)
    assert draft.tolist() == [poison if wrong is None else -1]
