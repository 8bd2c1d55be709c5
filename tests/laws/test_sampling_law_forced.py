"""Rounds with drafts forced by a grammar keep the target distribution: a forced draft is verified with draft probability 1.

The stages of a round, with tokens that are forced at random. Tokens that grammars on the device force: runtime/test_engine_sampling.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import drafting
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.round_specs import forced_specs
from stepgraph.graphs.row_layout import Column
from tests.helpers.law import RoundSampler, Setting, forget_certain_drafts, setting

ROUNDS, RARE = 20_000, 1e-13  # as in test_sampling_law.py
SETTINGS = [
    setting(temperature, top_k, False, min_p, penalties, masked, close_drafter)
    for temperature, top_k, min_p, penalties, masked, close_drafter in (
        (True, False, False, False, True, True),
        (False, True, False, False, True, False),
        (True, False, True, True, True, True),
        (True, False, False, False, False, True),
    )
]


class ForcedLaw(RoundSampler):
    """At about 80% of the positions a token that depends only on the text replaces the sampled draft, independently of the target."""

    def __init__(self, k: int, d2t: bool, settings: Sequence[Setting]) -> None:
        super().__init__(k, d2t, settings)
        generator = torch.Generator().manual_seed(11)
        legal = self.masks.float() * torch.rand(self.masks.shape, generator=generator)
        self.forced = torch.where(torch.rand(legal.shape[:2], generator=generator) < 0.8, legal.argmax(-1), -1)

    def _specs(self) -> Iterable[BufferSpec]:
        return [*super()._specs(), *forced_specs(self.limits)]

    def _fill_masks(self, batch: Batch, index: int, previous: Tensor, legal: Tensor) -> None:
        super()._fill_masks(batch, index, previous, legal)
        if index < self.k:  # rows without a grammar get a forced token as well, which must have no effect
            position = batch.column(Column.LENGTH) - 1 + index
            self.buffers.batch_forced[index].copy_(self.forced[position, previous.clamp(min=0)])


@pytest.mark.parametrize(("k", "d2t"), [(1, False), (3, True)])
def test_forced_drafts_keep_the_distribution(k: int, d2t: bool) -> None:
    law = ForcedLaw(k, d2t, SETTINGS)
    tally = law.count_tokens(ROUNDS)
    assert float(law.p_value_bounds(tally).min()) > RARE
    masked = torch.tensor([each.masked for each in law.settings])[law.kind]
    assert bool(law.buffers.row_forced[law.buffers.batch_rows[masked]].any(0).all()), "every draft position was forced at least once"
    assert not bool(law.buffers.row_forced[law.buffers.batch_rows[~masked]].any())


def test_forced_draft_verified_as_sampled_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: forced drafts are verified with the draft model's probabilities."""
    forget_certain_drafts(monkeypatch)
    law = ForcedLaw(2, False, SETTINGS)
    found = law.p_value_bounds(law.count_tokens(ROUNDS)).amin(0) < RARE
    assert found.tolist() == [True, True, True, False], "only settings with forced drafts are affected"


def test_forced_token_with_a_wrong_tag_is_not_drafted() -> None:
    """The tag shows that the mask and its forced token belong to another request, history or position."""
    law = ForcedLaw(1, False, SETTINGS[:1])
    buffers, rows = law.buffers, law.limits.max_rows
    law.forced.fill_(6)
    for column in range(4):
        batch = read_batch(buffers, rows)
        law._fill_masks(batch, 0, batch.column(Column.LAST_TOKEN), batch.live)
        buffers.row_tags[batch.rows[::2], 0, column] += 1
        logits = torch.zeros(rows, law.limits.num_tokens)
        mask = drafting.grammar_mask_of(buffers, batch, 1)
        tokens = drafting.choose_draft(buffers, batch, 1, logits, batch.live, mask, sampled=True)
        assert tokens[::2].unique().tolist() == [-1] and tokens[1::2].unique().tolist() == [6]
        assert not bool(buffers.row_forced[batch.rows[::2]].any()) and bool(buffers.row_forced[batch.rows[1::2]].all())
