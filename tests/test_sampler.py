"""Distributions against a float64 oracle in plain Python; law of the rejection, with controls that must fail."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph.sampling import acceptance, rng, sampler
from stepgraph.sampling.grammar.status import MaskStatus
from tests.chi_square import chi_square_p
from tests.oracles import filtered

ROUNDS = 20_000
RARE = 1e-9  # a right sampler fails one cell of these tables once in 1e9: once in a million runs of all of them


def params(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    return torch.tensor([[temperature, top_k, top_p, min_p]])


values = st.integers(-40, 40).map(lambda value: value / 8)  # few, so that ties are common


@settings(max_examples=400)
@given(
    logits=st.lists(st.one_of(values, st.just(-math.inf)), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_distribution_equals_the_oracle(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    result = sampler.distribution(torch.tensor([[logits]]), params(temperature, top_k, top_p, min_p))[0, 0]
    expected = filtered(logits, temperature, top_k, top_p, min_p)
    assert torch.allclose(result.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("width", [131_071, 151_936])
def test_distribution_of_a_large_vocabulary(width: int) -> None:
    logits = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 0, -100:] = -math.inf
    for row in (params(0.8, 50, 0.9, 0.01), params(1.0), params(0.0)):
        result = sampler.distribution(logits, row)[0, 0]
        expected = torch.tensor(filtered(logits[0, 0].tolist(), *row[0].tolist()), dtype=torch.float64)
        assert torch.allclose(result.double(), expected, atol=1e-6)
        assert float(result[-100:].sum()) == 0


def test_rows_keep_their_own_settings_and_a_dead_row_gives_nothing() -> None:
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(2))
    logits[1] = -math.inf
    rows = torch.cat([params(0.5, 3), params(1.0), params(0.0)])
    together = sampler.distribution(logits, rows)
    for row in range(3):
        assert torch.equal(together[row], sampler.distribution(logits[row : row + 1], rows[row : row + 1])[0])
    assert float(together[1].sum()) == 0
    assert torch.equal(together[2].argmax(-1), logits[2].argmax(-1)) and together[2].sum(-1).tolist() == [1.0, 1.0]


class Chain:
    """One round of K drafts for 20,000 requests that differ in their seeds alone."""

    def __init__(self, k: int, row: Tensor, density: float, good: bool, seed: int = 0, *, q_masked: bool = True) -> None:
        made = torch.Generator().manual_seed(seed)
        self.k, self.vocab = k, 8
        target = torch.randn(k + 1, self.vocab, generator=made) * 1.5
        draft = target[:k] + torch.randn(k, self.vocab, generator=made) * (0.3 if good else 3.0)
        masks = torch.rand(k + 1, self.vocab, generator=made) < density
        masks[:, 0] = True
        self.masked = torch.where(masks, target, -math.inf)
        self.row = row
        self.target = sampler.distribution(self.masked[None], row)[0]
        drafted = torch.where(masks[:k], draft, -math.inf) if q_masked else draft
        self.draft = sampler.distribution(drafted[None], row)[0]
        self.seeds, self.length = torch.arange(ROUNDS) + seed * 1_000_003, torch.full((ROUNDS,), 17)
        self.vocabulary = torch.arange(self.vocab)

    def drafts(self) -> Tensor:
        positions = self.length[:, None, None] + torch.arange(self.k)[:, None]
        noise = rng.exponential(self.seeds[:, None, None], positions, rng.Purpose.DRAFT, self.vocabulary)
        return sampler.race(self.draft.expand(ROUNDS, -1, -1), noise)

    def run(self, target: Tensor | None = None, draft: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and how many drafts held, as the round has it; `target` and `draft` replace what it is told."""
        return acceptance.reject_sample(
            (self.target if target is None else target).expand(ROUNDS, -1, -1),
            (self.draft if draft is None else draft).expand(ROUNDS, -1, -1),
            torch.ones(ROUNDS, self.k + 1, dtype=torch.bool),
            self.drafts(),
            torch.full((ROUNDS,), self.k),
            torch.full((ROUNDS, self.k + 1), int(MaskStatus.OK)),
            self.seeds,
            self.length,
        )

    def worst(self, tokens: Tensor, accepted: Tensor) -> float:
        """The least p-value over all places: there the emitted token follows the masked, filtered target, whatever came before."""
        truth = [filtered(place.tolist(), *self.row[0].tolist()) for place in self.masked]
        found = 1.0
        for place in range(self.k + 1):
            reached = accepted >= place
            counts = torch.bincount(tokens[reached, place], minlength=self.vocab)
            found = min(found, chi_square_p(counts, torch.tensor(truth[place], dtype=torch.float64)))
        return found


