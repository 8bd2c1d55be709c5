"""Multi-token prediction as in DeepSeek-V3: modules of one layer each that predict from a hidden state and a later token.

Module k combines the state of module k - 1 at position i (for k = 1 the target's) with the token at i + k. Its output state
predicts token i + k + 1. A single module runs repeatedly, over its own drafts. With several modules, module k makes draft k
only. Each module also processes every new token of the text, with the saved state of the module before it, so that its cache
is the same as after processing the whole text at once; entries of rejected drafts are overwritten in the next round. Some
serving engines differ: they leave later modules without cache entries for most of a text, or give them the target's states.
The state that is passed on is normalised by `shared_head.norm`, like the target's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.dense import Residual, product, rms_norm
from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import cache_specs
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.eagle3 import shift_inputs
from stepgraph.runtime.models.llama import LlamaBase, LlamaLayer, Rotation, embed
from stepgraph.runtime.models.llama_config import LlamaConfig

if TYPE_CHECKING:
    from stepgraph.runtime.models.transformers_model import TransformersModel


class MtpModules(nn.Module):
    """Base class of the modules of all families. Embedding and head are the target's."""

    embedding: nn.Parameter
    head: nn.Parameter
    depths: nn.ModuleList
    vocab_size: int
    hidden_size: int
    d2t: Tensor | None = None
    shares_embeddings = True

    @property
    def notes(self) -> tuple[str, ...]:
        count = len(self.depths)
        return (f"draft: MTP, {'one module for every draft' if count == 1 else f'{count} modules, one per draft'}",)

    @property
    def lookahead(self) -> int:
        """The last module's cache entry of a position depends on this many tokens after it."""
        return len(self.depths)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        """Buffers of the modules in use: the first num_speculative_tokens ones."""
        count, drafts = len(self.depths), limits.num_speculative_tokens
        if 1 < count < drafts:
            raise ValueError(f"EngineConfig.num_speculative_tokens: got {drafts}, expected at most {count}, one per MTP module")
        count = min(count, drafts)
        states = BufferSpec("draft_states", (count - 1, limits.cache_slots, self.hidden_size), self.depths[0].get_parameter("join").dtype)
        return (*self.entry_specs(count, limits), states)

    @abstractmethod
    def entry_specs(self, count: int, limits: Limits) -> Sequence[BufferSpec]:
        """The caches of the first `count` modules."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        saved_states, shape, single = buffers["draft_states"], inputs.tokens.shape, len(self.depths) == 1
        embedded = embed(inputs, self.embedding, inputs.features.dtype)
        outputs: list[Tensor] = []
        for index in (0,) if single else range(inputs.step - 1, len(saved_states) + 1):
            entries = shift_inputs(inputs, index + 1)
            previous = inputs.features if index == 0 else saved_states[index - 1][entries.slots]
            states = self.depths[index](previous.flatten(0, 1), embedded, entries, buffers).view(*shape, -1)
            if index < len(saved_states):
                saved_states[index].index_put_((entries.slots,), states)
            outputs.append(states)
        return ModelOutput(outputs[0], outputs[0])


class Mtp(MtpModules, LlamaBase):
    """One module per layer of `config`, with a layer of the Llama family. The weights are uninitialised."""

    head: nn.Parameter

    def __init__(self, config: LlamaConfig, *, embedding: nn.Parameter, head: nn.Parameter, device: str | torch.device = "cpu") -> None:
        super().__init__(config, device)
        self.config, self.vocab_size, self.hidden_size = config, config.vocab_size, config.hidden_size
        like = torch.empty(0, dtype=config.dtype, device=device)
        self.embedding, self.head = embedding, head
        self.depths = nn.ModuleList(MtpModule(config, index, like, self.rotation) for index in range(config.num_layers))

    def entry_specs(self, count: int, limits: Limits) -> Sequence[BufferSpec]:
        return cache_specs("draft", count, limits, self.config.num_kv_heads, self.config.head_size, self.config.dtype)


class TransformersMtp(MtpModules):
    """Modules whose layers are those of a family of `transformers`, with experts or latent attention: DeepSeek-V3, GLM-4.5.

    decoders: of one layer each, with distinct names; the last norm of a decoder is that of the module. Other weights are uninitialised.
    """

    def __init__(self, decoders: Sequence[TransformersModel], epsilon: float, embedding: nn.Parameter, head: nn.Parameter) -> None:
        super().__init__()
        self.embedding, self.head = embedding, head
        self.vocab_size, self.hidden_size = head.shape
        self.attends = tuple(shape for decoder in decoders for shape in decoder.attends)
        self._decoders, self.depths = tuple(decoders), nn.ModuleList(DecoderModule(decoder, epsilon) for decoder in decoders)

    def entry_specs(self, count: int, limits: Limits) -> Sequence[BufferSpec]:
        return [spec for decoder in self._decoders[:count] for spec in decoder.cache_specs(limits)]

    def logits(self, hidden: Tensor) -> Tensor:
        return product(hidden.reshape(-1, hidden.shape[-1]), self.head).view(*hidden.shape[:-1], -1)


class Join(nn.Module):
    """Joins a state and a token embedding, both [B * Q, H]: the input of a module's layer, whose output states `forward` returns."""

    def __init__(self, hidden: int, epsilon: float, like: Tensor) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.token_norm = empty_weight(like, hidden)
        self.state_norm = empty_weight(like, hidden)
        self.join = empty_weight(like, hidden, 2 * hidden)

    def combine(self, states: Tensor, embedded: Tensor) -> Tensor:
        pair = [rms_norm(embedded, self.token_norm, self.epsilon), rms_norm(states, self.state_norm, self.epsilon)]
        return product(torch.cat(pair, -1), self.join)


class DecoderModule(Join):
    def __init__(self, decoder: TransformersModel, epsilon: float) -> None:
        weight = next(decoder.decoder.parameters())
        super().__init__(decoder.hidden_size, epsilon, torch.empty(0, dtype=decoder.config.dtype, device=weight.device))
        self.decoder = decoder

    def forward(self, previous: Tensor, embedded: Tensor, entries: ModelInput, buffers: StaticBuffers) -> Tensor:
        joined = self.combine(previous, embedded).view(*entries.tokens.shape, -1)
        return self.decoder.decode({"inputs_embeds": joined}, entries, buffers)[0].flatten(0, 1)


class MtpModule(Join):
    """Joins, then applies one layer and the last norm."""

    def __init__(self, config: LlamaConfig, index: int, like: Tensor, rotation: Callable[[Tensor, torch.dtype], Rotation]) -> None:
        super().__init__(config.hidden_size, config.norm_epsilon, like)
        self.index, self.rotation = index, rotation
        self.layer = LlamaLayer(config, index, like)
        self.norm = empty_weight(like, config.hidden_size)

    def forward(self, previous: Tensor, embedded: Tensor, entries: ModelInput, buffers: StaticBuffers) -> Tensor:
        rotation, joined = self.rotation(entries.positions, embedded.dtype), self.combine(previous, embedded)
        normed, cache = rms_norm(joined, self.layer.attention_norm, self.epsilon), (buffers.draft_keys, buffers.draft_values)
        output: Residual = self.layer(joined, normed, rotation, entries, *(part[self.index] for part in cache), self.norm)
        return output.normed
