"""Rounds in which a grammar forces drafts keep the law: a forced draft is a certainty, and is judged as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import drafting
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffers import BufferSpec, Column, forced_specs
from tests.helpers.law import Law, Setting, setting

ROUNDS, RARE = 20_000, 1e-13  # as in test_sampling_law.py
SETTINGS = [
    setting(temperature, top_k, False, min_p, penalties, masked, good)
    for temperature, top_k, min_p, penalties, masked, good in (
        (True, False, False, False, True, True),
        (False, True, False, False, True, False),
        (True, False, True, True, True, True),
        (True, False, False, False, False, True),
    )
]


class ForcedLaw(Law):
    """At most places, a token that follows from the text alone is proposed in the draft's stead, whatever the target thinks."""

    def __init__(self, k: int, d2t: bool, settings: Sequence[Setting]) -> None:
        super().__init__(k, d2t, settings)
        made = torch.Generator().manual_seed(11)
        legal = self.masks.float() * torch.rand(self.masks.shape, generator=made)
        self.forced = torch.where(torch.rand(legal.shape[:2], generator=made) < 0.8, legal.argmax(-1), -1)

    def _specs(self) -> Iterable[BufferSpec]:
        return [*super()._specs(), *forced_specs(self.limits)]

    def _fill_masks(self, batch: Batch, index: int, previous: Tensor, legal: Tensor) -> None:
        super()._fill_masks(batch, index, previous, legal)
        if index < self.k:  # rows without a grammar are shown one as well, which must not matter
            position = batch.column(Column.LENGTH) - 1 + index
            self.buffers.batch_forced[index].copy_(self.forced[position, previous.clamp(min=0)])


@pytest.mark.parametrize(("k", "d2t"), [(1, False), (3, True)])
def test_forced_drafts_keep_the_distribution(k: int, d2t: bool) -> None:
    law = ForcedLaw(k, d2t, SETTINGS)
    tally = law.tally(ROUNDS)
    assert float(law.chances(tally).min()) > RARE
    masked = torch.tensor([asked.masked for asked in law.settings])[law.kind]
    assert bool(law.buffers.row_forced[law.buffers.batch_rows[masked]].any(0).all()), "at every place"
    assert not bool(law.buffers.row_forced[law.buffers.batch_rows[~masked]].any())


def test_forced_draft_judged_as_sampled_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft's own distribution says of it is no matter."""
    real = drafting.choose_draft

    def choose_draft(buffers: Any, after: Batch, step: int, *arguments: Any, **named: Any) -> Tensor:
        tokens = real(buffers, after, step, *arguments, **named)
        buffers.row_certain[:, step - 1] = False
        return tokens

    monkeypatch.setattr(drafting, "choose_draft", choose_draft)
    law = ForcedLaw(2, False, SETTINGS)
    found = law.chances(law.tally(ROUNDS)).amin(0) < RARE
    assert found.tolist() == [True, True, True, False], "and where nothing is forced, nothing is wrong"


def test_forced_token_with_a_wrong_tag_is_not_drafted() -> None:
    """Its mask is another request's, history's or place's, and so is what it forces."""
    law = ForcedLaw(1, False, SETTINGS[:1])
    buffers, rows = law.buffers, law.limits.max_rows
    law.forced.fill_(6)
    for column in range(4):
        batch = read_batch(buffers, rows)
        law._fill_masks(batch, 0, batch.column(Column.LAST_TOKEN), batch.live)
        buffers.batch_tags[0, ::2, column] += 1
        logits = torch.zeros(rows, law.limits.num_tokens)
        tokens = drafting.choose_draft(buffers, batch, 1, logits, drafting.continuing(batch), masked=True, sampled=True)
        assert tokens[::2].unique().tolist() == [-1] and tokens[1::2].unique().tolist() == [6]
        assert not bool(buffers.row_forced[batch.rows[::2]].any()) and bool(buffers.row_forced[batch.rows[1::2]].all())
