"""Draft heads that read the target's cache and have none and no features, at advancing positions or at that of the last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepgraph import Engine, EngineConfig
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.toy import ToyTarget
from tests.helpers.toy_engines import VOCABULARY, plain

K, WIDTH = 3, VOCABULARY.logits_width
TARGET = ToyTarget(WIDTH, seed=3)
CONFIG = EngineConfig(max_rows=1, num_speculative_tokens=K, draft_length=K, max_length=48, page_size=4, prefill_chunk=5, backend="tape")


class Head(nn.Module):
    """Drafts a sum of its inputs: token, position, step, its previous output, and the target's entry that it reads."""

    vocab_size, d2t = WIDTH, None

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        read = (inputs.positions - (inputs.step if getattr(self, "advances", True) else 1)).clamp(min=0)
        slots = inputs.block_tables.gather(1, read // inputs.page_size) * inputs.page_size + read % inputs.page_size
        entry = buffers.toy_target_cache[slots]
        own = inputs.features[..., 0].to(torch.int64) if inputs.step > 1 else 0
        return ModelOutput(summed(inputs.tokens, inputs.positions, inputs.step, own, entry).to(torch.float32)[..., None])

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden.to(torch.int64) == torch.arange(WIDTH, device=hidden.device)).to(torch.float32)


def summed(token: Any, position: Any, step: int, own: Any, entry: Any) -> Any:
    return (token + 7 * position + 31 * step + 3 * own + 5 * entry) % 90


@pytest.mark.parametrize("advances", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_drafts_follow_the_declared_positions(advances: bool, eager: bool) -> None:
    config = replace(CONFIG, eager=eager, rounds_in_flight=1, forced_acceptance=(0.6,) * K, greedy_only=True)
    accepted = set[int]()
    with Engine(TARGET, Head(advances=advances), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        for last in (11, 12):  # the second prompt starts with a shared page
            job = engine.submit([5, 6, 7, 8, 9, 10, last], max_new_tokens=30)
            while not job.finished:
                accepted.update(event.num_accepted_drafts for event in engine.step())
                if job.tokens and not job.finished:
                    engine.backend.synchronize()
                    text, own, expected = [*job.prompt_ids, *job.tokens], 0, list[int]()
                    for step in range(1, K + 1):
                        position = len(text) - 1 + (step - 1 if advances else 0)
                        token = expected[-1] if expected else text[-1]
                        own = summed(token, position, step, own if step > 1 else 0, text[len(text) - 2])
                        expected.append(own)
                    useful = min(K, 30 - len(job.tokens))
                    assert engine.buffers.row_drafts[0].tolist()[:useful] == expected[:useful]
        assert engine.stats().reused_tokens == 4
    assert accepted >= {0, 1, 2}


def test_texts_do_not_depend_on_the_head() -> None:
    for advances in (True, False):
        with Engine(TARGET, Head(advances=advances), vocabulary=VOCABULARY, config=CONFIG) as engine:
            assert engine.generate([5, 6, 7], max_new_tokens=20).tokens == plain([5, 6, 7], 20).tokens


class Cached(Head):
    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return (BufferSpec("head_keys", (limits.cache_slots, 2), torch.float32),)


class Bare(Head):
    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> Any:
        return super().forward(inputs, buffers).hidden


class Flat(Head):
    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        return ModelOutput(super().forward(inputs, buffers).hidden[:, 0])


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (Cached(advances=False), r"Engine\.draft\.cache_specs: got head_keys with advances = False, expected none: drafts would overwrite"),
        (Head(advances="no"), r"Engine\.draft\.advances: got 'no', expected True or False"),
        (Head(shares_embeddings=1), r"Engine\.draft\.shares_embeddings: got 1, expected True or False"),
        (Bare(), r"draft\.forward: got Tensor, expected a ModelOutput; its features may be None"),
        (Flat(), r"draft hidden: got Tensor of shape \(\d+, 1\), expected \(\d+, \d+, 1\)"),
    ],
)
def test_invalid_heads_are_refused(head: Head, message: str) -> None:
    with pytest.raises(ValueError, match=message), Engine(TARGET, head, vocabulary=VOCABULARY, config=CONFIG) as engine:
        engine.capture()
