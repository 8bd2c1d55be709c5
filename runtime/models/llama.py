"""The Llama family over static buffers: Llama, Mistral, Qwen2, Qwen3, SmolLM2, Mixtral, Qwen3-MoE, GPT-OSS, Phi 3, Gemma 3, DeepSeek-V3.

Queries, keys and values are one matrix product, gate and up another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepgraph.graphs.attention.paged import attention
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.dense import Residual, activate_and_mul, add_rms_norm, embed_tokens, product, rms_norm
from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.layers.lora import ProductHook, add_lora
from stepgraph.graphs.layers.slot_mapping import rope_and_write_kv, rope_angles
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import cache_specs
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.layer_parts import ExpertMlp, LatentProjection
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.sampling.fields import check_value, whole

Rotation = tuple[Tensor, Tensor]  # cosines and sines of `rope_angles`


class LlamaBase(nn.Module):
    """The parts that a target and its drafts share besides layers. layer_config: the sizes of the layers."""

    embedding: nn.Parameter
    head: nn.Parameter | None
    batch_invariant = True

    def __init__(self, layer_config: LlamaConfig, device: str | torch.device) -> None:
        super().__init__()
        self.attends, ropes = (layer_config.attention,), (layer_config.rope, layer_config.local_rope)
        # As integer bits: .to(bfloat16) rounds every floating-point buffer, and rounded frequencies give wrong positions.
        for name, rope in zip(("frequency_bits", "local_frequency_bits"), ropes, strict=True):
            bits = None if rope is None else rope.frequencies(layer_config.head_size).to(device).view(torch.int32)
            self.register_buffer(name, bits, persistent=False)
        self.frequency_bits: Tensor
        self.local_frequency_bits: Tensor | None
        self._magnitude, self._local_magnitude = layer_config.rope.magnitude, (layer_config.local_rope or layer_config.rope).magnitude

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return rope_angles(positions.flatten(), self.frequency_bits.view(torch.float32), dtype, self._magnitude)

    @property
    def unembedding(self) -> nn.Parameter:
        """[vocab_size, hidden_size], the matrix of the logits."""
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        return product(hidden.reshape(-1, hidden.shape[-1]), self.unembedding).view(*hidden.shape[:-1], -1)


class Llama(LlamaBase):
    """A target of the family. Its weights are uninitialised until a loader fills them.

    feature_layers: the features are the inputs of these layers, concatenated (num_layers: the output of the last one); if
    empty, the normalised hidden state. name: prefix of the cache buffers. origin: name of the file or folder of the weights.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        feature_layers: Sequence[int] = (),
        name: str = "target",
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, device)
        for layer in feature_layers:
            check_value("Llama.feature_layers", layer, whole(0, config.num_layers))
        self.config, self.name, self.feature_layers = config, name, tuple(feature_layers)
        self.vocab_size = config.vocab_size
        self.hidden_size, self.embedding_size, self.origin = config.hidden_size, config.hidden_size, ""
        self.feature_size = config.hidden_size * max(1, len(self.feature_layers))
        self.feature_dtype, self.lora_weights = config.dtype, config.lora_weights(name)
        self._embedding_factor = config.embedding_factor
        like = torch.empty(0, dtype=config.dtype, device=device)
        self.embedding = empty_weight(like, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, index, like) for index in range(config.num_layers))
        self.norm = empty_weight(like, config.hidden_size)
        self.head = None if config.tied else empty_weight(like, config.vocab_size, config.hidden_size)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        config = self.config
        if limits.max_length > config.max_positions:
            accepted = f"at most the {config.max_positions} positions of the {self.name}"
            raise ValueError(f"EngineConfig.max_length: got {limits.max_length}, expected {accepted}")
        return cache_specs(self.name, config.num_layers, limits, config.num_kv_heads, config.head_size, config.dtype)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        keys, values = buffers[f"{self.name}_keys"], buffers[f"{self.name}_values"]
        states = embed(inputs, self.embedding, self.config.dtype, self._embedding_factor)
        rotation, epsilon, offset = self.rotation(inputs.positions, states.dtype), self.config.norm_epsilon, self.config.norm_offset
        local = rotation
        if self.local_frequency_bits is not None:
            bits = self.local_frequency_bits.view(torch.float32)
            local = rope_angles(inputs.positions.flatten(), bits, states.dtype, self._local_magnitude)
        layer_inputs: list[Tensor] = []
        first, *norms = [*(layer.get_parameter("attention_norm") for layer in self.layers), self.norm]
        normed = rms_norm(states, first, epsilon, offset)
        for index, (layer, next_norm, *cache) in enumerate(zip(self.layers, norms, keys.unbind(), values.unbind(), strict=True)):
            layer_inputs.append(states)
            product_hook = self.product_hook(index, inputs, buffers)
            angles = rotation if layer.window is None else local
            states, normed = layer(states, normed, angles, inputs, *cache, next_norm, product_hook)
        layer_inputs.append(states)
        shape = inputs.tokens.shape
        hidden = normed.view(*shape, -1)
        features = [layer_inputs[layer] for layer in self.feature_layers]
        return ModelOutput(hidden, torch.cat(features, -1).view(*shape, -1) if features else hidden)

    def product_hook(self, index: int, inputs: ModelInput, buffers: StaticBuffers) -> ProductHook:
        """A function of each product of a layer: it adds LoRA adapters."""
        prefix = f"{self.name}_{index}_"
        return unchanged if inputs.lora_slots is None else lambda name, x, product: add_lora(prefix + name, x, product, inputs, buffers)


