"""Sampled rounds emit tokens from the target's own masked, penalised and filtered distribution, for all sampling parameters.

Each position of each setting is compared with the float64 oracle over 20,000 rounds, conditioned on the preceding drafts, by a
likelihood-ratio chi-square test. A correct sampler fails one such test with a probability of at most RARE, for any counts: at
least one of the 3,584 tests of `make soak` with at most 4e-10, of the 493 tests of `make test` with at most 5e-11. The negative
controls are incorrect samplers that occur in other implementations; the same test must detect each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import drafting
from stepgraph.graphs.batch import Batch
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling import kernels, rng, sampler
from stepgraph.sampling.kernels import processors, rejection
from stepgraph.sampling.params import SamplingParams
from stepgraph.sampling.sampler import Param
from tests.helpers.c_library import run_references
from tests.helpers.chi_square import likelihood_ratio, likelihood_ratio_bound
from tests.helpers.law import EVERY_SETTING, OWN_VOCABULARY, RoundSampler, Setting, setting

ROUNDS = 20_000
RARE = 1e-13
SHAPES = list(itertools.product((1, 2, 3, 4), (False, True)))  # number of drafts, and whether the draft model has its own vocabulary
BITS = list(itertools.product((False, True), repeat=7))


def fraction(part: int) -> list[int]:
    """Indices of 16 of the 128 settings that contain every combination of any three values; the eight parts are a partition."""
    parity = [bool(part >> bit & 1) for bit in range(3)]
    return [index for index, (a, b, c, d, e, f, g) in enumerate(BITS) if [a ^ b ^ c ^ e, b ^ c ^ d ^ f, a ^ c ^ d ^ g] == parity]


def least_chance(law: RoundSampler) -> Tensor:
    """[S]: the smallest p-value of each setting over its positions."""
    return law.p_value_bounds(law.count_tokens(ROUNDS)).amin(0)


def check(law: RoundSampler) -> None:
    tally = law.count_tokens(ROUNDS)
    assert float(law.p_value_bounds(tally).min()) > RARE
    good = torch.tensor([each.close_drafter for each in law.settings])
    assert int(tally.accepted[good].sum()) > 1.5 * int(tally.accepted[~good].sum()), "good drafters have a higher acceptance rate"


def test_parts_cover_all_triples_and_all_combinations() -> None:
    parts = [fraction(part) for part in range(8)]
    assert sorted(itertools.chain(*parts)) == list(range(128))
    for part in parts:
        for columns in itertools.combinations(range(7), 3):
            assert len({tuple(BITS[index][column] for column in columns) for index in part}) == 8


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow if part in (1, 2, 3, 6) else pytest.mark.soak) for part in range(1, 8))]
)
def test_emitted_tokens_follow_the_target_distribution(part: int) -> None:
    """All parts: every setting once; for each number of drafts and kind of vocabulary, every combination of any three values."""
    k, d2t = SHAPES[part]
    check(RoundSampler(k, d2t, [EVERY_SETTING[index] for index in fraction(part)], seed=part))


@pytest.mark.soak
@pytest.mark.parametrize(("k", "d2t"), SHAPES)
def test_emitted_tokens_follow_the_target_distribution_in_every_combination(k: int, d2t: bool) -> None:
    check(RoundSampler(k, d2t, EVERY_SETTING, seed=10 * k + d2t))


FREE = Setting(SamplingParams(temperature=1.5), False, False)
MIXED = (
    FREE,
    setting(True, True, False, False, True, True, True),
    setting(False, False, True, True, False, True, False),
    Setting(SamplingParams(temperature=0.0), True, True),
    Setting(SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias={1: 3.0}), False, True),
)


@pytest.mark.parametrize("d2t", [False, True])
def test_drafts_drawn_by_the_numbers_of_the_target_keep_the_distribution(d2t: bool) -> None:
    check(RoundSampler(3, d2t, (of(), *MIXED), linked=True))


def test_unmasked_drafts_keep_the_distribution() -> None:
    assert float(least_chance(RoundSampler(3, False, MIXED, draft_masks=False)).min()) > RARE


def test_rows_with_fewer_drafts_than_positions_keep_the_distribution() -> None:
    law = RoundSampler(3, True, MIXED)
    law.start_state[:, Column.DRAFT_LIMIT] = torch.arange(len(law.start_state)) // len(MIXED) % 4
    assert float(least_chance(law).min()) > RARE
    assert float(least_chance(RoundSampler(0, False, MIXED)).min()) > RARE


@pytest.mark.parametrize("verified", [0, 2])
def test_rounds_that_drop_drafts_keep_the_distribution(verified: int) -> None:
    assert float(least_chance(RoundSampler(3, True, MIXED, verified=verified)).min()) > RARE


@pytest.mark.parametrize("size", [1, 3, 10, 40, 200])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_tail_bound_is_an_upper_bound(size: int, share: float) -> None:
    """Compared with the exact tail of every binomial outcome, also where Pearson's approximation is wrong by orders of magnitude."""
    heads = torch.arange(size + 1, dtype=torch.float64)
    chance = [math.comb(size, head) * share**head * (1 - share) ** (size - head) for head in range(size + 1)]
    statistic = likelihood_ratio(torch.stack([heads, size - heads], 1), torch.tensor([[share, 1 - share]]))
    for least in statistic.tolist():
        tail = sum(each for each, value in zip(chance, statistic.tolist(), strict=True) if value >= least)
        assert tail <= likelihood_ratio_bound(least, 1) * (1 + 1e-9)
    assert likelihood_ratio_bound(math.inf, 1) == 0


