"""Masks and acceptance as tensor functions, against loops over plain Python values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.sampling import acceptance, bitmask
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.kernels import rejection

OK = MaskStatus.OK


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 1000, 151_936])
def test_unpack_is_the_inverse_of_pack(width: int) -> None:
    allowed = torch.rand(3, width, generator=torch.Generator().manual_seed(width)) < 0.5
    allowed[0], allowed[1] = True, False
    masks = bitmask.pack(allowed)
    assert masks.shape == (3, -(-width // 32)) and masks.dtype is torch.int32
    assert torch.equal(bitmask.unpack(masks, width), allowed)
    for token in {0, width // 2, width - 1}:
        assert bool(int(masks[2, token // 32]) >> (token % 32) & 1) == bool(allowed[2, token])


def test_apply_masks_constrained_rows_only() -> None:
    logits = torch.arange(2 * 3 * 40, dtype=torch.float32).view(2, 3, 40)
    allowed = torch.zeros(2, 3, 40, dtype=torch.bool)
    allowed[..., 31] = allowed[..., 39] = True
    masked = bitmask.apply(logits, bitmask.pack(allowed), torch.tensor([True, False]))
    assert torch.equal(masked[1], logits[1])
    assert torch.equal(masked[0].isfinite(), allowed[0])
    assert torch.equal(masked[0, :, 31], logits[0, :, 31])


def test_apply_leaves_an_empty_row_without_a_finite_logit() -> None:
    masked = bitmask.apply(torch.zeros(1, 1, 8), torch.zeros(1, 1, 1, dtype=torch.int32), torch.tensor([True]))
    assert not masked.isfinite().any() and not masked.isnan().any()


statuses = st.sampled_from([OK] * 6 + [status for status in MaskStatus if status != OK])


@settings(max_examples=200)
@given(data=st.data(), k=st.integers(0, 8))
def test_acceptance_and_emission_equal_a_plain_loop(data: st.DataObject, k: int) -> None:
    tokens = st.integers(0, 4)  # few, so that drafts are often accepted
    sampled = data.draw(st.lists(tokens, min_size=k + 1, max_size=k + 1))
    drafts = [data.draw(st.one_of(st.just(sampled[index]), st.integers(-1, 4))) for index in range(k)]
    finite = data.draw(st.lists(st.sampled_from([True] * 9 + [False]), min_size=k + 1, max_size=k + 1))
    status = data.draw(st.lists(statuses, min_size=k + 1, max_size=k + 1))
    count, room = data.draw(st.integers(0, k)), data.draw(st.integers(1, 12))
    stops = data.draw(st.lists(st.integers(-1, 6), min_size=2, max_size=2))

    expected: list[int] = []
    reason = None
    accepted = 0
    index = 0
    while reason is None:
        if status[index] != OK:
            ends = {MaskStatus.COMPLETE: 4, MaskStatus.TERMINATED: 2, MaskStatus.DEAD_END: 5}
            reason = ends.get(status[index], int(FinishCode.MASK_FAULT))
            break
        if not finite[index]:
            reason = int(FinishCode.LOGITS_FAULT)
            break
        drafted = index < min(k, count) and sampled[index] == drafts[index]
        legal = drafted and status[index + 1] not in (MaskStatus.NONE, MaskStatus.ILLEGAL)
        expected.append(sampled[index])
        accepted += legal
        if sampled[index] in stops:
            reason = int(FinishCode.STOP)
        elif len(expected) == room:
            reason = int(FinishCode.LENGTH)
        elif not legal:
            reason = int(FinishCode.RUNNING)
        index += 1

    row = [torch.tensor([value]) for value in (sampled, finite, drafts, status)]
    row[2] = row[2].to(torch.int64)
    result = acceptance.count_accepted(row[0], row[1], row[2], torch.tensor([count]), row[3])
    emitted, kept, finish = acceptance.emit(row[0], row[1], result, row[3], torch.tensor([stops]), torch.tensor([room]))
    assert row[0][0, : int(emitted)].tolist() == expected
    assert int(finish) == reason
    assert int(kept) == min(accepted, len(expected))


def test_tag_is_valid_for_its_owner_round_and_position_only() -> None:
    tags = torch.tensor([[[7, 3, 0, OK], [7, 3, 1, OK], [7, 2, 2, OK]], [[8, 3, 0, OK], [7, 3, 1, 4], [7, 3, 1, OK]]])
    owner, generated = torch.tensor([7, 7]), torch.tensor([3, 3])
    constrained = acceptance.mask_status(tags, owner, generated, torch.tensor([True, True]))
    assert constrained.tolist() == [[1, 1, 0], [0, 4, 0]]
    free = acceptance.mask_status(tags, owner, generated, torch.tensor([False, True]))
    assert free.tolist() == [[1, 1, 1], [0, 4, 0]]
    assert acceptance.mask_status(tags[:, 1:], owner, generated, torch.tensor([True, True]), first=1).tolist() == [[1, 0], [4, 0]]


@given(st.integers(0, 2**31 - 1), st.integers(1, 4))
def test_matcher_failure_after_a_draft_keeps_earlier_tokens(seed: int, k: int) -> None:
    """The random numbers are the same, so the tokens are a prefix of those without the failure."""
    made, batch, width = torch.Generator().manual_seed(seed), 4, 6
    target, offered = (torch.rand(batch, count, width, generator=made).softmax(-1) for count in (k + 1, k))
    drafts, seeds, length = (
        torch.randint(0, high, shape, generator=made) for high, shape in ((width, (batch, k)), (99, (batch,)), (99, (batch,)))
    )
    finite, count = torch.ones(batch, k + 1, dtype=torch.bool), torch.full((batch,), k)
    none_certain = torch.zeros_like(drafts, dtype=torch.bool)
    clean = torch.full((batch, k + 1), int(MaskStatus.OK))
    expected, held = rejection.exact_rejection(target, offered, none_certain, finite, drafts, count, clean, seeds, length)
    for index in range(k):
        failed = clean.clone()
        failed[:, index + 1 :] = int(MaskStatus.NONE)
        failed[:, index + 1] = int(MaskStatus.FAULT)
        tokens, accepted = rejection.exact_rejection(target, offered, none_certain, finite, drafts, count, failed, seeds, length)
        assert torch.equal(accepted, held.clamp(max=index + 1))
        compared = torch.arange(k + 1) < torch.minimum(held + 1, torch.tensor(index + 1))[:, None]
        assert torch.equal(tokens[compared], expected[compared])