def embed(inputs: ModelInput, table: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """[B * Q, H] embeddings of the tokens, times the scale; embeddings of the request replace them."""
    states: Tensor = getattr(table, "embed_tokens", embed_tokens)(inputs.tokens.flatten(), table, dtype)  # of tables that ranks divide
    states = states if scale == 1 else states * scale
    if inputs.embeddings is None:
        return states
    return torch.where(inputs.embeddings.given.flatten()[:, None], inputs.embeddings.values.flatten(0, 1), states)


def unchanged(name: str, states: Tensor, product: Tensor) -> Tensor:
    return product


class LlamaLayer(nn.Module):
    """Attention and a gated MLP, each with a residual connection. input_size: width of attention's input if not hidden_size."""

    def __init__(self, config: LlamaConfig, index: int, like: Tensor, input_size: int | None = None) -> None:
        super().__init__()
        self.config, self.window, self.value_size = config, config.windows[index], config.value_size
        hidden, attended, middle = config.hidden_size, config.num_heads * config.value_size, config.intermediate_size
        self.attention_norm = empty_weight(like, hidden)
        self.qkv = empty_weight(like, config.qkv_size, input_size or hidden)
        self.qkv_bias = empty_weight(like, config.qkv_size) if config.qkv_bias else None
        self.latent = None if config.latent is None else LatentProjection(config, config.latent, like)
        self.query_norm = empty_weight(like, config.head_size) if config.head_norms else None
        self.key_norm = empty_weight(like, config.head_size) if config.head_norms else None
        self.sinks = empty_weight(like, config.num_heads) if config.sinks else None
        self.output = empty_weight(like, hidden, attended)
        self.output_bias = empty_weight(like, hidden) if config.output_bias else None
        self.attention_output_norm = empty_weight(like, hidden) if config.output_norms else None
        self.mlp_norm = empty_weight(like, hidden)
        self.mlp_output_norm = empty_weight(like, hidden) if config.output_norms else None
        experts = config.experts_of(index)
        self.experts = None if experts is None else ExpertMlp(config, experts, like)
        if experts is None:
            self.gate_up = empty_weight(like, 2 * middle, hidden)
            self.down = empty_weight(like, hidden, middle)

    def forward(
        self,
        states: Tensor,
        normed: Tensor,
        rotation: Rotation,
        inputs: ModelInput,
        keys: Tensor,
        values: Tensor,
        next_norm: Tensor,
        product_hook: ProductHook = unchanged,
    ) -> Residual:
        """normed: the input of attention. next_norm: the weight of the norm after this layer, whose output is returned as `normed`."""
        return self.finish(states, self.attend(normed, rotation, inputs, keys, values, product_hook), next_norm, product_hook)

    def finish(self, states: Tensor, attended: Tensor, next_norm: Tensor, product_hook: ProductHook = unchanged) -> Residual:
        """The residual connection around attention, the MLP and its residual connection."""
        scales = self.config.norm_epsilon, self.config.norm_offset
        if self.attention_output_norm is not None:
            attended = rms_norm(attended, self.attention_output_norm, *scales)
        states, normed = add_rms_norm(states, attended, self.mlp_norm, *scales)
        update = self.mlp(normed, product_hook) if self.experts is None else self.experts(normed, product_hook)
        if self.mlp_output_norm is not None:
            update = rms_norm(update, self.mlp_output_norm, *scales)
        return add_rms_norm(states, update, next_norm, *scales)

    def mlp(self, normed: Tensor, product_hook: ProductHook) -> Tensor:
        gated = activate_and_mul(product_hook("gate_up", normed, product(normed, self.gate_up)), self.config.activation)
        return product_hook("down", gated, product(gated, self.down))

    def attend(
        self, states: Tensor, rotation: Rotation, inputs: ModelInput, keys: Tensor, values: Tensor, product_hook: ProductHook = unchanged
    ) -> Tensor:
        """The attention output of normalised states."""
        config, heads, kv_heads, size = self.config, self.config.num_heads, self.config.num_kv_heads, self.config.head_size
        qkv = product_hook("qkv", states, product(states, self.qkv, self.qkv_bias))
        qkv = qkv if self.latent is None else self.latent(qkv, product_hook)
        query, key, value = qkv.view(len(states), -1, size).split([heads, kv_heads, kv_heads], 1)
        if self.query_norm is not None and self.key_norm is not None:
            pairs = (query, self.query_norm), (key, self.key_norm)
            query, key = (rms_norm(part, norm, config.norm_epsilon, config.norm_offset) for part, norm in pairs)
        query = rope_and_write_kv(query, key, value, *rotation, inputs.slots.flatten(), keys, values)
        attended = attention(
            query.view(*inputs.tokens.shape, heads, size), keys, values, inputs, self.window, config.attention_scale, sinks=self.sinks
        )
        attended = attended[..., : self.value_size].reshape(len(states), -1)
        return product_hook("output", attended, product(attended, self.output, self.output_bias))
