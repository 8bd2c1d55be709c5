"""The programs of layers and of draft selection in Triton's interpreter, against the references. test_kernels.py runs this file."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.graphs import drafting, host_nodes, proposing
from stepgraph.graphs.layers import dense, experts, lora, quantised, slot_mapping
from stepgraph.graphs.layers.triton import dense as dense_programs
from stepgraph.graphs.layers.triton import experts as expert_programs
from stepgraph.graphs.layers.triton import lora as lora_programs
from stepgraph.graphs.layers.triton import quantised as quantised_programs
from stepgraph.graphs.layers.triton import slot_mapping as slot_programs
from stepgraph.graphs.triton import host_nodes as upload_programs
from stepgraph.graphs.triton import proposing as proposed_programs
from stepgraph.graphs.triton import publishing
from stepgraph.sampling.grammar.status import TAG_FIELDS
from tests.graphs.layers.test_quantised import every_kind, made
from tests.graphs.layers.test_slot_mapping import appended_case, proposed_case, settling_case
from tests.graphs.test_publishing import ENDS, check_batch, check_end, check_slot
from tests.helpers.compared import call_of, compare, compare_program
from tests.helpers.hazards import hazards
from tests.runtime.models.test_ngram import inert_texts
from tools.gpu.checks.layers import count_output, keep_skipped, write_emission

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"
RNG = torch.Generator().manual_seed(1)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # the interpreter truncates bfloat16


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=RNG).to(dtype)


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=RNG)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_norms_and_activations_equal_the_references(dtype: torch.dtype) -> None:
    tol = TOLERANCES[dtype]
    for size in (1, 33, 600):
        weight = random(size, 2, dtype=dtype)[:, 0]
        for states in (random(5, size, dtype=dtype), random(3, 7, size, dtype=dtype)[:, 2:6], random(4, 2, size, dtype=dtype) * 1e-4):
            for offset in (0.0, 1.0):
                compare_program(dense.rms_norm, states, weight, 1e-5, offset, tol=tol)
        both = random(5, size, dtype=dtype), random(5, size, dtype=dtype)
        compare_program(dense.add_rms_norm, *both, weight, 1e-5, tol=tol)
    for size in (0, 3, dense_programs.ACTIVATED_TILE + 5):
        for activation in dense.Activation:
            pairs = random(2, 3, 2 * size, dtype=dtype) * 4
            compare_program(dense.activate_and_mul, pairs, activation, tol=8 * tol)


@pytest.mark.parametrize("least", [16 * dense_programs.COLUMN_TILE, pytest.param(dense_programs.WIDE_COLUMNS, marks=pytest.mark.soak)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_equal_the_reference(dtype: torch.dtype, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program for few rows and many columns, with a lower limit for many; other sizes and float32 use torch."""
    monkeypatch.setattr(dense_programs, "WIDE_COLUMNS", least)
    tol, outer = TOLERANCES[dtype] * 8, least + 5
    for count, inner, biases in ((1, 128, outer), (5, 256, 0), (16, 128, outer), (17, 128, 0), (3, 96, outer)):
        states, weight = random(count, inner + 3, dtype=dtype)[:, :inner], random(outer, inner, dtype=dtype) * inner**-0.5
        compare_program(dense.product, states, weight, random(biases, 2, dtype=dtype)[:, 0] if biases else None, tol=tol)
    alone, together = (torch.full((count, outer), 7, dtype=dtype) for count in (1, 9))
    states, weight = random(9, 256, dtype=dtype), random(outer, 256, dtype=dtype)
    dense_programs.product(states[4:5], weight, None, alone)
    dense_programs.product(states, weight, None, together)
    assert dtype is torch.float32 or torch.equal(alone[0], together[4])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_by_slot_equal_the_reference(dtype: torch.dtype) -> None:
    """Rows without an adapter, parts of tiles, states with gaps, more tokens than one instance takes."""
    for count, inner, outer in ((1, 5, 3), (4, 40, 2 * lora_programs.OUTER_TILE + 5), (70, lora_programs.INNER_TILE + 9, 4)):
        columns = torch.tensor([[9, 2], [9, 0], [9, 1]])  # of a wider table
        states, weights = random(3 * count, inner + 3, dtype=dtype)[:, :inner], random(3, outer, inner, dtype=dtype)
        weights[0] = 0
        for base in (None, random(3 * count, outer, dtype=dtype)):
            compare_program(lora.slot_product, states, columns[:, 1], weights, base, tol=16 * TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_experts_equal_the_references(dtype: torch.dtype) -> None:
    """Equal logits, experts that no token takes, more rows of one expert than a tile and more choices than are read at a time."""
    for tokens, count, number in ((1, 1, 1), (3, 2, 5), (70, 3, 4)):
        logits = integers(-2, 3, tokens, number).to(dtype)
        for normalised in (False, True):
            compare_program(experts.choose_experts, logits, count, normalised, tol=1e-6)
        wide, correction = integers(-2, 3, tokens, 3 * number).to(dtype), torch.randn(3 * number) / 4
        for groups, taken, normalised in ((1, 1, True), (number, max(1, number - 1), False)):
            compare_program(experts.choose_experts, wide, count, normalised, correction, groups, taken, 2.5, tol=1e-6)
        shares, chosen = map(Tensor.contiguous, experts.choose_experts.reference(logits, count, True))
        inner, outer = expert_programs.tiles_of(2)["INNER"] + 9, expert_programs.OUTER_TILE + 5
        weights, biases = random(number * outer, inner + 3, dtype=dtype)[:, :inner], random(number * outer, dtype=dtype)
        for rows, each in ((tokens, None), (tokens * count, biases)):
            given = random(rows, inner + 3, dtype=dtype)[:, :inner], chosen, weights, number, each
            compare_program(experts.expert_product, *given, tol=16 * TOLERANCES[dtype])
        parts = random(tokens * count, 40, dtype=dtype)
        compare_program(experts.combine_experts, parts, shares, tol=2 * TOLERANCES[dtype])


@every_kind
def test_quantised_products_and_rows_equal_the_references(kind: quantised.QuantKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and weights with gaps, and a number of blocks that is not a multiple of those multiplied at a time."""
    packed, weights = made(kind, 32, 384)
    apart = packed.repeat(1, 2, 1)[:, : packed.shape[1]]
    compare_program(quantised.quantised_rows, torch.tensor([31, 0, 17, 16]), apart, torch.float32)
    monkeypatch.setattr(quantised_programs, "DEQUANTISED_BYTES", 384 * 64)  # a tile at a time
    for count, dtype in ((1, torch.float16), (70, torch.float32)):
        states, bias = random(count, 400, dtype=dtype)[:, :384], random(32, dtype=dtype)
        tol = 384 * 2**-24 * float((states.double().abs() @ weights.double().abs().T).max()) + (2**-10 if dtype is torch.float16 else 0)
        for each in (None, bias):
            compare_program(dense.product, states, apart, each, tol=tol)
    for each in (None, bias):  # in float32, dequantised weights are exact
        compare(call_of(dense.product, states, packed, each, tol=tol), quantised_programs.multiply_dequantised)
    found = [torch.empty(3, 32) for _ in range(2)]
    quantised_programs.quantised_product(states[:3], packed, None, found[0])
    quantised_programs.quantised_product(torch.cat([states[:3], states])[:7], packed, None, other := torch.empty(7, 32))
    assert torch.equal(found[0], other[:3])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "INT4_128", "FP8"])
def test_products_of_packed_experts_equal_the_reference(name: str) -> None:
    """An expert that no token takes, and more rows of one expert than are multiplied at a time."""
    number, outer, inner = 3, 32, 256
    packed, weights = made(quantised.KINDS[name], number * outer, inner)
    for tokens, count, dtype in ((1, 1, torch.float16), (40, 2, torch.float32)):
        chosen = torch.stack([torch.randperm(2, generator=RNG)[:count] for _ in range(tokens)])
        for rows, bias in ((tokens, None), (tokens * count, random(number * outer, dtype=dtype))):
            states = random(rows, inner + 3, dtype=dtype)[:, :inner]
            tol = inner * 2**-24 * float((states.double().abs() @ weights.double().abs().T).max())
            tol += 2**-10 if dtype is torch.float16 else 0
            given = states, chosen, packed.repeat(1, 2, 1)[:, : packed.shape[1]], number, bias
            compare_program(experts.expert_product, *given, tol=tol)


def test_activations_of_large_numbers() -> None:
    pairs = torch.cat([torch.linspace(-80, 120, 350).view(5, 70), random(5, 70)], 1)
    for activation in dense.Activation:
        compare_program(dense.activate_and_mul, pairs, activation, tol=1e-6)


def test_slots_equal_the_reference() -> None:
    page, pages = 4, 5
    for batch, width, offset in itertools.product((1, 3), (1, 4, 9), (-3, -1, 0, 2)):
        state, tables = integers(0, page * pages + 2, batch, 7), integers(1, 40, batch, pages)  # columns of a wider table
        tokens, live, count = integers(-2, 50, batch, width), integers(0, 2, batch).bool(), integers(0, width + 1, batch)
        for given_live, given_count in itertools.product((None, live), (None, count)):
            arguments = (tokens, state[:, 3], state[:, 5], tables, offset, page, page * pages, given_live, given_count)
            compare_program(slot_mapping.place_tokens, *arguments)


@pytest.mark.parametrize("width", [1, 4, slot_programs.SHIFT_TILE + 3])
def test_shifted_entries_equal_the_reference(width: int) -> None:
    page, pages = 4, 50
    for by in (0, 1, 3):
        positions = integers(0, page * pages - width + 1, 2, 1) + torch.arange(width)
        arguments = (positions, integers(0, 3 * page, 2, width), integers(1, 40, 2, pages), page, by)
        compare_program(slot_mapping.shift_entries, *arguments)


def test_angles_equal_the_reference() -> None:
    """To the last bits of float32, also for angles of many turns."""
    positions = torch.cat([torch.arange(9), integers(9, 1 << 17, 40), torch.tensor([(1 << 20) - 1])])
    for half in (6, 32):
        frequencies = 10_000.0 ** -(torch.arange(half) / half)
        compare_program(slot_mapping.rope_angles, positions, frequencies, torch.float32, 1.25, tol=3e-7)
    exact = positions[:, None].float() * frequencies
    cosines, sines = torch.empty(len(positions), 1, 2 * half), torch.empty(len(positions), 1, 2 * half)
    slot_programs.rope_angles(positions, frequencies, torch.float32, 1.0, cosines, sines)
    error = 1e-11 + exact.double() * 2**-52  # of the series and of subtracting full turns; at a tie it decides the last bit
    for found, wanted in ((cosines[:, 0, :half], exact.double().cos()), (sines[:, 0, half:], exact.double().sin())):
        assert ((wanted - error).float() <= found).all() and (found <= (wanted + error).float()).all()


@pytest.mark.parametrize("words", [3, upload_programs.MASK_TILE + 5])
def test_scattered_masks_equal_the_reference(words: int) -> None:
    rows, masks, tags = torch.tensor([3, 0]), integers(-(2**31), 2**31, 2, words).to(torch.int32), integers(0, 3, 2, TAG_FIELDS)
    row_tags, row_masks = torch.zeros(4, 3, TAG_FIELDS, dtype=torch.int64), torch.zeros(4, 3, words, dtype=torch.int32)
    compare_program(host_nodes.scatter_masks, rows, tags, masks, row_tags, row_masks, torch.tensor([-1, 8]), torch.zeros_like(rows))
    tags[:, 2] = torch.tensor([3, -1])
    upload_programs.scatter_masks(rows, tags, masks, row_tags, row_masks, None, None)
    assert not row_tags.any() and not row_masks.any(), "a tag with a position out of range was written"


def test_draft_selection_equals_the_reference() -> None:
    for seed, (constrained, looked_up, forced) in itertools.product(range(6), itertools.product((False, True), repeat=3)):
        compare_program(drafting.select_draft, *settling_case(seed, 5, constrained, looked_up, forced, seed % 3 > 0))


@pytest.mark.parametrize(("constrained", "forced"), [(False, False), (True, False), (True, True)])
def test_chosen_chains_equal_the_reference(constrained: bool, forced: bool) -> None:
    for seed, drafts in itertools.product(range(8), (1, 3, 8)):
        compare_program(proposing.choose_chain, *proposed_case(seed, 5, drafts, constrained, forced))


def test_appended_tokens_equal_the_reference() -> None:
    for seed, count in itertools.product(range(8), (1, 3, 8, 9)):
        compare_program(proposing.append_tokens, *appended_case(seed, 5, count))


@pytest.mark.parametrize("tile", [16, 128])
def test_looked_up_chains_equal_the_reference(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposed_programs, "SEARCHED", tile)
    for case in inert_texts():
        compare_program(proposing.look_up, *case)


def test_look_up_reads_no_columns_between_text_and_given_text_nor_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with room for 64 and 4,096 tokens: the same number of loads, and chains from history and given text."""
    monkeypatch.setattr(proposed_programs, "SEARCHED", 16)
    loads, original = list[int](), InterpreterBuilder.create_masked_load
    for room in (64, 4096):
        text = torch.full((2, 2 * room), -1, dtype=torch.int32)
        text[0, :7] = torch.tensor([4, 5, 6, 7, 8, 4, 5])
        text[1, :3], text[1, room : room + 40] = torch.tensor([0, 9, 20]), torch.arange(20, 60)
        chain, counted = torch.zeros(2, 3, dtype=torch.int64), list[int]()
        with monkeypatch.context() as patch:
            patch.setattr(InterpreterBuilder, "create_masked_load", lambda *given, counted=counted: counted.append(1) or original(*given))
            proposed_programs.look_up(text, torch.tensor([7, 3]), torch.tensor([1, 1]), room, 3, 8, 1, chain)
        assert chain.tolist() == [[6, 7, 8], [21, 22, 23]]
        loads.append(len(counted))
    assert loads[0] == loads[1], loads


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_stored_drafts_equal_the_reference(drafts: int) -> None:
    """Chains and counts in columns of wider tables."""
    rows, chain = torch.tensor([4, 0, 2]), integers(-2, 9, drafts, 6)[:, :3].T
    counts = torch.zeros(5, 4, dtype=torch.int64)[:, 2]
    compare_program(drafting.store_drafts, rows, chain, torch.zeros(5, drafts, dtype=torch.int64), counts)


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
def test_written_emissions_equal_the_reference(drafts: int) -> None:
    for make in (write_emission, count_output, keep_skipped):
        call = make(torch.device("cpu"), 7, drafts)
        compare(call, call.triton)


def test_published_rounds_equal_the_reference() -> None:
    check_batch(publishing.take_batch)
    check_slot(publishing.publish_results, publishing.end_round)
    for end in ENDS:
        check_end(publishing.end_round, *end)


def test_accesses_of_different_threads_are_separated_by_barriers() -> None:
    with hazards() as found:
        test_products_by_slot_equal_the_reference(torch.float32)
        test_slots_equal_the_reference()
        test_shifted_entries_equal_the_reference(4)
        test_scattered_masks_equal_the_reference(3)
        test_draft_selection_equals_the_reference()
        test_chosen_chains_equal_the_reference(True, True)
        test_appended_tokens_equal_the_reference()
        with pytest.MonkeyPatch.context() as monkeypatch:
            test_looked_up_chains_equal_the_reference(16, monkeypatch)
        test_stored_drafts_equal_the_reference(3)
        test_written_emissions_equal_the_reference(3)
        test_published_rounds_equal_the_reference()
    assert found == set()


def test_two_programs_that_write_one_row_are_found() -> None:
    rows, tokens, text = torch.tensor([2, 2]), torch.tensor([[5, 6], [7, 8]]), torch.zeros(3, 9, dtype=torch.int32)
    with hazards() as found:
        proposed_programs.append_tokens(rows, tokens, torch.tensor([1, 1]), torch.tensor([3, 4]), text)
        assert found == set(), "the rows have different columns"
        proposed_programs.append_tokens(rows, tokens, torch.tensor([2, 1]), torch.tensor([3, 4]), text)
    assert found == {("store in append_row of another program", "store in append_row")}
