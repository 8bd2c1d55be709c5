"""The Triton programs of the filters in Triton's interpreter: bit for bit the torch references. Run by test_kernels.py, as choice.py is.

No near tie needs a tolerance: both sides compute and sum weights in the same way. Only the noise of a race may differ, in its last
bit, and no draw here is that close.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.sampling import sampler
from stepgraph.sampling.kernels import filters
from stepgraph.sampling.kernels.triton.numeric import portable_exp
from stepgraph.sampling.rng import Purpose
from tests.helpers.compared import compare_program
from tests.helpers.hazards import Launch, hazards
from tests.helpers.interpreted.choice import padded

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"
INF = math.inf
GREEDY, PLAIN = [0.0, 0, 1, 0], [1.0, 0, 1, 0]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message="invalid value|overflow encountered", category=RuntimeWarning)


def compare(logits: Tensor, rows: list[list[float]], tile: int = 0, digit_bits: int = 5) -> Tensor:
    """Probabilities of program and reference."""
    tile = tile or min(32_768, max(32, triton.next_power_of_2(logits.shape[2])))
    (probs,) = compare_program(filters.distribution, logits, torch.tensor(rows), tile=tile, digit_bits=digit_bits)
    return probs


@pytest.mark.parametrize(
    ("width", "dtype", "coarse"),
    [
        (1, torch.float32, False),
        (33, torch.float16, True),
        pytest.param(1000, torch.float32, True, marks=pytest.mark.soak),
        (4097, torch.bfloat16, True),
        (131_071, torch.float32, False),
        pytest.param(151_936, torch.bfloat16, True, marks=pytest.mark.soak),
        (262_144, torch.float32, True),
    ],
)
def test_distribution_at_every_width(width: int, dtype: torch.dtype, coarse: bool) -> None:
    rows = [[0.7, 50, 0.9, 0.01], [1.3, 0, 0.95, 0]][: 1 if width > 100_000 else 2]
    logits = padded(len(rows), 2, width, dtype, coarse=coarse)
    logits[:, 1, width // 3 + 1 :] = -INF
    compare(logits, rows, digit_bits=3 if width > 100_000 else 5)


@pytest.mark.parametrize(("tile", "digit_bits"), [(32, 3), (64, 4)])
def test_distribution_over_many_tiles_and_digit_sizes(tile: int, digit_bits: int) -> None:
    logits = padded(2, 1, 2 * tile + 5, coarse=tile == 64)
    logits[1, 0, :tile] = -INF  # a tile that is skipped
    compare(logits, [[0.9, 11, 0.8, 0], [2.0, 20, 0.5, 0.02]], tile, digit_bits)


def test_rows_with_zero_or_one_possible_token() -> None:
    """Dead, NaN, infinite and greedy rows beside a flat one, with and without filters."""
    logits = padded(5, 1, 70)
    logits[0], logits[1, 0, 50], logits[2, 0, 3] = -INF, math.nan, INF
    logits[3, 0, 9], logits[3, 0, 61] = 99.0, 99.0
    logits[4] = 0.0
    for rows in ([PLAIN] * 3 + [GREEDY, PLAIN], [[0.5, 3, 0.9, 0.1]] * 3 + [[0.0, 3, 0.5, 0.5], [1.0, 3, 0.2, 0]]):
        probs = compare(logits, rows, tile=64)
        assert probs[:3].sum().item() == 0 and probs[3, 0].nonzero().flatten().tolist() == [9]
        assert bool((probs[4] == torch.tensor(1 / 70)).all()), "equal weights are kept together"


def test_settings_at_their_limits() -> None:
    logits = padded(6, 1, 50)
    probs = compare(logits, [[1.0, 50, 1, 0], [1.0, 2**24, 1, 0], [1.0, 49, 1, 0], [1.0, 0, 1e-6, 0], [1.0, 1, 1, 0], [1.0, 0, 1, 1.0]])
    assert (probs > 0).sum(-1).flatten().tolist() == [50, 50, 49, 1, 1, 1]
    none = compare(logits[:4], [[1.0, 0, 1e-50, 0], [1.0, 5, 0, 0], [1.0, 0, 0, 0.01], [2.0, 5, 0, 0.01]])
    assert torch.equal(none.argmax(-1), logits[:4].argmax(-1)) and bool((none.amax(-1) == 1).all()), "1e-50 is 0 in float32"
    logits[0, 0, :4] = torch.tensor([3e38, 3e38, -3e38, -INF])
    hot = compare(logits[:3], [[0.01, 0, 1, 0], [1e-40, 0, 0.9, 0], [3.4e38, 0, 1, 0]])
    assert (hot > 0).sum(-1).flatten().tolist() == [2, 1, 50], "no temperature makes a finite logit infinite"
    logits = padded(6, 1, 50)
    compare(logits, [[1.0, 5, 0.9, -0.0], [0.3, 0, 1, 0], [100.0, 5, 0.5, 0], [1e-6, 0, 1, 0], [1.0, 0, 0.99999994, 0], [1.0, 0, 1, 1e-30]])


def test_views_with_any_leading_strides() -> None:
    logits = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(2)).transpose(0, 1)
    compare(logits, [[1.0, 5, 1, 0], [0.5, 0, 0.8, 0]])


@pytest.mark.parametrize(("width", "target", "tile"), [(150, 150, 128), (131_071, 131_071, 32_768), (64, 4000, 64)])
def test_draw_equals_the_reference(width: int, target: int, tile: int) -> None:
    """A draft with its own vocabulary uses the random numbers of the target's tokens."""
    rng = torch.Generator().manual_seed(width)
    rows = [[0.7, 50, 0.9, 0.01], GREEDY, [1.3, 0, 0.95, 0], PLAIN]
    logits, params = padded(len(rows), 1, width)[:, 0], torch.tensor(rows)
    logits[3] = -INF
    ids = torch.randperm(target - 1, generator=rng)[:width] + 1 if target > width else None
    seed, position = torch.randint(0, 2**62, (len(rows),), generator=rng), torch.arange(len(rows))
    table = torch.randperm(len(rows) + 2, generator=rng)[: len(rows)]
    room = torch.zeros(len(rows) + 2, 2, target)[:, 1]
    arguments = logits, params, seed, position, Purpose.DRAFT, table, room, ids
    token, probs = compare_program(filters.draw, *arguments, tile=tile, digit_bits=3)
    assert token[3].item() == 0 and bool((probs[table].gather(1, token[:, None])[:3] > 0).all())


