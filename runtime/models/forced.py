"""A drafter without weights that proposes nothing: the only drafts are tokens that a request's grammar forces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import ModelInput, ModelOutput


class ForcedDrafts(nn.Module):
    """A draft model with one token of logit -inf: a chain ends where the grammar forces no token."""

    vocab_size = 1
    notes = ("draft: tokens forced by grammars",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(1, dtype=torch.int64))
        self.d2t: Tensor

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        hidden = torch.zeros(*inputs.tokens.shape, 1, device=inputs.tokens.device)
        return ModelOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.full_like(hidden, float("-inf"))
