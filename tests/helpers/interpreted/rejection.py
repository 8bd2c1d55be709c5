"""Exact rejection in Triton's interpreter, against the torch reference. test_kernels.py runs this file in a process of its own."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.sampling import rng, sampler
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import rejection
from stepgraph.sampling.kernels.triton import numeric
from stepgraph.sampling.rng import Purpose
from tests.helpers.compared import compare_program
from tests.helpers.hazards import hazards

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"
SETTINGS = torch.tensor([[1.0, 0, 1, 0], [0.7, 5, 0.9, 0.01], [0.0, 0, 1, 0], [3.0, 0, 1, 0]])  # every fourth row is greedy
STATUSES = torch.tensor([int(MaskStatus.OK)] * 12 + [int(status) for status in MaskStatus])


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message="overflow encountered", category=RuntimeWarning)


class Case(NamedTuple):
    """The inputs of the operation."""

    target_probs: Tensor
    draft_probs: Tensor
    rows: Tensor
    certain: Tensor
    finite: Tensor
    drafts: Tensor
    draft_count: Tensor
    status: Tensor
    seed: Tensor
    length: Tensor


def make_case(batch: int, k: int, width: int, seed: int, *, closeness: float = 0.5, sound: bool = False) -> Case:
    """Permuted rows of a larger table; drafts drawn from their distributions, a few of them certain, -1 after draft_count. Unless
    `sound`, also a few -1 before it, statuses that end a chain, and positions without a finite logit."""
    rng = torch.Generator().manual_seed(seed)
    settings = SETTINGS.repeat(-(-batch // len(SETTINGS)), 1)[:batch]
    logits = torch.randn(batch, k + 1, width, generator=rng) * 2
    proposal = logits[:, :k] + torch.randn(batch, k, width, generator=rng) * closeness
    target, draft_distributions = sampler.distribution(logits, settings), sampler.distribution(proposal, settings)
    rows = torch.randperm(batch + 3, generator=rng)[:batch]
    draft_probs = torch.full((batch + 3, k, width), float("nan"))  # other rows' are never read
    draft_probs[rows] = draft_distributions
    certain = (settings[:, :1] <= 0) | (torch.rand(batch, k, generator=rng) < (-1 if sound else 0.2))
    draft_probs[rows] = torch.where(certain[..., None], float("nan"), draft_distributions)
    noise = torch.empty_like(draft_distributions).exponential_(generator=rng)
    draft_count = torch.randint(0, k + 1, (batch,), generator=rng)
    draft_count = torch.where(torch.rand(batch, generator=rng) < 0.6, k, draft_count)
    drafts = torch.where(torch.arange(k) < draft_count[:, None], (draft_distributions / noise).argmax(-1), -1)
    drafts = torch.where(torch.rand(batch, k, generator=rng) < (2 if sound else 0.9), drafts, -1)
    finite = torch.rand(batch, k + 1, generator=rng) < (2 if sound else 0.95)
    status = STATUSES[torch.randint(0, len(STATUSES), (batch, k + 1), generator=rng)]
    status = torch.where(torch.rand(batch, 1, generator=rng) < (2 if sound else 0.5), int(MaskStatus.OK), status)
    return Case(
        target,
        draft_probs,
        rows,
        certain,
        finite,
        drafts,
        draft_count,
        status,
        torch.randint(0, 2**62, (batch,), generator=rng),
        torch.randint(1, 9000, (batch,), generator=rng),
    )


def compare(case: Case, tile: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and accepted counts of program and reference."""
    _, positions, width = case.target_probs.shape
    tokens, accepted = compare_program(rejection.reject_sample, *case, tile=tile or min(65_536, triton.next_power_of_2(width)))
    drawn = tokens[torch.arange(positions) >= accepted[:, None]]
    assert bool((drawn >= 0).all()) and bool((drawn < width).all())
    return tokens, accepted


@pytest.mark.parametrize("k", range(9))
def test_tokens_and_acceptance_equal_the_reference(k: int) -> None:
    _, accepted = compare(make_case(14, k, 160, k), tile=128)
    assert len(set(accepted.tolist())) > min(k, 2), "chains of several lengths"


