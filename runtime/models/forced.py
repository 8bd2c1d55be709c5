"""A drafter without weights that has nothing to say itself: all that is drafted is what the requests' grammars force."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.model import ModelInput, ModelOutput
from stepgraph.graphs.shapes import Limits


class ForcedDrafts(nn.Module):
    """Knows one token, and never wants it: where no grammar forces a draft, the chain ends."""

    vocab_size = 1
    notes = ("drafter: what grammars force",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(1, dtype=torch.int64))
        self.d2t: Tensor

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        nothing = torch.zeros(*inputs.tokens.shape, 1, device=inputs.tokens.device)
        return ModelOutput(nothing, nothing)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.full_like(hidden, float("-inf"))
