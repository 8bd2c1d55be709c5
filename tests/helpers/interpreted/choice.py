"""The Triton programs in Triton's interpreter, against the torch references. test_kernels.py runs this file in a process of its
own: whether programs are interpreted is decided once, when triton is imported.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.sampling import bitmask, rng
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import choice
from stepgraph.sampling.kernels.triton import numeric
from stepgraph.sampling.rng import Purpose
from tests.helpers.compared import compare_program
from tests.helpers.hazards import hazards
from tests.helpers.pairs import pairs

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"
WIDTHS = [1, 31, 32, 33, 1000, 4097, 32_768, 131_071, 131_072, 151_669, 151_936, 262_144]
INF = math.inf


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message="overflow encountered", category=RuntimeWarning)


def compare(
    logits: Tensor,
    masks: Tensor | None,
    rows: Tensor | None = None,
    constrained: Tensor | None = None,
    tile: int = 0,
    ids: Tensor | None = None,
    status: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The operation's program, with tiles that the interpreter runs in a short time."""
    tile = tile or max(32, min(65_536, triton.next_power_of_2(logits.shape[2])))
    finite, token = compare_program(choice.masked_argmax, logits, masks, rows, constrained, ids, status, tile=tile)
    assert bool((token >= 0).all()) and bool((token < logits.shape[2]).all())
    return finite, token


def padded(batch: int, positions: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0, *, coarse: bool = False) -> Tensor:
    """Logits as a view of wider ones, whose rest must not be read."""
    values = torch.randn(batch, positions, width + 67, generator=torch.Generator().manual_seed(seed)) * 4
    values = (values.round() if coarse else values).to(dtype)
    values[..., width:] = INF
    values[..., width + 1 :: 2] = math.nan
    return values[..., :width]


