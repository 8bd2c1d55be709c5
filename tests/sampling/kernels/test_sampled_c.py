"""The kernels in C of sampled rounds against their references, bit for bit, on random arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stepgraph.sampling import bitmask, native
from stepgraph.sampling.kernels import GrammarMask, filters, processors, rejection
from stepgraph.sampling.rng import Purpose
from stepgraph.sampling.sampler import Param
from tests.helpers.compared import call_of, compare, compare_c

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

ROWS = 5  # of the engine; the batch has BATCH of them
BATCH = 3


class Draws:
    """Random arguments, a function of the seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.width = self.whole(1, 3000)
        self.rows = torch.randperm(ROWS, generator=self.generator)[:BATCH]

    def whole(self, low: int, high: int) -> int:
        return int(self.integers(low, high, 1))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def likely(self, probability: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) < probability

    def one_of(self, values: list[float], *shape: int) -> Tensor:
        return torch.tensor(values)[self.integers(0, len(values), *shape)]

    def logits(self, *shape: int) -> Tensor:
        """Logits of any scale, some of them masked, infinite or NaN, with gaps between the rows."""
        found = torch.randn(*shape, self.width + 3, generator=self.generator)[..., : self.width] * [0.01, 1, 3, 30][self.seed % 4]
        if self.seed % 5 == 0:
            found[self.likely(0.7, *found.shape)] = -torch.inf
        for period, value in ((11, torch.nan), (13, -torch.inf), (17, torch.inf)):
            if self.seed % period == 0:
                found[self.whole(0, BATCH), ..., self.width // 2 if value != -torch.inf else slice(None)] = value
        return found.to(torch.bfloat16) if self.seed % 3 == 0 else found

    def params(self, rows: int) -> Tensor:
        """The filters, and penalties that are off in about half of the rows."""
        columns = {
            Param.TEMPERATURE: [0.0, 0.5, 0.8, 1.0, 2.0, 1e-3],
            Param.TOP_K: [0.0, 1.0, 2.0, 50.0, 5000.0],
            Param.TOP_P: [1.0, 0.95, 0.5, 1e-6, 0.0],
            Param.MIN_P: [0.0, 0.05, 0.9],
            Param.REPETITION_PENALTY: [1.0, 1.0, 1.3, 0.7],
            Param.PRESENCE_PENALTY: [0.0, 0.0, 0.5],
            Param.FREQUENCY_PENALTY: [0.0, 0.0, -0.5],
            Param.MIN_NEW_TOKENS: [0.0, 4.0, 9.0],
            Param.TOP_LOGPROBS: [0.0],
        }
        return torch.stack([self.one_of(columns[column], rows) for column in Param], 1)

    def ids(self, width: int, ascending: bool) -> Tensor:
        found = torch.randperm(width, generator=self.generator)[: self.width]
        return found.sort().values if ascending else found


def filters_and_draws(draws: Draws) -> None:
    seed, position = draws.integers(-(9**9), 9**9, BATCH), draws.integers(0, 99, BATCH)
    params, logits = draws.params(BATCH), draws.logits(BATCH, 2)
    compare_c(filters.distribution, logits, params)
    table = torch.rand(ROWS, draws.width, generator=draws.generator)
    compare_c(filters.draw, logits[:, 0], params, seed, position, Purpose.DRAFT, draws.rows, table)
    wide = torch.zeros(ROWS, draws.width + 100)
    ids = draws.ids(draws.width + 100, ascending=draws.seed % 2 == 0)
    with_ids = call_of(filters.draw, logits[:, 0], params, seed, position, Purpose.DRAFT, draws.rows, wide, ids)
    compare(with_ids, filters.draw.out)  # in C if the ids ascend


def rejections(draws: Draws) -> None:
    count = draws.whole(0, 5)
    target = torch.softmax(2 * torch.randn(BATCH, count + 1, draws.width, generator=draws.generator), -1)
    drafted = torch.softmax(2 * torch.randn(ROWS, count, draws.width, generator=draws.generator), -1)
    if draws.seed % 2:  # nearly or exactly those of the target: several drafts are accepted and the residual is near 0
        drafted[draws.rows] = torch.lerp(target[:, :-1], drafted[draws.rows], draws.seed % 3 / 20)
    drafts = target[:, :-1].argmax(-1)
    drafts[draws.likely(0.1, *drafts.shape)] = -1
    state = [draws.likely(0.95, BATCH, count + 1), drafts, draws.integers(0, count + 1, BATCH)]
    status = torch.where(draws.likely(0.9, BATCH, count + 1), 1, draws.integers(0, 6, BATCH, count + 1))
    numbers = [status, draws.integers(-(9**9), 9**9, BATCH), draws.integers(0, 99, BATCH)]
    certain = draws.likely(0.3, BATCH, count)
    compare_c(rejection.reject_sample, target, drafted, draws.rows, certain, *state, *numbers)
    compare_c(rejection.reject_sample, target, drafted[:, :0], draws.rows, torch.ones_like(certain), *state, *numbers)


def settings_and_masks(draws: Draws) -> None:
    positions, before, biases = draws.whole(1, 5), draws.whole(0, 6), 4
    wide = draws.width + draws.whole(biases, 200)
    ids = draws.ids(wide, ascending=False) if draws.seed % 2 else None
    width = wide if ids is not None else max(draws.width, biases)
    draws.width = width if ids is None else draws.width
    rows = draws.rows if draws.seed % 5 else None
    batch, count = (BATCH, ROWS) if rows is not None else (BATCH, BATCH)
    bias_ids = torch.stack([torch.randperm(width, generator=draws.generator)[:biases] for _ in range(count)])
    bias_ids = torch.where(torch.arange(biases) < draws.integers(0, biases + 1, count)[:, None], bias_ids, -1)
    tables = (
        draws.params(count),
        bias_ids,
        torch.where(bias_ids >= 0, draws.one_of([-torch.inf, 1.5], *bias_ids.shape), 0.0),
        torch.where(draws.likely(0.5, count, 3), draws.integers(0, width, count, 3), -1),
        draws.likely(0.2, count, width),
        torch.where(draws.likely(0.2, count, width), draws.integers(0, 4, count, width), 0).to(torch.int32),
    )
    masks = bitmask.pack(draws.likely([0.0, 0.5, 1.0, 0.01][draws.seed % 4], 4, positions, width))
    status = torch.where(draws.likely(0.8, batch, positions), 1, draws.integers(0, 6, batch, positions))
    of_rows = draws.integers(0, 4, batch), draws.likely(0.7, batch), status
    mask = [None, GrammarMask(masks, *of_rows), GrammarMask(masks[:batch], None, *of_rows[1:])][draws.seed % 3]
    drafts = torch.where(draws.likely(0.8, batch, before), draws.integers(0, width, batch, before), -1)
    generated = draws.integers(0, 12, batch, 2)[:, 0]
    fixed = (*(mask or (None,) * 4), ids, rows, *tables, generated, drafts, draws.whole(0, 3))
    compare_c(processors.process_logits, draws.logits(batch, positions), *fixed)


@pytest.mark.parametrize("check", [filters_and_draws, rejections, settings_and_masks])
def test_kernels_equal_the_references(check: Callable[[Draws], None]) -> None:
    for seed in range(110):
        check(Draws(seed))


def test_equal_weights_are_kept_or_dropped_together() -> None:
    logits = torch.zeros(1, 1, 5000)
    logits[..., 7:9] = 1.0
    params = torch.tensor([[1.0, 3, 1, 0], [1.0, 0, 1e-4, 0], [1.0, 2, 1, 0]])
    kept = [int((compare_c(filters.distribution, logits, row[None])[0] > 0).sum()) for row in params]
    assert kept == [5000, 2, 2]


def test_rows_out_of_range_are_refused() -> None:
    one, row = torch.ones(1, dtype=torch.int64), torch.tensor([[1.0, 0, 1, 0]])
    with pytest.raises(IndexError):
        filters.draw(torch.zeros(1, 9), row, one, one, Purpose.DRAFT, 7 * one, torch.zeros(2, 9))
