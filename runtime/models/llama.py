"""The Llama family over static buffers: Llama, Mistral, Qwen2, Qwen3, SmolLM2 and what else has their layers.

One module for all: grouped queries, rotary positions, sliding windows, biases and norms of heads where the config says so.
Queries, keys and values are one product, gate and up another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepgraph.graphs.attention.paged import AttentionShape, attention, cache_specs
from stepgraph.graphs.attention.rope_kv import rope_and_write_kv
from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.layers.dense import product, rms_norm, silu_and_mul
from stepgraph.graphs.layers.slot_mapping import rope_angles
from stepgraph.graphs.model import ModelInput, ModelOutput
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.models.llama_config import LlamaConfig


class Llama(nn.Module):
    """A target of the family, with weights yet to be filled in: by a loader, or by `randomise`.

    feature_layers: the draft is fed with the states that enter these layers, side by side (num_layers: what leaves the last
    one); none: with the normalised state that the logits are taken from. `name` is that of its cache, `origin` of the files
    that its weights are from.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        feature_layers: Sequence[int] = (),
        name: str = "target",
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        for layer in feature_layers:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= config.num_layers:
                raise ValueError(f"Llama.feature_layers: got {layer!r}, want whole numbers from 0 to {config.num_layers}")
        self.config, self.name, self.feature_layers = config, name, tuple(feature_layers)
        self.vocab_size = config.vocab_size
        self.hidden_size, self.embedding_size, self.origin = config.hidden_size, config.hidden_size, ""
        self.feature_size = config.hidden_size * max(1, len(self.feature_layers))
        self.feature_dtype = config.dtype
        like = torch.empty(0, dtype=config.dtype, device=device)
        self.embedding = empty_weight(like, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, index, like) for index in range(config.num_layers))
        self.norm = empty_weight(like, config.hidden_size)
        self.head = None if config.tied else empty_weight(like, config.vocab_size, config.hidden_size)
        frequencies = config.rope.frequencies(config.head_size).to(device)
        # As bits: a later .to(bfloat16) rounds every floating point buffer, and positions with it.
        self.register_buffer("frequency_bits", frequencies.view(torch.int32), persistent=False)
        self.frequency_bits: Tensor

    @property
    def attends(self) -> tuple[AttentionShape, ...]:
        config = self.config
        return (AttentionShape(config.dtype, config.num_heads, config.num_kv_heads, config.head_size, config.windows),)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        config = self.config
        if limits.max_length > config.max_positions:
            raise ValueError(f"Limits.max_length: got {limits.max_length}, want at most the {self.name}'s {config.max_positions} positions")
        return cache_specs(self.name, config.num_layers, limits, config.num_kv_heads, config.head_size, config.dtype)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        keys, values = buffers[f"{self.name}_keys"], buffers[f"{self.name}_values"]
        states = functional.embedding(inputs.tokens.flatten(), self.embedding)
        if inputs.embeddings is not None:
            given = inputs.embeddings
            states = torch.where(given.given.flatten()[:, None], given.values.flatten(0, 1), states)
        turns = rope_angles(inputs.positions.flatten(), self.frequency_bits.view(torch.float32), states.dtype)
        entering: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in self.feature_layers:
                entering[index] = states
            states = layer(states, turns, inputs, keys[index], values[index])
        entering[len(self.layers)] = states
        shape = inputs.tokens.shape
        hidden = rms_norm(states, self.norm, self.config.norm_epsilon).view(*shape, -1)
        features = [entering[layer] for layer in self.feature_layers]
        return ModelOutput(hidden, torch.cat(features, -1).view(*shape, -1) if features else hidden)

    @property
    def unembedding(self) -> nn.Parameter:
        """What the logits are taken with."""
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        return product(hidden.reshape(-1, hidden.shape[-1]), self.unembedding).view(*hidden.shape[:-1], -1)

    def randomise(self, seed: int = 0, scale: float = 1.0) -> Llama:
        randomise(self, seed, scale)
        return self


class LlamaLayer(nn.Module):
    """Attention and a gated perceptron, each around a shortcut. `entering`: width of what attention takes, if another than the states'."""

    def __init__(self, config: LlamaConfig, index: int, like: Tensor, entering: int | None = None) -> None:
        super().__init__()
        self.config, self.window = config, config.windows[index]
        hidden, attended, middle = config.hidden_size, config.num_heads * config.head_size, config.intermediate_size
        self.attention_norm = empty_weight(like, hidden)
        self.qkv = empty_weight(like, config.qkv_size, entering or hidden)
        self.qkv_bias = empty_weight(like, config.qkv_size) if config.qkv_bias else None
        self.query_norm = empty_weight(like, config.head_size) if config.head_norms else None
        self.key_norm = empty_weight(like, config.head_size) if config.head_norms else None
        self.output = empty_weight(like, hidden, attended)
        self.output_bias = empty_weight(like, hidden) if config.output_bias else None
        self.mlp_norm = empty_weight(like, hidden)
        self.gate_up = empty_weight(like, 2 * middle, hidden)
        self.down = empty_weight(like, hidden, middle)

    def forward(self, states: Tensor, turns: tuple[Tensor, Tensor], inputs: ModelInput, keys: Tensor, values: Tensor) -> Tensor:
        normed = rms_norm(states, self.attention_norm, self.config.norm_epsilon)
        return self.feed_forward(self.attend(states, normed, turns, inputs, keys, values))

    def feed_forward(self, states: Tensor) -> Tensor:
        middle = silu_and_mul(product(rms_norm(states, self.mlp_norm, self.config.norm_epsilon), self.gate_up))
        return product(middle, self.down, onto=states)

    def attend(
        self, shortcut: Tensor, states: Tensor, turns: tuple[Tensor, Tensor], inputs: ModelInput, keys: Tensor, values: Tensor
    ) -> Tensor:
        """What the states attend to, added to the shortcut."""
        heads, kv_heads, size = self.config.num_heads, self.config.num_kv_heads, self.config.head_size
        mixed = product(states, self.qkv, self.qkv_bias).view(len(states), -1, size)
        query, key, value = mixed.split([heads, kv_heads, kv_heads], 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = (rms_norm(part, norm, self.config.norm_epsilon) for part, norm in ((query, self.query_norm), (key, self.key_norm)))
        query = rope_and_write_kv(query, key, value, *turns, inputs.slots.flatten(), keys, values)
        attended = attention(query.view(*inputs.tokens.shape, heads, size), keys, values, inputs, self.window)
        return product(attended.view(len(states), -1), self.output, self.output_bias, onto=shortcut)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    """Weights of a model that was never trained: products keep the size of what goes in, times `scale`."""
    made = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        spread = scale * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        values = torch.randn(parameter.shape, generator=made) * spread + float(parameter.dim() == 1)
        parameter.copy_(values)


def empty_weight(like: Tensor, *shape: int) -> nn.Parameter:
    """To be filled in."""
    return nn.Parameter(like.new_empty(shape), requires_grad=False)
