"""Slots, angles, scattered masks and draft selection: C against plain torch, and refused inputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepgraph.graphs import drafting, host_nodes, proposing
from stepgraph.graphs.layers import slot_mapping
from stepgraph.graphs.row_layout import REFUSED
from stepgraph.sampling import native
from stepgraph.sampling.grammar.status import BITS_PER_WORD, TAG_FIELDS, MaskStatus
from tests.helpers.compared import compare_c
from tools.gpu.checks.layers import write_emission

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
PAGE, PAGES = 4, 5
SEEDS = st.integers(0, 2**31 - 1)


def random(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Random integers in [low, high)."""
    return torch.randint(low, high, shape, generator=generator)


@given(SEEDS, st.integers(1, 3), st.integers(1, 6), st.integers(-3, 4))
def test_slots_equal_the_reference(seed: int, batch: int, count: int, offset: int) -> None:
    made = torch.Generator().manual_seed(seed)
    state = random(made, 0, PAGE * PAGES + 2, batch, 7)  # columns of a wider table
    tokens, live, used = random(made, -2, 50, batch, count), random(made, 0, 2, batch).bool(), random(made, 0, count + 1, batch)
    tables = random(made, 1, 40, batch, PAGES)
    for given_live, given_count in itertools.product((None, live), (None, used)):
        arguments = (tokens, state[:, 3], state[:, 5], tables, offset, PAGE, PAGE * PAGES, given_live, given_count)
        compare_c(slot_mapping.place_tokens, *arguments)


@given(SEEDS, st.integers(1, 3), st.integers(1, 6), st.integers(0, 3))
def test_shifted_entries_have_the_slots_of_earlier_positions(seed: int, batch: int, count: int, by: int) -> None:
    made = torch.Generator().manual_seed(seed)
    positions = random(made, 0, PAGE * PAGES - count + 1, batch, 1) + torch.arange(count)
    slots, tables = random(made, 0, 3 * PAGE, batch, count), random(made, 1, 40, batch, PAGES)
    compare_c(slot_mapping.shift_entries, positions, slots, tables, PAGE, by)


def test_used_page_beyond_the_table_is_refused() -> None:
    tokens, length, end = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([PAGE * PAGES - 1]), torch.tensor([99])
    tables = torch.ones(1, PAGES, dtype=torch.int64)
    arguments = (length, end, tables, 0, PAGE, 99)
    with pytest.raises(IndexError, match="outside of its table"):
        slot_mapping.place_tokens(tokens, *arguments)
    inert = slot_mapping.place_tokens(tokens - 1, *arguments)
    assert bool((inert.slots < PAGE).all())
    with pytest.raises(IndexError, match="outside of its table"):
        slot_mapping.shift_entries(tokens + PAGE * PAGES + 1, tokens + PAGE, tables, PAGE, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_equal_the_reference(dtype: torch.dtype) -> None:
    """Within one ULP of float32; a bfloat16 result rarely differs."""
    positions, frequencies = torch.tensor([0, 1, 5, 777, 131_071]), 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
    for found, expected in zip(
        slot_mapping.rope_angles(positions, frequencies, dtype),
        slot_mapping.rope_angles.reference(positions, frequencies, dtype),
        strict=True,
    ):
        assert found.shape == expected.shape == (5, 1, 64) and found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=2**-7 if dtype is torch.bfloat16 else 3e-7, atol=2e-7)
        assert int((found != expected).sum()) <= (2 if dtype is torch.bfloat16 else found.numel())


@pytest.mark.parametrize("index", [0, 2])
def test_masks_and_tags_are_scattered_by_tag_position(index: int) -> None:
    made = torch.Generator().manual_seed(index)
    rows, masks = torch.tensor([3, 0]), random(made, -(2**31), 2**31, 2, 6).to(torch.int32)
    tags = random(made, 0, 9, 2, TAG_FIELDS)
    tags[:, 2] = index
    in_rows, forced = (torch.zeros(4, 3, TAG_FIELDS, dtype=torch.int64), torch.zeros(4, 3, 6, dtype=torch.int32)), torch.tensor([-1, 8])
    *written, copied = compare_c(host_nodes.scatter_masks, rows, tags, masks, *in_rows, forced, torch.zeros_like(forced))
    assert torch.equal(copied, forced)
    assert torch.equal(written[0][rows, index], tags) and torch.equal(written[1][rows, index], masks)
    tags[1, 2] = 3
    with pytest.raises(IndexError):
        host_nodes.scatter_masks(rows, tags, masks, *in_rows)


