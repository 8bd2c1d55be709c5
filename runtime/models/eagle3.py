"""EAGLE-3: one layer that guesses from the target's own states, with the public checkpoints' layout.

Three states of the target, from near its input, its middle and its end, are fused into one. The layer takes it side by side
with the token behind it. From the second draft on, what leaves the layer, before its last norm, stands in for the fused state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepgraph.graphs.attention.paged import AttentionShape, cache_specs
from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.layers.dense import product, rms_norm
from stepgraph.graphs.layers.slot_mapping import rope_angles
from stepgraph.graphs.model import ModelInput, ModelOutput
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.models.llama import LlamaLayer, empty_weight, randomise
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.models.shifted import shifted


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and choices of one head. `layer.vocab_size` is the target's: its tokens are what goes in."""

    layer: LlamaConfig
    feature_layers: tuple[int, ...]  # of the target: the states that enter these layers are fused
    target_hidden_size: int
    draft_vocab_size: int  # tokens that it proposes
    norm_before_residual: bool = False  # the shortcut around attention takes the normalised state


class Eagle3(nn.Module):
    """A head, with weights yet to be filled in: by a loader, by training, or by `randomise`.

    d2t: the target's id of each token that it proposes; None where it proposes all. embedding, head: the target's, where the
    head has none of its own. A query sees no entry for the first token of a history, which has no state before it.
    """

    lookahead = 1  # an entry is made of the token behind its position

    def __init__(
        self,
        config: Eagle3Config,
        *,
        d2t: Tensor | None = None,
        embedding: nn.Parameter | None = None,
        head: nn.Parameter | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        layer = config.layer
        self.config, self.vocab_size = config, config.draft_vocab_size
        like = torch.empty(0, dtype=layer.dtype, device=device)
        fused = len(config.feature_layers) * config.target_hidden_size
        self.embedding = empty_weight(like, layer.vocab_size, layer.hidden_size) if embedding is None else embedding
        self.fuse = empty_weight(like, layer.hidden_size, fused)
        self.state_norm = empty_weight(like, layer.hidden_size)
        self.layer = LlamaLayer(layer, 0, like, entering=2 * layer.hidden_size)
        self.norm = empty_weight(like, layer.hidden_size)
        self.head = empty_weight(like, config.draft_vocab_size, layer.hidden_size) if head is None else head
        self.register_buffer("d2t", None if d2t is None else d2t.to(device=device, dtype=torch.int64))
        self.d2t: Tensor | None
        self.register_buffer("frequency_bits", layer.rope.frequencies(layer.head_size).to(device).view(torch.int32), persistent=False)
        self.frequency_bits: Tensor

    @property
    def notes(self) -> tuple[str, ...]:
        """For the capture report."""
        config = self.config
        *most, last = map(str, config.feature_layers)
        states = f"{', '.join(most)} and {last}" if most else last
        proposed = f"{config.draft_vocab_size} of {config.layer.vocab_size} tokens"
        return (f"draft: EAGLE-3, fed with the states that enter layers {states}; proposes {proposed}",)

    @property
    def attends(self) -> tuple[AttentionShape, ...]:
        layer = self.config.layer
        return (AttentionShape(layer.dtype, layer.num_heads, layer.num_kv_heads, layer.head_size, layer.windows[:1]),)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        # Positions beyond those that it was trained for cost acceptance, never law: they are not refused.
        layer = self.config.layer
        return cache_specs("draft", 1, limits, layer.num_kv_heads, layer.head_size, layer.dtype)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        config, layer, epsilon = self.config, self.layer, self.config.layer.norm_epsilon
        entries, shape = shifted(inputs, 1), inputs.tokens.shape
        states = inputs.features.flatten(0, 1)
        if inputs.step == 1:
            states = product(states, self.fuse)
        embedded = functional.embedding(inputs.tokens.flatten(), self.embedding)
        turns = rope_angles(entries.positions.flatten(), self.frequency_bits.view(torch.float32), embedded.dtype)
        normed = rms_norm(states, self.state_norm, epsilon)
        entering = torch.cat([rms_norm(embedded, layer.attention_norm, epsilon), normed], -1)
        shortcut = normed if config.norm_before_residual else states
        attended = layer.attend(shortcut, entering, turns, entries, buffers["draft_keys"][0], buffers["draft_values"][0])
        states = layer.feed_forward(attended)
        return ModelOutput(rms_norm(states, self.norm, epsilon).view(*shape, -1), states.view(*shape, -1))

    def logits(self, hidden: Tensor) -> Tensor:
        return product(hidden.reshape(-1, hidden.shape[-1]), self.head).view(*hidden.shape[:-1], -1)

    def randomise(self, seed: int = 0, scale: float = 1.0) -> Eagle3:
        randomise(self, seed, scale)
        return self