@pytest.mark.parametrize("width", [1, 31, 33, 1000, 32_768, 131_071, 151_669, 262_144])
def test_rejection_at_every_width(width: int) -> None:
    compare(make_case(4, 2, width, width, closeness=0.3))


def test_view_of_wider_distributions() -> None:
    case = make_case(8, 3, 300, 5)
    padded = [torch.cat([each, torch.full((*each.shape[:2], 77), float("inf"))], 2)[..., :300] for each in case[:2]]
    compare(case._replace(target_probs=padded[0], draft_probs=padded[1]), tile=128)


def test_equal_distributions_accept_and_a_replacement_is_drawn_from_their_difference() -> None:
    """p = q except for a few small differences: after a rejection forced by a status only these may be drawn."""
    for seed, scraps in ((1, 0), (2, 1), (3, 2)):
        case = make_case(8, 2, 300, seed, closeness=0.0, sound=True)
        assert torch.equal(compare(case, tile=128)[1], case.draft_count)
        given = case.target_probs.clone()
        positions = torch.arange(scraps) * 100 + 77
        given[..., positions] += 1e-6
        refused = case._replace(target_probs=given, status=torch.full_like(case.status, int(MaskStatus.OK)))
        refused.status[:, 1] = int(MaskStatus.ILLEGAL)
        tokens, accepted = compare(refused, tile=128)
        assert int(accepted.max()) == 0
        sampled = ~case.certain[:, 0] & (case.draft_count > 0)
        if scraps:
            assert set(tokens[sampled, 0].tolist()) <= set(positions.tolist())
        else:
            assert bool((given[sampled, 0].gather(1, tokens[sampled, :1]) > 0).all()), "drawn from the target's distribution"
            assert len(set(tokens[sampled, 0].tolist())) > 2


def test_certain_draft_is_accepted_with_the_target_probability() -> None:
    """A draft that was chosen greedily and is verified with a distribution; a rejection draws another token."""
    case = make_case(48, 1, 40, 3, sound=True)
    most_probable = case.target_probs[:, :1].argmax(2)
    case = case._replace(certain=torch.ones(48, 1, dtype=torch.bool), drafts=most_probable, draft_count=torch.ones(48, dtype=torch.int64))
    tokens, accepted = compare(case, tile=64)
    none = case._replace(draft_probs=case.draft_probs[:, :0])
    assert torch.equal(compare(none, tile=64)[0], tokens), "draft probabilities of a certain draft are not read"
    greedy = torch.arange(48) % 4 == 2
    assert bool((accepted[greedy] == 1).all()) and 0 < int(accepted[~greedy].sum()) < 36
    assert bool((tokens[accepted == 0, 0] != most_probable[accepted == 0, 0]).all())


def test_dead_row_gives_token_zero() -> None:
    case = make_case(6, 2, 300, 9, sound=True)
    tokens, accepted = compare(case._replace(target_probs=torch.zeros_like(case.target_probs)), tile=256)
    assert tokens.eq(0).all() and accepted.eq(0).all()


@triton.jit
def _coins(seed, position, coins, SALT: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(coins + index, numeric.coin(tl.load(seed + index), tl.load(position + index), SALT))


def test_coins_equal_rng() -> None:
    count = 1 << 16
    generator = torch.Generator().manual_seed(2)
    seed, position = (torch.randint(-(2**62), 2**62, (count,), generator=generator) for _ in range(2))
    coins = torch.empty(count)
    _coins[(1,)](seed, position, coins, SALT=rng.signed(Purpose.ACCEPT * rng.GOLDEN), COUNT=count)
    assert torch.equal(coins, rng.uniform(seed, position, Purpose.ACCEPT))


def test_accesses_of_different_threads_are_separated_by_barriers() -> None:
    with hazards() as found:
        for k in (0, 3):
            compare(make_case(6, k, 100, 1), tile=32)
    assert found == set()