def settling_case(seed: int, batch: int, constrained: bool, looked_up: bool, forced: bool, certain: bool = True) -> tuple[Any, ...]:
    """The second of three drafts, in rows of larger tables."""
    made = torch.Generator().manual_seed(seed)
    width, tables = 70, [torch.zeros(batch + 3, 4, dtype=torch.bool) for _ in range(3)]
    rows = torch.randperm(batch + 3, generator=made)[:batch]
    masks = random(made, -(2**31), 2**31, batch + 3, 2, -(-width // BITS_PER_WORD)).to(torch.int32)[:, :1]
    status = random(made, int(MaskStatus.NONE), int(MaskStatus.FAULT) + 1, batch, 1)
    status[random(made, 0, 3, batch) > 0] = int(MaskStatus.OK)
    rule = (masks[:, 0], random(made, 0, 2, batch).bool(), status[:, 0])
    flags = [random(made, 0, 4, batch) > 0 for _ in range(2)]
    return (
        random(made, -2, width, batch),
        *flags,
        random(made, 0, 4, batch, 3)[:, 1],
        2,
        rows,
        random(made, 0, 9, 4, batch + 2),
        random(made, -width, width, batch, 3).clamp(min=-1) if looked_up else None,
        random(made, -width, width, batch).clamp(min=-1) if constrained and forced else None,
        *(rule if constrained else (None, None, None)),
        tables[0] if looked_up else None,
        tables[1] if constrained and forced else None,
        tables[2] if certain else None,
    )


@given(SEEDS, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_draft_selection_equals_the_reference(seed: int, constrained: bool, looked_up: bool, forced: bool, certain: bool) -> None:
    compare_c(drafting.select_draft, *settling_case(seed, 8, constrained, looked_up, forced, certain))


def proposed_case(seed: int, batch: int, drafts: int, constrained: bool, forced: bool) -> tuple[Any, ...]:
    """Chains of token ids, some of them invalid, in rows of larger tables."""
    made = torch.Generator().manual_seed(seed)
    words, most = 3, drafts + 2
    chains = random(made, -8, words * BITS_PER_WORD + 4, batch, drafts).clamp(min=-2)
    rows = torch.randperm(batch + 3, generator=made)[:batch]
    finish, limit = random(made, 0, 4, batch, 2)[:, 1].clamp(max=1), random(made, 0, drafts + 2, batch, 3)[:, 1]
    chosen = (chains, finish, limit, words * BITS_PER_WORD, rows)
    if not constrained:
        return *chosen, None, None, None, None, None
    masks = random(made, -(2**31), 2**31, batch + 3, most, words).to(torch.int32)
    status = random(made, int(MaskStatus.NONE), int(MaskStatus.FAULT) + 1, drafts, batch)
    status[random(made, 0, 5, drafts, batch) > 0] = int(MaskStatus.OK)
    only = random(made, -40, 40, most, batch + 2).clamp(min=-1)[:drafts, :batch] if forced else None
    flags = torch.zeros(batch + 3, most, dtype=torch.bool) if forced else None
    return *chosen, masks, random(made, 0, 4, batch) > 0, status.T, only, flags


@given(SEEDS, st.integers(1, 9), st.integers(1, 8), st.booleans(), st.booleans())
def test_chosen_chains_equal_the_reference(seed: int, batch: int, drafts: int, constrained: bool, forced: bool) -> None:
    compare_c(proposing.choose_chain, *proposed_case(seed, batch, drafts, constrained, forced))


def test_proposed_chains_end_at_the_first_draft_that_is_not_taken() -> None:
    """Legal tokens are 1 and 2; the third draft of two rows is forced, for one of them to the proposed token. 9 is an invalid id."""
    proposed = torch.tensor([[1, 2, 1, 2], [1, 3, 1, 2], [1, 2, 1, 2], [1, 2, 2, 1], [1, 9, 1, 2]])
    masks, some = torch.full((5, 5, 1), 0b110, dtype=torch.int32), torch.arange(5)
    forced, flags = torch.full((4, 5), -1), torch.zeros(5, 5, dtype=torch.bool)
    forced[2, 2:4] = 2
    alive, status = torch.ones(5, dtype=torch.bool), torch.full((5, 4), int(MaskStatus.OK))
    rows = (proposed, alive.long(), torch.tensor([3, 4, 4, 4, 4]), 9, some)
    chosen = proposing.choose_chain(*rows, masks, alive, status, forced, flags)
    assert chosen.tolist() == [[1, 2, 1, -1], [1, REFUSED, -1, -1], [1, 2, 2, -1], [1, 2, 2, 1], [1, -1, -1, -1]]
    assert flags.nonzero().tolist() == [[2, 2], [3, 2]]
    assert proposing.choose_chain(*rows).tolist() == [[1, 2, 1, -1], [1, 3, 1, 2], [1, 2, 1, 2], [1, 2, 2, 1], [1, -1, -1, -1]]
    with pytest.raises(IndexError):
        proposing.choose_chain(proposed + 32, *rows[1:3], 99, some, masks, alive, status)


def appended_case(seed: int, batch: int, count: int) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(seed)
    width, rows = 2 * count + 3, torch.randperm(batch + 2, generator=made)[:batch]
    emitted, length = random(made, 0, count + 1, batch), random(made, 0, count + 3, batch, 2)[:, 1]
    return rows, random(made, 0, 99, batch, count), emitted, length, random(made, -1, 99, batch + 2, width).to(torch.int32)


@given(SEEDS, st.integers(1, 9), st.integers(1, 9))
def test_appended_tokens_equal_the_reference(seed: int, batch: int, count: int) -> None:
    case = appended_case(seed, batch, count)
    compare_c(proposing.append_tokens, *case)
    case[3].fill_(case[-1].shape[1])
    case[2].fill_(1)
    with pytest.raises(IndexError):
        proposing.append_tokens(*case)


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_written_emissions_equal_the_reference(k: int) -> None:
    call = write_emission(torch.device("cpu"), 7, k)
    compare_c(call.operation, *call.inputs)
    call.inputs[5][3] = k + 2
    with pytest.raises(IndexError):
        call.kernel()


def test_token_beyond_the_mask_is_not_used_as_an_index() -> None:
    case = list(settling_case(0, 8, True, True, False))
    case[7], case[10] = torch.full((8, 3), 10_000), torch.ones(8, dtype=torch.bool)
    with pytest.raises(IndexError):
        drafting.select_draft(*case)
    case = list(settling_case(0, 8, True, True, False))
    case[7], case[10], case[5] = torch.zeros(8, 3, dtype=torch.int64), torch.ones(8, dtype=torch.bool), torch.full((8,), 11)
    with pytest.raises(IndexError):
        drafting.select_draft(*case)