@triton.jit
def _weigh(values, weights, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(weights + index, portable_exp(tl.load(values + index)))


def test_weights_are_bit_equal_to_the_sampler() -> None:
    values = torch.cat([-torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) * 90, -torch.logspace(-30, 2, 1 << 16)])
    weights = torch.empty_like(values)
    _weigh[(1,)](values, weights, COUNT=len(values))
    assert torch.equal(weights, sampler.portable_exp(values))


def test_accesses_of_different_threads_are_separated_by_barriers() -> None:
    with hazards() as found:
        compare(padded(2, 2, 100), [[0.7, 50, 0.9, 0.01], [1.3, 0, 0.95, 0]], tile=32, digit_bits=3)
        test_rows_with_zero_or_one_possible_token()
        for width, target, tile in ((150, 150, 128), (64, 4000, 64)):
            test_draw_equals_the_reference(width, target, tile)
    assert found == set()


def test_reads_of_other_programs_need_the_atomic_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the counter of finished programs ordered nothing."""
    monkeypatch.setattr(Launch, "order", lambda *_: None)
    with hazards() as found:
        compare(padded(2, 2, 100), [[0.7, 50, 0.9, 0.01], [1.3, 0, 0.95, 0]], tile=32, digit_bits=3)
    assert found == {("store in find_least of another program", f"load in {name}") for name in ("find_least", "_sums_from")}
