"""EAGLE-3: a draft head of one layer over hidden states of the target, in the layout of the public checkpoints.

Hidden states from three layers of the target (low, middle, high) are fused into one. The layer's input is the fused state of
a position and the embedding of the next token. From the second draft on, the layer's own output, before its last norm,
replaces the fused state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepgraph.graphs.attention.reference import by_reference
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.dense import product, rms_norm
from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.layers.slot_mapping import shift_entries
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import cache_specs
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.llama import LlamaBase, LlamaLayer, embed
from stepgraph.runtime.models.llama_config import Eagle3Config


class Eagle3(LlamaBase):
    """A head. Its weights are uninitialised until a loader or training fills them.

    d2t: [draft_vocab_size] target ids of the head's tokens; None if the head has the target's vocabulary. embedding, head:
    the target's, if the head has none of its own. The first token of a history has no cache entry, as no state precedes it.
    """

    head: nn.Parameter
    lookahead = 1  # the cache entry of a position depends on the token after it

    def __init__(
        self,
        config: Eagle3Config,
        *,
        d2t: Tensor | None = None,
        embedding: nn.Parameter | None = None,
        head: nn.Parameter | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        layer = config.layer
        super().__init__(layer, device)
        self.config, self.vocab_size = config, config.draft_vocab_size
        like = torch.empty(0, dtype=layer.dtype, device=device)
        feature_size = len(config.feature_layers) * config.target_hidden_size
        self.embedding = empty_weight(like, layer.vocab_size, layer.hidden_size) if embedding is None else embedding
        self.fuse = empty_weight(like, layer.hidden_size, feature_size)
        self.state_norm = empty_weight(like, layer.hidden_size)
        self.layer = LlamaLayer(layer, 0, like, input_size=2 * layer.hidden_size)
        self.norm = empty_weight(like, layer.hidden_size)
        self.head = empty_weight(like, config.draft_vocab_size, layer.hidden_size) if head is None else head
        self.register_buffer("d2t", None if d2t is None else d2t.to(device=device, dtype=torch.int64))
        self.d2t: Tensor | None

    @property
    def shares_embeddings(self) -> bool:
        """Whether token embeddings are the target's: heads are trained over them, unless their width differs."""
        return self.config.layer.hidden_size == self.config.target_hidden_size

    @property
    def notes(self) -> tuple[str, ...]:
        config = self.config
        layers = ", ".join(map(str, config.feature_layers))
        proposed = f"{config.draft_vocab_size} of {config.layer.vocab_size} tokens"
        return (f"draft: EAGLE-3 over the inputs of layers {layers}; proposes {proposed}",)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        layer = self.config.layer  # no check of max_positions: positions beyond it only lower acceptance
        return cache_specs("draft", 1, limits, layer.num_kv_heads, layer.head_size, layer.dtype)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        config, layer, epsilon = self.config, self.layer, self.config.layer.norm_epsilon
        entries, shape = shift_inputs(inputs, 1), inputs.tokens.shape
        states = inputs.features.flatten(0, 1)
        if inputs.step == 1:
            states = product(states, self.fuse)
        embedded = embed(inputs, self.embedding, layer.config.dtype)
        rotation = self.rotation(entries.positions, embedded.dtype)
        normed = rms_norm(states, self.state_norm, epsilon)
        layer_input = torch.cat([rms_norm(embedded, layer.attention_norm, epsilon), normed], -1)
        residual = normed if config.norm_before_residual else states
        attended = layer.attend(layer_input, rotation, entries, buffers["draft_keys"][0], buffers["draft_values"][0])
        states, hidden = layer.finish(residual, attended, self.norm)
        return ModelOutput(hidden.view(*shape, -1), states.view(*shape, -1))


def shift_inputs(inputs: ModelInput, count: int) -> ModelInput:
    """The same tokens with cache entries `count` positions earlier, at the position of the state before them.

    The first `count` tokens of a history have no such state, and entries in shared pages exist already: both become inert.
    """
    slots = inputs.slots
    if isinstance(inputs.shared, Tensor):
        slots = torch.where(inputs.positions < inputs.shared + count, 0, slots)
    positions, slots = shift_entries(inputs.positions, slots, inputs.block_tables, inputs.page_size, count)
    attend = inputs.attend if inputs.attend is by_reference else None  # an attention plan is valid for unshifted positions only
    return inputs._replace(positions=positions, slots=slots, attend=attend)
