"""Multi-token prediction as DeepSeek-V3 has it: modules that guess from a state and the token behind it, each with a layer of its own.

Module k makes of the state that module k - 1 left at position i (the target's, for the first) and the token at i + k the state
that token i + k + 1 is guessed from. One module alone is run over its own guesses again and again. Of several, module k makes
draft k only: whenever a token arrives it is also run over by every later module, with the state kept from the one before, so
that the entries of all modules are those that a reading of the whole text would leave; a guess that did not hold is overwritten
by the next round's tokens. Serving engines differ here: some leave later modules without entries for most of a text, or give
them the target's states. What is handed on is normalised, by `shared_head.norm`, as the target's own state is.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Mtp(nn.Module):
    """The modules, one per layer of `config`, with weights yet to be filled in; embedding and head are the target's."""

    d2t: Tensor | None = None

    def __init__(self, config: LlamaConfig, *, embedding: nn.Parameter, head: nn.Parameter, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        like = torch.empty(0, dtype=config.dtype, device=device)
        self.embedding, self.head = embedding, head
        self.depths = nn.ModuleList(MtpModule(config, index, like) for index in range(config.num_layers))
        self.register_buffer("frequency_bits", config.rope.frequencies(config.head_size).to(device).view(torch.int32), persistent=False)
        self.frequency_bits: Tensor

    @property
    def notes(self) -> tuple[str, ...]:
        """For the capture report."""
        count = len(self.depths)
        return (f"draft: MTP, {'one module for every draft' if count == 1 else f'{count} modules, one per draft'}",)

    @property
    def attends(self) -> tuple[AttentionShape, ...]:
        config = self.config
        return (AttentionShape(config.dtype, config.num_heads, config.num_kv_heads, config.head_size, config.windows),)

    @property
    def lookahead(self) -> int:
        """The last module's entries lie as far in front of their tokens as there are modules: no page is shared before they are there."""
        return len(self.depths)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        """Of the modules in use: with fewer drafts than modules, the last ones rest."""
        config, count, drafts = self.config, len(self.depths), limits.num_speculative_tokens
        if 1 < count < drafts:
            raise ValueError(f"EngineConfig.num_speculative_tokens: got {drafts}, want at most {count}, one per MTP module")
        count = min(count, drafts)
        kept = BufferSpec("draft_states", (count - 1, limits.cache_slots, config.hidden_size), config.dtype)
        return (*cache_specs("draft", count, limits, config.num_kv_heads, config.head_size, config.dtype), kept)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        keys, values, kept = buffers["draft_keys"], buffers["draft_values"], buffers["draft_states"]
        shape, alone = inputs.tokens.shape, len(self.depths) == 1
        embedded = functional.embedding(inputs.tokens.flatten(), self.embedding)
        found: list[Tensor] = []
        for index in (0,) if alone else range(inputs.step - 1, len(keys)):
            entries = shifted(inputs, index + 1)
            before = inputs.features if index == 0 else kept[index - 1][entries.slots]
            turns = rope_angles(entries.positions.flatten(), self.frequency_bits.view(torch.float32), embedded.dtype)
            states = self.depths[index](before.flatten(0, 1), embedded, turns, entries, keys[index], values[index]).view(*shape, -1)
            if index < len(kept):
                kept[index].index_put_((entries.slots,), states)
            found.append(states)
        return ModelOutput(found[0], found[0])

    def logits(self, hidden: Tensor) -> Tensor:
        return product(hidden.reshape(-1, hidden.shape[-1]), self.head).view(*hidden.shape[:-1], -1)

    def randomise(self, seed: int = 0, scale: float = 1.0) -> Mtp:
        """The target's embedding and head, which are shared, stay as they are."""
        randomise(self.depths, seed, scale)
        return self


class MtpModule(nn.Module):
    """A state and a token become one, one layer is run over it, and the last norm."""

    def __init__(self, config: LlamaConfig, index: int, like: Tensor) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.epsilon = config.norm_epsilon
        self.token_norm = empty_weight(like, hidden)
        self.state_norm = empty_weight(like, hidden)
        self.join = empty_weight(like, hidden, 2 * hidden)
        self.layer = LlamaLayer(config, index, like)
        self.norm = empty_weight(like, hidden)

    def forward(
        self, states: Tensor, embedded: Tensor, turns: tuple[Tensor, Tensor], inputs: ModelInput, keys: Tensor, values: Tensor
    ) -> Tensor:
        pair = [rms_norm(embedded, self.token_norm, self.epsilon), rms_norm(states, self.state_norm, self.epsilon)]
        states = self.layer(product(torch.cat(pair, -1), self.join), turns, inputs, keys, values)
        return rms_norm(states, self.norm, self.epsilon)
