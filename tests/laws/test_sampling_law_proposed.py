"""Sampled rounds whose drafts are proposed, not sampled, follow the target's own distribution.

Test and bounds are those of test_sampling_law.py. Drafts are tokens with high target probability or arbitrary ids: illegal tokens,
-1 (no draft), ids outside the vocabulary. The negative controls verify proposed drafts as if they were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs import BufferSpec, proposing
from stepgraph.graphs.batch import Batch
from stepgraph.graphs.model import History
from stepgraph.graphs.round_specs import look_up_specs, round_specs
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.kernels import rejection
from stepgraph.sampling.params import SamplingParams
from tests.helpers.c_library import run_references
from tests.helpers.law import GENERATED, TOKENS, RoundSampler, Setting, setting
from tests.helpers.proposers import FormulaProposer
from tests.laws.test_sampling_law import RARE, least_chance, of

MIXED = (
    Setting(SamplingParams(temperature=1.5), False, True),
    Setting(SamplingParams(temperature=1.5), True, False),
    setting(True, True, False, False, True, True, True),
    setting(False, False, True, True, False, False, True),
    setting(False, False, True, True, False, True, False),
    Setting(SamplingParams(temperature=0.0), True, True),
)


class ProposedLaw(RoundSampler):
    def __init__(self, k: int, settings: Sequence[Setting], seed: int = 0) -> None:
        super().__init__(k, False, settings, seed=seed)
        chains = self._chains(torch.Generator().manual_seed(seed))

        def formula(history: History, index: Tensor) -> Tensor:
            return chains[history.length - 1]

        self.proposer = FormulaProposer(formula)

    def _specs(self) -> Iterable[BufferSpec]:
        return (*round_specs(self.limits, samples_drafts=False), *proposing.text_specs(self.limits))

    def _chains(self, generator: torch.Generator) -> Tensor:
        """[positions, K]: at the first position of a good setting the most likely chain, elsewhere a random one."""
        chains = torch.randint(-1, TOKENS + 1, (self.limits.max_length, self.k), generator=generator)
        chains[:, 0].clamp_(0, TOKENS - 1)  # otherwise empty chains would be too frequent
        for number, (_, masked, good) in enumerate(self.settings):
            position, last = number * (self.k + 1), GENERATED[-1]
            for step in range(self.k if good else 0):
                logits = self.target.table[position + step, last, :TOKENS]
                legal = self.masks[position + step, last, :TOKENS] | (not masked)
                last = int(logits.masked_fill(~legal, -torch.inf).argmax())
                chains[position, step] = last
        return chains

    def _drafts(self, batch: Batch) -> list[Tensor]:
        tokens, legal, position = batch.column(Column.LAST_TOKEN), batch.live, batch.column(Column.LENGTH) - 1
        self._fill_masks(batch, 0, tokens, legal)
        drafts = list(proposing.propose(self.buffers, batch, self.proposer, self.limits, self.k).unbind(1))
        for step, draft in enumerate(drafts):
            legal = legal & (draft >= 0) & self.masks[position + step, tokens.clamp(min=0), draft.clamp(min=0)]
            self._fill_masks(batch, step + 1, draft, legal)
            tokens = draft
        return drafts


class LookedUpLaw(ProposedLaw):
    """Rounds of an engine with a draft model that drew the drafts of the previous rounds and does not run in these."""

    def _specs(self) -> Iterable[BufferSpec]:
        return (*round_specs(self.limits), *proposing.text_specs(self.limits), *look_up_specs(self.limits))

    def _drafts(self, batch: Batch) -> list[Tensor]:
        self.buffers.row_certain.fill_(False)
        self.buffers.row_draft_probs.fill_(1 / TOKENS)
        proposing.mark_looked_up(self.buffers, batch, sampled=True)
        return super()._drafts(batch)


@pytest.mark.parametrize("k", [1, 3, *(pytest.param(k, marks=pytest.mark.soak) for k in (2, 4, 5, 6))])
def test_emitted_tokens_follow_the_target_distribution(k: int) -> None:
    law = ProposedLaw(k, MIXED, seed=k)
    tally = law.count_tokens(20_000)
    assert float(law.p_value_bounds(tally).min()) > RARE
    assert int(tally.accepted[:1].sum()) > 2_000, "the most likely token is often accepted"


def test_looked_up_drafts_after_drawn_ones_keep_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float(least_chance(LookedUpLaw(2, MIXED)).min()) > RARE
    monkeypatch.setattr(proposing, "mark_looked_up", lambda *_, **__: None)
    found = least_chance(LookedUpLaw(2, MIXED)) < RARE
    assert found.tolist()[0] and not found.tolist()[-1], "looked-up drafts verified as drawn ones affect sampled rows only"


def test_rows_with_different_draft_limits_keep_the_distribution() -> None:
    law = ProposedLaw(3, MIXED)
    law.start_state[:, Column.DRAFT_LIMIT] = torch.arange(len(law.start_state)) // len(MIXED) % 4
    assert float(least_chance(law).min()) > RARE


Verify = Callable[..., tuple[Tensor, Tensor]]


class TestControls:
    """Negative controls: each is detected wherever a draft may be rejected."""

    SETTINGS = (of(), of(good=False), of(masked=True, top_k=3), of(temperature=0.0))

    def check_detected(self, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Verify], Verify]) -> None:
        run_references(monkeypatch)
        monkeypatch.setattr(rejection, "exact_rejection", wrong(rejection.exact_rejection))
        assert (least_chance(ProposedLaw(2, self.SETTINGS)) < RARE).tolist() == [True, True, True, False]

    @pytest.mark.parametrize("uniform", [True, False])
    def test_draft_verified_as_drawn(self, monkeypatch: pytest.MonkeyPatch, uniform: bool) -> None:
        """As drawn from the uniform distribution, or from the target's."""

        def wrong(real: Verify) -> Verify:
            def verify(probs: Tensor, _: Tensor, certain: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
                draft_probs = torch.full_like(probs, 1 / TOKENS) if uniform else probs
                return real(probs, draft_probs[:, :-1].contiguous(), torch.zeros_like(certain), *others)

            return verify

        self.check_detected(monkeypatch, wrong)

    def test_replacement_that_may_equal_the_rejected_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drafts are accepted by their probability, and the next token is the target's."""

        def wrong(real: Verify) -> Verify:
            def verify(probs: Tensor, _: Tensor, certain: Tensor, finite: Tensor, drafts: Tensor, count: Tensor, *others: Any) -> Any:
                known = functional.one_hot(drafts.clamp(min=0), probs.shape[2]).to(torch.float32), torch.zeros_like(certain), finite, drafts
                _, held = real(probs, *known, count, *others)
                return real(probs, *known, held, *others)  # as if there were no further drafts

            return verify

        self.check_detected(monkeypatch, wrong)
