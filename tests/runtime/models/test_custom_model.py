"""A custom model in half precision: for any prompt length, rounds equal a plain computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepgraph import Engine, EngineClosedError, EngineConfig, Vocabulary
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.model_call import ModelInput, ModelOutput

VOCABULARY = Vocabulary.printable()


class Decay(nn.Module):
    """A running mean of embeddings with one state per position, so that rejected drafts are overwritten."""

    feature_size, feature_dtype, d2t = 8, torch.bfloat16, None

    def __init__(self, name: str, vocab_size: int, fed: bool) -> None:
        super().__init__()
        self.name, self.vocab_size = name, vocab_size
        self.embedding = nn.Embedding(vocab_size, 8)
        self.feed = nn.Linear(8, 8) if fed else None
        self.head = nn.Linear(8, vocab_size)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return (BufferSpec(f"{self.name}_cache", (limits.cache_slots, 8), torch.bfloat16),)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        cache, size = buffers[f"{self.name}_cache"], inputs.page_size
        entries = self.embedding(inputs.tokens)
        if self.feed is not None:
            assert inputs.features is not None
            entries = entries + self.feed(inputs.features)
        for step in range(inputs.tokens.shape[1]):
            before = (inputs.positions[:, step] - 1).clamp(min=0)
            page = inputs.block_tables.gather(1, (before // size)[:, None]).squeeze(1)
            state = cache[page * size + before % size] * (inputs.positions[:, step] > 0)[:, None]
            cache.index_put_((inputs.slots[:, step],), (state + entries[:, step]) / 2)
        hidden = cache[inputs.slots]
        return ModelOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]


def plain(model: Decay, prompt: Sequence[int], count: int) -> list[int]:
    tokens, state = list(prompt), torch.zeros(1, 8, dtype=torch.bfloat16)
    for index in range(len(prompt) + count - 1):
        state = (state + model.embedding(torch.tensor([tokens[index]]))) / 2
        if index + 1 >= len(tokens):
            tokens.append(int(model.logits(state)[0].argmax()))
        if tokens[-1] in VOCABULARY.stop_token_ids and len(tokens) > len(prompt):
            break
    return tokens[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("k", [0, 3])
def test_a_half_precision_custom_model(k: int) -> None:
    torch.manual_seed(3)
    width = VOCABULARY.logits_width
    target, draft = Decay("mean", width, False).to(torch.bfloat16), Decay("draft", width, True).to(torch.bfloat16)
    config = EngineConfig(max_rows=3, num_speculative_tokens=k, draft_length=k, max_length=64, page_size=4, prefill_chunk=3)
    with Engine(target, draft if k else None, vocabulary=VOCABULARY, config=config) as engine:
        prompts = [list(range(5, 5 + length)) for length in range(1, 10)]
        jobs = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
        for _ in engine.stream():
            pass
        assert [job.tokens for job in jobs] == [plain(target, prompt, 20) for prompt in prompts]


class Wrong(Decay):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden)[..., 1:]


@pytest.mark.parametrize("which", ["target", "draft"])
def test_wrong_output_shapes_are_refused_at_capture(which: str) -> None:
    width = VOCABULARY.logits_width
    models = {name: (Wrong if name == which else Decay)(name, width, name == "draft").to(torch.bfloat16) for name in ("target", "draft")}
    with Engine(models["target"], models["draft"], config=EngineConfig(max_rows=1, max_length=64)) as engine:
        engine.submit([1], max_new_tokens=2)
        for call in (engine.capture, engine.step):
            with pytest.raises(ValueError, match=rf"{which} logits: got Tensor of shape \(1, .*{width - 1}\), expected \(1, .*{width}\)"):
                call()


class Narrow(Decay):
    feature_size = 9


def test_features_of_a_wrong_width_are_refused_in_a_prompt() -> None:
    target, draft = (kind(name, VOCABULARY.logits_width, fed=name == "draft") for kind, name in ((Narrow, "target"), (Decay, "draft")))
    engine = Engine(target.bfloat16(), draft.bfloat16(), config=EngineConfig(max_rows=1, max_length=64))
    with engine, pytest.raises(ValueError, match=r"target features: got Tensor of shape \(1, 2, 8\), expected \(1, 2, 9\)"):
        engine.generate([1, 2, 3], max_new_tokens=2)


class NoLogits(Decay):
    def logits(self, hidden: Tensor) -> Tensor:
        return None  # type: ignore[return-value]


class Complex(Decay):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).to(torch.complex64)


class NoHidden(Decay):
    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        return super().forward(inputs, buffers)._replace(hidden=None)  # type: ignore[arg-type]


WRONG = [
    (NoLogits, "target logits: got NoneType"),
    (Complex, "target logits: got torch.complex64, expected a floating-point dtype"),
    (NoHidden, "target hidden: got NoneType"),
]


@pytest.mark.parametrize(("kind", "message"), WRONG)
def test_a_missing_output_or_wrong_dtype_is_refused_at_capture_and_raised_by_generate(kind: type[Decay], message: str) -> None:
    config = EngineConfig(max_rows=1, max_length=64, num_speculative_tokens=0)
    model = kind("target", VOCABULARY.logits_width, False).to(torch.bfloat16)
    prompts: tuple[Any, ...] = ([1, 2, 3], [[1, 2], [3]])
    with Engine(model, config=config) as engine, pytest.raises(ValueError, match=message):
        engine.capture()
    for prompt in prompts:
        with Engine(model, config=config) as engine:
            with pytest.raises(ValueError, match=message):
                engine.generate(prompt, max_new_tokens=2)
            with pytest.raises(EngineClosedError, match=message):
                engine.submit([1])


def test_dropout_in_training_mode_is_refused() -> None:
    model = Decay("mean", 16, False)
    model.noise = nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"Engine.target: noise is dropout in training mode; call .eval\(\) first"):
        Engine(model, config=EngineConfig(num_speculative_tokens=0))
    Engine(model.eval(), config=EngineConfig(num_speculative_tokens=0, max_length=16)).close()
