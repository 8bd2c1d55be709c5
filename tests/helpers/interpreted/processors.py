"""Tags, masks and processors in Triton's interpreter, against the references. test_kernels.py runs this file in a process of its own."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import triton
from torch import Tensor

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import GrammarMask, Processed, choice, processors
from tests.helpers.compared import compare_program
from tests.helpers.hazards import hazards
from tests.helpers.pairs import pairs
from tools.gpu.checks.masks import Case, make_case, tag_inputs
from tools.gpu.checks.operations import log_probabilities, top_logprobs

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"
WIDTHS = [32, 33, 100, 1000, 4097, 32_768, 131_071, 151_669, 151_936, 262_144]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = math.inf


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message="invalid value encountered", category=RuntimeWarning)  # NaN minus a penalty


def compare(case: Case, tile: int = 0) -> Processed:
    """Program and reference on the same inputs: equal bits, except that both zeros are equal."""
    tile = tile or max(32, min(65_536, triton.next_power_of_2(case.logits.shape[2])))
    return Processed(*compare_program(processors.process_logits, *case.arguments(()), tile=tile))


@pytest.mark.parametrize(("width", "dtype"), [*zip(WIDTHS, DTYPES * 4, strict=False), (131_071, torch.float32), (131_071, torch.float16)])
def test_process_at_every_width(width: int, dtype: torch.dtype) -> None:
    found = compare(make_case(4, 2, width, dtype))
    assert 0 < int(found.finite.sum()) < found.finite.numel()
    compare(make_case(4, 1, width, dtype, masked=False, first=2))


@pytest.mark.parametrize(("tile", "first_and_count"), pairs([64, 256, 512], [(0, 4), (0, 1), (3, 1), (1, 2)]))
def test_process_over_many_tiles_at_every_position(tile: int, first_and_count: tuple[int, int]) -> None:
    first, positions = first_and_count
    for constrained in (True, False):
        compare(make_case(4, positions, tile + 5, torch.bfloat16, masked=constrained, first=first, seed=tile), tile=tile)


@pytest.mark.parametrize("own", [1, 40, 1024, 32_000])
def test_an_own_vocabulary_reads_the_mask_of_the_target_tokens(own: int) -> None:
    case = make_case(5, 1, 131_071, torch.bfloat16, draft_vocabulary=own, first=2, seed=own)
    compare(case, tile=max(32, triton.next_power_of_2(own) // 4))
    assert case.ids is not None
    shuffled = case.ids[torch.randperm(own, generator=torch.Generator().manual_seed(own))]
    compare(case._replace(ids=shuffled))


def test_rows_without_a_row_table() -> None:
    case = make_case(6, 2, 500, torch.float16)
    settings = case.settings._replace(**{name: getattr(case.settings, name)[:6] for name in case.settings._fields[:-1]})
    assert case.mask is not None
    compare(case._replace(settings=settings, rows=None, mask=case.mask._replace(rows=None)), tile=128)


def one_row(allowed: Tensor, logits: Tensor, status: MaskStatus = MaskStatus.OK) -> Case:
    """A row with default settings, at one position under one mask."""
    case = make_case(1, 1, logits.shape[0], torch.float32)
    mask = GrammarMask(bitmask.pack(allowed)[None, None], None, torch.tensor([True]), torch.tensor([[int(status)]]))
    return case._replace(logits=logits[None, None], mask=mask)


@pytest.mark.parametrize("status", list(MaskStatus))
def test_mask_without_status_ok_allows_nothing(status: MaskStatus) -> None:
    found = compare(one_row(torch.ones(96, dtype=torch.bool), torch.zeros(96), status), tile=32)
    assert bool((found.logits == (0.0 if status == MaskStatus.OK else -INF)).all())
    assert (found.finite.item(), found.status.item()) == (status == MaskStatus.OK, status)


def test_sign_bit_of_a_mask_word_is_a_token() -> None:
    allowed = torch.arange(96) % 32 == 31
    assert torch.equal(compare(one_row(allowed, torch.zeros(96)), tile=64).logits[0, 0] == 0, allowed)


def test_empty_mask_is_not_a_dead_end_of_the_request() -> None:
    found = compare(one_row(torch.zeros(70, dtype=torch.bool), torch.zeros(70)), tile=32)
    assert (found.finite.item(), found.status.item()) == (False, MaskStatus.OK)


def test_banning_all_legal_tokens_is_a_dead_end() -> None:
    allowed = torch.zeros(70, dtype=torch.bool)
    allowed[[3, 69]] = True
    case = one_row(allowed, torch.zeros(70))
    settings, rows = case.settings, case.rows
    assert rows is not None
    for banned, expected in (((3, 69), MaskStatus.DEAD_END), ((3, 68), MaskStatus.OK)):
        settings.bias_ids[rows[0], :2], settings.biases[rows[0], :2] = torch.tensor(banned), -INF
        found = compare(case, tile=32)
        assert (found.finite.item(), found.status.item()) == (expected == MaskStatus.OK, expected)


def test_nan_is_detected_only_at_legal_tokens() -> None:
    logits = torch.zeros(70)
    logits[40] = math.nan
    for legal in (True, False):
        allowed = torch.ones(70, dtype=torch.bool)
        allowed[40] = legal
        found = compare(one_row(allowed, logits), tile=32)
        assert (found.finite.item(), found.status.item()) == (not legal, MaskStatus.OK)


@pytest.mark.parametrize("positions", [1, 2, 5, 9])
def test_mask_status_equals_the_reference(positions: int) -> None:
    tags, owner, generated, constrained, rows = tag_inputs(40, positions, torch.device("cpu"))
    for first, chosen in ((2, rows), (0, rows), (2, None)):
        own = tags if chosen is not None else tags.transpose(0, 1).contiguous().transpose(0, 1)
        status, has_grammar = compare_program(choice.mask_status, own, owner, generated, constrained, first, chosen)
        assert torch.equal(has_grammar, (constrained if chosen is None else constrained[rows]) != 0)
        statuses = status[has_grammar]
        assert int((statuses == MaskStatus.NONE).sum()) > 0 and (first == 0 or int((statuses != MaskStatus.NONE).sum()) > 0)


@pytest.mark.parametrize(("width", "tile"), [(1, 32), (70, 32), (1_003, 256), (131_071, 4096)])
def test_log_probabilities_equal_the_reference(width: int, tile: int) -> None:
    call = log_probabilities(torch.device("cpu"), 3, 2, width)
    compare_program(call.operation, *call.inputs, tol=call.tol, tile=tile)


@pytest.mark.parametrize(("width", "tile"), [(4, 32), (70, 32), (1_003, 256), (131_071, 4096)])
def test_top_logprobs_equal_the_reference(width: int, tile: int) -> None:
    call = top_logprobs(torch.device("cpu"), 5, 2, width)
    compare_program(call.operation, *call.inputs, tol=call.tol, tile=tile)


def test_accesses_of_different_threads_are_separated_by_barriers() -> None:
    with hazards() as found:
        compare(make_case(4, 2, 70, torch.float32), tile=32)
        compare(make_case(4, 1, 70, torch.float32, masked=False, first=2), tile=32)
        compare(make_case(5, 1, 500, torch.bfloat16, draft_vocabulary=40, first=2), tile=32)
        test_mask_status_equals_the_reference(2)
        test_log_probabilities_equal_the_reference(70, 32)
        test_top_logprobs_equal_the_reference(70, 32)
    assert found == set()
