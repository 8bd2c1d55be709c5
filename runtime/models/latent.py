"""Multi-head latent attention in expanded form, as in DeepSeek-V3: queries, keys and values from small states of each token.

Keys and values are computed when a token is processed, and cached for every head; values with more numbers after their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepgraph.graphs.layers.dense import rms_norm
from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.layers.linear import linear
from stepgraph.graphs.layers.lora import Adapted
from stepgraph.runtime.models.llama_config import LatentConfig, LlamaConfig

_EPSILON = 1e-6  # of both norms, whatever the config says of others


class LatentProjection(nn.Module):
    """What follows the first product of attention, whose result is queries or their state, the state of keys and values, and the rotated
    part of keys, which all heads share. Six operations."""

    def __init__(self, config: LlamaConfig, latent: LatentConfig, like: Tensor) -> None:
        super().__init__()
        heads, rank = config.num_heads, latent.query_rank
        self.sizes = [rank or heads * latent.size, latent.rank, latent.rotated]
        self.query_norm = None if rank is None else empty_weight(like, rank)
        self.entry_norm = empty_weight(like, latent.rank)
        for name, (_, outer, inner) in latent.products(heads).items():
            self.register_parameter(name, empty_weight(like, outer, inner))
        self.query: nn.Parameter
        self.entries: nn.Parameter
        self.register_buffer("columns", head_columns(latent, heads, like.device), persistent=False)
        self.columns: Tensor

    def forward(self, mixed: Tensor, adapted: Adapted) -> Tensor:
        """[N, 3 * heads * size]: queries, keys and values, the rotated numbers of each head first, as `rotate` expects them."""
        query, state, rotated = mixed.split(self.sizes, 1)
        if self.query_norm is not None:
            query = rms_norm(query, self.query_norm, _EPSILON)
            query = adapted("query", query, linear(query, self.query))
        state = rms_norm(state, self.entry_norm, _EPSILON)
        entries = adapted("entries", state, linear(state, self.entries))
        return torch.cat([query, entries, rotated], 1).index_select(1, self.columns)


def head_columns(latent: LatentConfig, heads: int, device: torch.device) -> Tensor:
    """Where each number of queries, keys and values is in queries, unrotated keys with values, and the rotated part of keys."""
    size, plain = latent.size, latent.plain
    unrotated = heads * (plain + latent.value_size)
    turned = torch.arange(latent.rotated, device=device)
    turned = turned.view(-1, 2).T.flatten() if latent.interleaved else turned
    entries = heads * size + torch.arange(unrotated, device=device).view(heads, -1)
    queries = torch.arange(heads * size, device=device).view(heads, size)
    queries = torch.cat([queries[:, plain:][:, turned], queries[:, :plain]], 1)
    keys = torch.cat([(heads * size + unrotated + turned).expand(heads, -1), entries[:, :plain]], 1)
    values = entries[:, plain:]
    fill = values[:, :1].expand(-1, size - latent.value_size)  # any numbers: nothing reads them
    return torch.cat([queries, keys, torch.cat([values, fill], 1)]).flatten()