def of(temperature: float = 1.5, good: bool = True, masked: bool = False, **params: Any) -> Setting:
    return Setting(SamplingParams(temperature=temperature, **params), masked, good)


class TestControls:
    """Negative controls: each incorrect sampler is detected in the settings it affects, and only there."""

    @pytest.fixture(autouse=True)
    def references(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run_references(monkeypatch)

    def check_detected(self, law: RoundSampler, expected: list[bool]) -> None:
        assert (least_chance(law) < RARE).tolist() == expected

    @pytest.mark.parametrize("shared", ["all", "replacement", "coin", "next token"])
    def test_shared_noise_of_draft_and_target(self, monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
        """The random number that chose a draft also decides its acceptance, its replacement or the next token."""
        real, draft, target = rng.uniform, rng.Purpose.DRAFT, rng.Purpose.TARGET

        def uniform(seed: Tensor, position: Tensor, purpose: rng.Purpose, index: Tensor | None = None) -> Tensor:
            if shared == "next token":
                return real(seed, position + 1, target, index) if purpose == draft else real(seed, position, purpose, index)
            if purpose == rng.Purpose.ACCEPT and shared in ("all", "coin"):
                return real(seed, position, draft, torch.zeros_like(position))  # the random number of token 0
            return real(seed, position, draft if shared in ("all", "replacement") else purpose, index)

        monkeypatch.setattr(rng, "uniform", uniform)
        self.check_detected(RoundSampler(2, False, [of(good=False), of(good=False, top_k=4), of(good=False, masked=True)]), [True] * 3)

    def test_dropped_drafts_counted_as_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = kernels.reject_sample

        def reject_sample(*arguments: Tensor) -> tuple[Tensor, Tensor]:
            given = list(arguments)
            given[6] = torch.full_like(given[6], 3)  # the number of drafts before the others were dropped
            return real(*given)

        monkeypatch.setattr(kernels, "reject_sample", reject_sample)
        self.check_detected(RoundSampler(3, False, [of(good=False), of(0.0)], verified=2), [True, False])

    def test_draft_probabilities_without_the_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drafts are sampled under the mask, but verified with their unmasked probabilities."""
        real = drafting.choose_draft

        def choose_draft(*arguments: Any, **named: Any) -> Tensor:
            tokens = real(*arguments, **named)
            free = [*arguments[:5], None, *arguments[6:]]
            real(*free, **named)
            arguments[0].batch_drafts[arguments[2] - 1].copy_(tokens)
            return tokens

        monkeypatch.setattr(drafting, "choose_draft", choose_draft)
        self.check_detected(RoundSampler(2, False, [of(), of(masked=True), of(masked=True, top_p=0.8)]), [False, True, True])

    def test_filters_on_the_last_row_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Top-k, top-p and min-p apply to the token after the last draft, not to the rows that verify drafts."""
        real = sampler.distribution

        def distribution(logits: Tensor, params: Tensor) -> Tensor:
            if logits.dim() == 2:
                return real(logits, params)
            plain = params.clone()
            plain[:, Param.TOP_K], plain[:, Param.TOP_P], plain[:, Param.MIN_P] = 0, 1, 0
            return torch.cat([real(logits[:, :-1], plain), real(logits[:, -1:], params)], 1)

        monkeypatch.setattr(sampler, "distribution", distribution)
        self.check_detected(RoundSampler(2, False, [of(), of(top_k=3), of(top_p=0.8), of(min_p=0.1)]), [False, True, True, True])

    def test_penalties_that_ignore_previous_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = processors.apply_settings

        def without_drafts(logits: Tensor, rows: processors.RowSettings, before: Tensor, *others: Any) -> Tensor:
            return real(logits, rows, torch.full_like(before, -1), *others)

        monkeypatch.setattr(processors, "apply_settings", without_drafts)
        cases = [of(min_p=0.1, logit_bias={1: 1.0}), of(presence_penalty=1.0), of(frequency_penalty=2.0), of(0.7, repetition_penalty=3.0)]
        self.check_detected(RoundSampler(2, False, cases), [False, True, True, True])

    @pytest.mark.parametrize("columns", ["first", "none"])
    def test_draft_probabilities_without_d2t(self, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
        """Draft probabilities are stored at the target's first token ids instead of the mapped ones, or not stored."""
        real = drafting.choose_draft

        def choose_draft(buffers: Any, after: Batch, step: int, *arguments: Any, **named: Any) -> Tensor:
            tokens = real(buffers, after, step, *arguments, **named)
            kept = buffers.row_draft_probs[:, step - 1]
            own = kept[:, list(OWN_VOCABULARY)]
            kept.zero_()
            if columns == "first":
                kept[:, : len(OWN_VOCABULARY)] = own
            return tokens

        monkeypatch.setattr(drafting, "choose_draft", choose_draft)
        self.check_detected(RoundSampler(2, True, [of(), of(masked=True, top_k=3), of(temperature=0.7, good=False)]), [True] * 3)

    def test_replacement_drawn_from_the_full_target_distribution(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a rejection, the draft's probabilities are not subtracted from the distribution of the replacement."""
        real: Callable[..., tuple[Tensor, Tensor]] = rejection.exact_rejection

        def reject_sample(*arguments: Tensor) -> tuple[Tensor, Tensor]:
            _, held = real(*arguments)
            return real(*arguments[:5], held, *arguments[6:])  # as if there were no further drafts

        monkeypatch.setattr(rejection, "exact_rejection", reject_sample)
        self.check_detected(RoundSampler(2, False, [of(), of(good=False), of(top_k=3, masked=True), of(presence_penalty=1.0)]), [True] * 4)
