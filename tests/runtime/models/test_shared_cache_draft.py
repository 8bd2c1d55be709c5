"""A draft without a cache that reads the target's, like heads that only have queries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from stepgraph import Engine, EngineConfig
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers, TapeBackend
from stepgraph.graphs.attention.paged import attention
from stepgraph.graphs.model import cache_specs
from stepgraph.graphs.model_call import ModelInput, ModelOutput

TOKENS, SIZE, NEW = 12, 8, 14
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 1, 4, 1, 5, 9, 2, 7], [8]]


class Bag(nn.Module):
    """A target whose cache entries depend on their token only."""

    vocab_size, feature_size, feature_dtype = TOKENS, SIZE, torch.float32

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(2)
        self.entries, self.queries, self.out = (nn.Parameter(torch.randn(TOKENS, SIZE, generator=made)) for _ in range(3))

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return cache_specs("target", 1, limits, 1, SIZE, torch.float32)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        keys, values = buffers["target_keys"][0], buffers["target_values"][0]
        for cache in (keys, values):
            cache.index_put_((inputs.slots,), self.entries[inputs.tokens][:, :, None])
        found = attention(self.queries[inputs.tokens][:, :, None], keys, values, inputs)[:, :, 0]
        return ModelOutput(found, found)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.out.T


class Reader(nn.Module):
    """Attends to the target's cache up to the end of the text; entries after it belong to rejected drafts."""

    vocab_size, d2t = TOKENS, None

    def __init__(self, target: Bag) -> None:
        super().__init__()
        self.out = target.out
        self.queries = nn.Parameter(torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(3)))

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        there = inputs._replace(positions=(inputs.positions - inputs.step).clamp(min=0))
        query = (self.queries[inputs.tokens] + inputs.features)[:, :, None]
        found = attention(query, buffers["target_keys"][0], buffers["target_values"][0], there)[:, :, 0]
        return ModelOutput(found, found)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.out.T


def attended(query: Tensor, entries: Tensor) -> Tensor:
    return torch.softmax(entries @ query * SIZE**-0.5, 0) @ entries


def next_token(target: Bag, history: Sequence[int]) -> int:
    return int((target.out @ attended(target.queries[history[-1]], target.entries[list(history)])).argmax())


def expected_drafts(target: Bag, draft: Reader, history: Sequence[int], count: int) -> list[int]:
    before = target.entries[list(history[:-1])]
    state, chain = attended(target.queries[history[-2]], before), [history[-1]]
    for _ in range(count):
        state = attended(draft.queries[chain[-1]] + state, before)
        chain.append(int((draft.out @ state).argmax()))
    return chain[1:]


@pytest.mark.parametrize("k", [1, 3])
@torch.no_grad()
def test_a_draft_can_read_the_targets_cache(k: int) -> None:
    """Acceptance is random, so that rejected drafts follow the text; the second and third prompt start with shared pages."""
    target = Bag()
    draft = Reader(target)
    for shares in (None, (0.6,) * k):
        config = EngineConfig(
            max_rows=2,
            num_speculative_tokens=k,
            draft_length=k,
            max_length=32,
            page_size=4,
            prefill_chunk=3,
            rounds_in_flight=1,
            greedy_only=True,
            forced_acceptance=shares,
        )
        with Engine(target, draft, config=config, backend=TapeBackend()) as engine:
            engine.capture()
            for prompt in PROMPTS:
                job = engine.submit(prompt, max_new_tokens=NEW)
                while engine.has_work:
                    engine.step()
                    if job.tokens and not job.finished:
                        useful = min(k, NEW - len(job.tokens))
                        drafts = engine.buffers.row_drafts[0, :useful].tolist()
                        assert drafts == expected_drafts(target, draft, [*prompt, *job.tokens], useful)
                history = list(prompt)
                while len(history) < len(prompt) + NEW:
                    history.append(next_token(target, history))
                assert shares or job.tokens == history[len(prompt) :]
            assert engine.stats().reused_tokens == 4 and engine.stats().drafts.accepted > 0
