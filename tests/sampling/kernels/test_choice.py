"""The C kernels of masked_argmax, mask_status and chain_accept, bit for bit against the references, on random and extreme inputs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.sampling import bitmask, kernels, native
from tests.helpers.compared import compare_c

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
INFINITE = float("inf")


def choose(*inputs: Any) -> list[Tensor]:
    return compare_c(kernels.masked_argmax, *inputs)


def hostile_logits(made: torch.Generator, *shape: int) -> Tensor:
    """Few values, so that ties are frequent; zeros of both signs, infinities and NaN."""
    few = torch.tensor([0.0, -0.0, 1.0, 1.5, -2.0, INFINITE, -INFINITE, torch.nan, -torch.nan])
    chance = torch.tensor([9.0, 9, 9, 1, 9, 0.05, 9, 0.05, 0.05])
    return few[torch.multinomial(chance, max(1, torch.Size(shape).numel()), True, generator=made)][: torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [0, 1, 8])
def test_masked_argmax_equals_the_reference(batch: int, dtype: torch.dtype) -> None:
    """Strided logits, permuted mask rows, few and many legal tokens, with and without statuses."""
    made = torch.Generator().manual_seed(batch)
    for width, positions, density, hostile in product((1, 31, 64, 333), (1, 3), (0.0, 0.02, 0.6, 1.0), (False, True)):
        shape = (batch, positions, width + 5)
        logits = (hostile_logits(made, *shape) if hostile else torch.randn(shape, generator=made)).to(dtype)[..., :width]
        masks = bitmask.pack(torch.rand(9, positions, width + 40, generator=made) < density)
        rows, constrained = torch.randint(-9, 9, (batch,), generator=made), torch.rand(batch, generator=made) < 0.8
        status = torch.randint(-1, 7, (batch, positions), generator=made).clamp(max=1)
        choose(logits, masks[:batch], None, constrained)
        choose(logits, masks, rows, constrained, None, status)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_argmax_with_a_draft_vocabulary(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(5)
    for width, batch, density in product((1, 33, 200), (1, 8), (0.0, 0.05, 0.7)):
        masks = bitmask.pack(torch.rand(9, 2, 1000, generator=made) < density)
        ids = torch.randperm(1000, generator=made)[:width] - 24
        rows, constrained = torch.randint(0, 9, (batch,), generator=made), torch.rand(batch, generator=made) < 0.8
        status = torch.randint(0, 3, (batch, 2), generator=made).clamp(max=1)
        for logits in (torch.randn(batch, 2, width, generator=made), hostile_logits(made, batch, 2, width)):
            choose(logits.to(dtype), masks, rows, constrained, ids, status)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_and_nan(dtype: torch.dtype) -> None:
    """The lowest index wins a tie, and the first NaN wins over everything; masked NaN and closed positions are ignored."""
    logits = torch.zeros(1, 1, 100, dtype=dtype)
    allowed = torch.ones(1, 1, 100, dtype=torch.bool)
    allowed[..., 0] = False
    yes, ok = torch.tensor([True]), torch.tensor([[1]])
    assert choose(logits, bitmask.pack(allowed), None, yes, None, ok)[1].item() == 1
    logits[..., 40], logits[..., 70], logits[..., 71] = 3.0, torch.nan, torch.nan
    assert choose(logits, bitmask.pack(allowed), None, yes, None, ok)[1].item() == 70
    allowed[..., 70:72] = False
    assert choose(logits, bitmask.pack(allowed), None, yes, None, ok)[1].item() == 40
    for closed in (0, 2, 5, -3, 2**40):
        finite, token = choose(logits, bitmask.pack(allowed), None, yes, None, torch.tensor([[closed]]))
        assert not finite.item() and token.item() == 0
    assert choose(logits, bitmask.pack(allowed), None, ~yes, None, torch.tensor([[0]]))[1].item() == 70


@pytest.mark.parametrize("wrong", [9, -10, 2**40, -(2**40)])
def test_indices_out_of_range_are_refused(wrong: int) -> None:
    """No memory outside of a table is read."""
    logits, masks, constrained = torch.zeros(1, 1, 40), torch.full((9, 1, 2), -1, dtype=torch.int32), torch.tensor([True])
    for rows, ids in ((torch.tensor([wrong]), None), (torch.tensor([0]), torch.full((40,), wrong * 64))):
        with pytest.raises(IndexError, match="outside of its table"):
            kernels.masked_argmax(logits, masks, rows, constrained, ids)
    one, column = torch.tensor([1]), torch.ones(9, dtype=torch.int64)
    with pytest.raises(IndexError, match="outside of its table"):
        kernels.mask_status(torch.ones(9, 1, 4, dtype=torch.int64), column, column, column, 0, torch.tensor([wrong]))
    zeros = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(IndexError, match="outside of its table"):
        kernels.chain_accept(zeros, zeros == 0, zeros[:, :8], one, zeros + 1, zeros, one, torch.tensor([wrong]))


@pytest.mark.parametrize("batch", [0, 1, 8])
def test_mask_status_equals_the_reference(batch: int) -> None:
    """Correct tags and tags of other rows, rounds and positions; columns of a wider table."""
    made, seen = torch.Generator().manual_seed(batch), set[int]()
    for positions, first, _ in product((1, 5), (0, 3), range(4)):
        tags = torch.randint(0, 2, (9, positions + 1, 6), generator=made)[:, :positions, :4]
        tags[..., 2] += torch.arange(positions) + first - torch.randint(0, 2, (9, positions), generator=made) // 2
        tags[..., 3] = torch.randint(-1, 8, (9, positions), generator=made)
        state = torch.randint(0, 2, (9, 5), generator=made)
        rows = torch.randint(-9, 9, (batch,), generator=made)
        state[:, 4] = torch.randint(0, 4, (9,), generator=made)
        for chosen, size in ((None, batch), (rows, 9)):
            columns = (state[:size, column] for column in (1, 3, 4))
            status, _ = compare_c(kernels.mask_status, tags[:size], *columns, first, chosen)
            seen |= set(status.flatten().tolist())
    assert len(seen) == {0: 0, 1: len(seen), 8: 9}[batch], "not every status occurred"


@pytest.mark.parametrize("batch", [0, 1, 8])
def test_chain_accept_equals_the_reference(batch: int) -> None:
    made, finishes, lengths = torch.Generator().manual_seed(batch), set[int](), set[int]()
    for count, stops, _ in product((0, 1, 4), (0, 2), range(12)):

        def number(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=made)

        drafts, finite = number(-1, 4, batch, count), torch.rand(batch, count + 1, generator=made) < 0.9
        sampled = torch.cat([torch.where(number(0, 5, batch, count) > 0, drafts, number(0, 4, batch, count)), number(0, 4, batch, 1)], 1)
        status = torch.where(number(0, 5, batch, count + 1) > 0, 1, number(-2, 9, batch, count + 1))
        stop_ids, room, known = number(-1, 9, batch, stops), number(-1, 9, batch), number(0, count + 1, batch)
        for held in (None, known):
            inputs = (sampled, finite, drafts, number(-1, count + 3, batch), status, stop_ids, room, held)
            emitted, _, finish = compare_c(kernels.chain_accept, *inputs)
            finishes |= set(finish.tolist())
            lengths |= set(emitted.tolist())
    if batch == 8:
        assert finishes == set(range(1, 8)) and lengths >= set(range(-1, 6))


def test_unsupported_inputs_run_as_the_reference() -> None:
    logits, masks, constrained = torch.randn(2, 1, 40), torch.full((2, 1, 2), -1, dtype=torch.int32), torch.tensor([True, True])
    prepare, outputs = kernels.masked_argmax.prepare, (torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int64))
    assert prepare(logits.half(), masks, None, constrained, None, None, *outputs) is None
    assert prepare(logits, masks[..., :1], None, constrained, None, None, *outputs) is None, "a mask narrower than the logits"
    assert prepare(logits, masks[:1], None, constrained, None, None, *outputs) is None, "fewer masks than rows"
    assert torch.equal(kernels.masked_argmax(logits.half(), masks, None, constrained)[1], logits.half().argmax(-1))