GRID = list(itertools.product((0.7, 1.6), (0, 3), (1.0, 0.8), (0.0, 0.15), (1.0, 0.5), (True, False)))


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p", "density", "good"), GRID)
def test_what_is_emitted_follows_the_target(temperature: float, top_k: int, top_p: float, min_p: float, density: float, good: bool) -> None:
    for k in (1, 2, 3, 4):
        chain = Chain(k, params(temperature, top_k, top_p, min_p), density, good, seed=k)
        tokens, accepted = chain.run()
        assert chain.worst(tokens, accepted) > RARE
        if k == 4 and density == 1.0 and (top_k, top_p, min_p) == (0, 1.0, 0.0):
            share = float(accepted.double().mean()) / k
            assert share > 0.5 if good else share < 0.5, "good drafters help, bad ones do not"


def test_drafts_that_ignore_the_mask_are_exact_too() -> None:
    for k in (1, 4):
        chain = Chain(k, params(1.0), 0.5, True, q_masked=False)
        assert chain.worst(*chain.run()) > RARE


def test_fewer_drafts_than_places_and_none_at_all() -> None:
    chain = Chain(3, params(1.2), 0.8, True)
    count = torch.arange(ROUNDS) % 4
    arguments = (torch.ones(ROUNDS, 4, dtype=torch.bool), chain.drafts(), count, torch.full((ROUNDS, 4), int(MaskStatus.OK)))
    target, draft = chain.target.expand(ROUNDS, -1, -1), chain.draft.expand(ROUNDS, -1, -1)
    tokens, accepted = acceptance.reject_sample(target, draft, *arguments, chain.seeds, chain.length)
    assert bool((accepted <= count).all())
    assert chain.worst(tokens, accepted) > RARE
    free = Chain(0, params(1.2), 0.8, True)
    assert free.worst(*free.run()) > RARE


class TestControls:
    """Three wrong samplers that are in use elsewhere. The test of the law must reject each of them."""

    def test_one_noise_for_draft_and_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The draft's own number decides whether it holds and what replaces it."""
        chain = Chain(2, params(1.0), 1.0, False)
        drafts = chain.drafts()
        real = rng.uniform
        monkeypatch.setattr(rng, "uniform", lambda seed, position, purpose, index=None: real(seed, position, rng.Purpose.DRAFT, index))
        monkeypatch.setattr(chain, "drafts", lambda: drafts)
        assert chain.worst(*chain.run()) < RARE

    def test_q_of_the_unmasked_draft(self) -> None:
        """Drafts are drawn under the mask, and judged as if they had not been."""
        chain = Chain(2, params(1.0), 0.5, True)
        free = Chain(2, params(1.0), 0.5, True, q_masked=False)
        assert chain.worst(*chain.run(draft=free.draft)) < RARE

    def test_filters_on_the_last_row_only(self) -> None:
        """Top-k, top-p and min-p for the bonus token, none for the rows that judge drafts."""
        chain = Chain(2, params(1.0, 3, 0.9), 1.0, True)
        plain = sampler.distribution(chain.masked[None], params(1.0))[0]
        assert chain.worst(*chain.run(target=torch.cat([plain[:-1], chain.target[-1:]]))) < RARE
