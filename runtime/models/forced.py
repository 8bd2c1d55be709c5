"""A drafter that proposes nothing: the only drafts are tokens that a request's grammar forces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.proposer import History


class ForcedDrafts:
    """A proposer of empty chains, so that a chain ends where the grammar forces no token."""

    batch_invariant = True
    notes = ("draft: tokens forced by grammars",)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        return torch.full((len(history.length), history.num_drafts), -1, dtype=torch.int64, device=history.length.device)
