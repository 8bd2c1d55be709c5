"""A draft model that paused in rounds without drafts has the same cache afterwards as one that ran in every round."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, SamplingParams
from stepgraph.graphs.graph_key import PLAIN, Drafting, GraphKey
from stepgraph.graphs.round_specs import MAX_SKIPPED
from stepgraph.runtime.request import ActiveRequest
from tests.helpers.draft_engines import DRAFTERS, DraftCase

PROMPT, K = [3, 9, 4, 21, 7], 3
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def decode(drafter: DraftCase, first: Sequence[Drafting], tokens: int, given: Sequence[int] | None = None) -> tuple[Engine, list[int]]:
    """The engine after one request, and its tokens. The first rounds draft as in `first`, all others K tokens with the model."""
    look_up = 0 if given is None else 2
    engine = drafter.engine(K, draft_length="auto", max_length=240, max_rows=1, buckets=(1,), look_up=look_up)
    chooser, script = engine._parts.draft_lengths, iter(first)
    assert chooser is not None
    choose = chooser.choose

    def next_length(requests: tuple[ActiveRequest, ...], key: GraphKey) -> Drafting:
        choose(requests, key)
        return next(script, Drafting(K))

    chooser.choose = next_length  # type: ignore[method-assign]
    return engine, engine.generate(PROMPT, max_new_tokens=tokens, sampling=GREEDY, draft_ids=given).tokens


def entries(engine: Engine, name: str, count: int) -> Tensor:
    """[layers, count, ...]: the first entries of row 0 in a cache."""
    size, table = engine.limits.page_size, engine.buffers.row_block_tables[0]
    slots = [int(table[position // size]) * size + position % size for position in range(count)]
    return engine.buffers[name][:, slots]


def largest_difference(drafter: DraftCase, pause: int, looks_up: bool = False) -> float:
    """looks_up: drafts in the pause are looked up in the text itself, with one wrong token in eight."""
    always, other = decode(drafter, [], pause + 12)
    given = [token + (index % 8 == 7) for index, token in enumerate(other)] if looks_up else None
    paused, text = decode(drafter, [Drafting(K, False) if looks_up else PLAIN] * (pause // (K if looks_up else 1)), pause + 12, given)
    assert not looks_up or paused.stats().drafts.accepted_looked_up > pause / 2
    assert text == other and len(text) > pause
    names = [name for name in paused.buffers if name in ("draft_keys", "draft_values", "draft_states")]
    count = len(PROMPT) + pause
    pairs = [(entries(paused, name, count), entries(always, name, count)) for name in names]
    paused.close()
    always.close()
    return max(float((one - two).abs().max()) for one, two in pairs if one.numel())


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.name)
@pytest.mark.parametrize("pause", [3, pytest.param(80, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.soak)])
def test_cache_after_a_pause_equals_that_of_every_round(drafter: DraftCase, pause: int) -> None:
    assert largest_difference(drafter, pause) < 1e-5


@pytest.mark.parametrize("drafter", DRAFTERS[:2], ids=lambda drafter: drafter.name)
def test_cache_after_rounds_with_looked_up_drafts_equals_that_of_every_round(drafter: DraftCase) -> None:
    assert largest_difference(drafter, MAX_SKIPPED + 9, looks_up=True) < 1e-5


def test_pause_without_processing_the_skipped_tokens_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.runtime.build.process_skipped", lambda *_, **__: torch.empty(0))
    assert largest_difference(DRAFTERS[0], 5) > 1e-2
    assert largest_difference(DRAFTERS[0], 12, looks_up=True) > 1e-2
