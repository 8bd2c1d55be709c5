"""For benchmarks: drafts are accepted with given probabilities, independent of the models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepgraph.graphs.batch import Batch
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.kernels import rejection


def force_accepted(batch: Batch, finite: Tensor, status: Tensor, shares: Sequence[float]) -> Tensor:
    owner, length = batch.column(Column.OWNER), batch.column(Column.LENGTH)
    return rejection.force_accepted(shares, finite, batch.column(Column.DRAFT_COUNT), status, owner, length)


def after_accepted(batch: Batch, accepted: Tensor, tokens: Tensor) -> Tensor:
    """[B, K + 1] the accepted drafts, then `tokens` from that position on."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(index < accepted[:, None], torch.cat([batch.drafts, tokens[:, -1:]], 1), tokens)
