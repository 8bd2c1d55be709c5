"""MTP modules whose layers are those of a family of `transformers`, with experts or latent attention: DeepSeek-V3, GLM-4.5.

Each module is a decoder of one layer, whose last norm is the module's. See `mtp` for how modules draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.linear import linear
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.models.mtp import Join, MtpModules
from stepgraph.runtime.models.transformers_model import TransformersModel


class TransformersMtp(MtpModules):
    """A draft. decoders: of one layer each, with names of their own. Other weights are uninitialised."""

    def __init__(self, decoders: Sequence[TransformersModel], epsilon: float, embedding: nn.Parameter, head: nn.Parameter) -> None:
        super().__init__()
        self.embedding, self.head = embedding, head
        self.vocab_size, self.hidden_size = head.shape
        self.attends = tuple(shape for decoder in decoders for shape in decoder.attends)
        self._in_order = tuple(_Module(decoder, epsilon) for decoder in decoders)
        self.depths = nn.ModuleList(self._in_order)

    def entry_specs(self, count: int, limits: Limits) -> Sequence[BufferSpec]:
        return [spec for module in self._in_order[:count] for spec in module.decoder.cache_specs(limits)]

    def run_module(self, index: int, previous: Tensor, embedded: Tensor, entries: ModelInput, buffers: StaticBuffers) -> Tensor:
        return self._in_order[index].forward(previous, embedded, entries, buffers)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden.reshape(-1, hidden.shape[-1]), self.head).view(*hidden.shape[:-1], -1)


class _Module(Join):
    def __init__(self, decoder: TransformersModel, epsilon: float) -> None:
        weight = next(decoder.decoder.parameters())
        super().__init__(decoder.hidden_size, epsilon, torch.empty(0, dtype=decoder.config.dtype, device=weight.device))
        self.decoder = decoder

    def forward(self, previous: Tensor, embedded: Tensor, entries: ModelInput, buffers: StaticBuffers) -> Tensor:
        joined = self.joined(previous, embedded).view(*entries.tokens.shape, -1)
        return self.decoder.decode({"inputs_embeds": joined}, entries, buffers)[0].flatten(0, 1)