def random_masks(rows: int, positions: int, width: int, density: float, seed: int) -> Tensor:
    """Bits beyond the width are set: they must not matter."""
    allowed = torch.rand(rows, positions, -(-width // 32) * 32, generator=torch.Generator().manual_seed(seed)) < density
    allowed[..., width:] = True
    return bitmask.pack(allowed)


@pytest.mark.parametrize(("width", "dtype"), pairs(WIDTHS, [torch.float32, torch.bfloat16, torch.float16]))
def test_masked_argmax_at_every_width(width: int, dtype: torch.dtype) -> None:
    rows, constrained = torch.tensor([3, 0, 3]), torch.tensor([True, True, False])
    for density in (0.5, 3 / width):
        masks = random_masks(4, 2, width, density, width)
        compare(padded(3, 2, width, dtype, width), masks, rows, constrained)
        compare(padded(3, 2, width, dtype, width, coarse=True), masks[:3], None, constrained)
    compare(padded(3, 2, width, dtype, width, coarse=True), None)


@pytest.mark.parametrize("tile", [32, 256, 4096])
def test_masked_argmax_over_many_tiles(tile: int) -> None:
    width = 10 * tile + 5
    masks = random_masks(5, 3, width, 0.02, tile)
    compare(padded(2, 3, width, torch.bfloat16, tile, coarse=True), masks, torch.tensor([4, 1]), torch.tensor([True, False]), tile)


def test_sign_bit_of_a_mask_word_is_a_token() -> None:
    allowed = torch.zeros(1, 1, 96, dtype=torch.bool)
    allowed[..., 31::32] = True
    logits = torch.zeros(1, 1, 96)
    logits[0, 0, 95] = 1
    assert compare(logits, bitmask.pack(allowed), None, torch.tensor([True]))[1].item() == 95
    logits[0, 0, 95] = 0
    assert compare(logits, bitmask.pack(allowed), None, torch.tensor([True]))[1].item() == 31


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    width = 300
    masks, constrained = torch.full((1, 1, 10), -1, dtype=torch.int32), torch.tensor([True])
    for values in ((0.0, -0.0), (-0.0, 0.0), (5.0, 5.0), (INF, INF), (-INF, -INF)):
        logits = torch.full((1, 1, width), -INF, dtype=dtype)
        logits[0, 0, 70], logits[0, 0, 290] = values
        for some in ((masks, None, constrained), (None,)):
            finite, token = compare(logits, *some, tile=64)  # type: ignore[misc]
            assert (finite.item(), token.item()) == (abs(values[0]) < INF, 70 if values[0] > -INF else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("legal", [True, False])
def test_only_nan_of_a_legal_token_is_reported(legal: bool, dtype: torch.dtype) -> None:
    width = 1000
    allowed = torch.ones(1, 1, width, dtype=torch.bool)
    logits = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    for index, value in ((200, math.nan), (900, math.nan), (100, INF)):
        logits[0, 0, index] = value
        allowed[0, 0, index] = legal
    logits[0, 0, 900].neg_()
    finite, token = compare(logits, bitmask.pack(allowed), None, torch.tensor([True]), tile=128)
    assert bool(finite) != legal
    assert (token.item() == 200) == legal
    compare(logits, bitmask.pack(allowed), None, torch.tensor([False]), tile=128)


def test_row_without_a_legal_token_is_not_finite_and_gives_token_zero() -> None:
    masks = torch.zeros(2, 2, 5, dtype=torch.int32)
    masks[1] = -1
    finite, token = compare(padded(2, 2, 150, torch.float16, 1), masks, None, torch.tensor([True, True]), tile=64)
    assert finite.tolist() == [[False, False], [True, True]] and token[0].tolist() == [0, 0]


def test_views_with_any_leading_strides() -> None:
    logits = torch.randn(3, 4, 200, generator=torch.Generator().manual_seed(2)).transpose(0, 1)
    masks = random_masks(3, 6, 200, 0.3, 3).transpose(0, 1)
    compare(logits, masks, torch.tensor([5, 0, 2, 2]), torch.tensor([True, True, False, True]), tile=64)


@pytest.mark.parametrize("width", [1, 40, 1024, 32_000])
def test_own_vocabulary_reads_the_mask_bits_of_its_tokens(width: int) -> None:
    target = 131_072
    ids = torch.randperm(target, generator=torch.Generator().manual_seed(width))[:width].sort().values
    for density in (0.5, 0.01):
        masks = random_masks(3, 1, target, density, width)
        logits = padded(4, 1, width, torch.bfloat16, width, coarse=True)
        compare(logits, masks, torch.tensor([2, 0, 1, 1]), torch.tensor([True, True, False, True]), tile=4096, ids=ids)


@pytest.mark.parametrize("status", list(MaskStatus))
@pytest.mark.parametrize("own", [False, True])
def test_mask_without_status_ok_allows_nothing(status: MaskStatus, own: bool) -> None:
    """The mask bits are ignored; a row without a mask ignores its status."""
    masks, ids = torch.full((2, 2, 4), -1, dtype=torch.int32), torch.arange(100) if own else None
    statuses = torch.tensor([[int(status), int(MaskStatus.OK)]] * 2)
    finite, token = compare(torch.ones(2, 2, 100), masks, None, torch.tensor([True, False]), tile=64, ids=ids, status=statuses)
    assert finite.tolist() == [[status == MaskStatus.OK, True], [True, True]]
    assert token.tolist() == [[0, 0], [0, 0]]


@triton.jit
def _numbers(seed, position, index, chance, noise, SALT: tl.constexpr, COUNT: tl.constexpr):
    number = tl.arange(0, COUNT)
    arguments = (tl.load(seed + number), tl.load(position + number), tl.load(index + number))
    tl.store(chance + number, numeric.uniform(arguments[0], arguments[1], arguments[2], SALT))
    tl.store(noise + number, numeric.exponential(arguments[0], arguments[1], arguments[2], SALT))


@pytest.mark.parametrize("purpose", list(Purpose))
def test_random_numbers_equal_rng(purpose: Purpose) -> None:
    """Uniform numbers bit for bit; exponential ones within four ULP, since the interpreter uses numpy's logarithm."""
    count = 1 << 18
    generator = torch.Generator().manual_seed(int(purpose))
    seed, position = (torch.randint(-(2**62), 2**62, (count,), generator=generator) for _ in range(2))
    index = torch.randint(0, 262_144, (count,), generator=generator)
    chance, noise = torch.empty(count), torch.empty(count)
    _numbers[(1,)](seed, position, index, chance, noise, SALT=rng.signed(purpose * rng.GOLDEN), COUNT=count)
    assert torch.equal(chance, rng.uniform(seed, position, purpose, index))
    away = (noise.view(torch.int32) - rng.exponential(seed, position, purpose, index).view(torch.int32)).abs()
    assert int(away.max()) <= 4


STATUSES = [MaskStatus.OK] * 6 + [status for status in MaskStatus if status != MaskStatus.OK]


@given(data=st.data(), k=st.integers(0, 8))
def test_chain_accept_equals_the_reference(data: st.DataObject, k: int) -> None:
    """The cases of test_acceptance.py."""

    def several(strategy: st.SearchStrategy[int], count: int) -> list[int]:
        return data.draw(st.lists(strategy, min_size=count, max_size=count))

    sampled = several(st.integers(0, 4), k + 1)
    drafts = [data.draw(st.one_of(st.just(sampled[index]), st.integers(-1, 4))) for index in range(k)]
    finite = torch.tensor([several(st.sampled_from([1] * 9 + [0]), k + 1)], dtype=torch.bool)
    status = several(st.sampled_from(STATUSES), k + 1)
    count, room = data.draw(st.integers(0, k)), data.draw(st.integers(1, 12))
    stops = several(st.integers(-1, 6), 2)
    row = [torch.tensor([values], dtype=torch.int64) for values in (sampled, drafts, status, stops)]
    one = [torch.tensor([value]) for value in (count, room)]
    known = torch.tensor([data.draw(st.integers(0, k))]) if data.draw(st.booleans()) else None
    compare_program(choice.chain_accept, row[0], finite, row[1], one[0], row[2], row[3], one[1], known)


@pytest.mark.parametrize("k", [0, 3, 8])
def test_chain_accept_of_a_batch(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    batch = 120

    def draw(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, (batch, *shape), generator=generator)

    sampled = draw(5, k + 1)
    drafts = torch.where(draw(4, k) > 0, sampled[:, :k], draw(5, k, low=-1))
    status = torch.tensor([int(value) for value in STATUSES])[draw(len(STATUSES), k + 1)]
    status = torch.where(draw(2, 1) > 0, status, int(MaskStatus.OK))
    room, stops = draw(13), draw(7, 3, low=-1)
    for known in (None, draw(k + 1)):
        compare_program(choice.chain_accept, sampled, draw(10, k + 1) > 0, drafts, draw(k + 1), status, stops, room, known)


def test_accesses_of_different_threads_are_separated_by_barriers() -> None:
    with hazards() as found:
        masks, constrained = random_masks(4, 2, 70, 0.5, 1), torch.tensor([True, True, False])
        compare(padded(3, 2, 70, torch.float32, 1), masks, torch.tensor([3, 0, 3]), constrained, 32)
        compare(padded(3, 2, 70, torch.float32, 1), None, tile=32)
        test_own_vocabulary_reads_the_mask_bits_of_its_tokens(40)
        test_mask_without_status_ok_allows_nothing(MaskStatus.DEAD_END, False)
        test_chain_accept_of_a_batch(3)
    assert found == set()
