"""Parts of layers that some families have instead of those of Llama: an MLP of experts, and multi-head latent attention in expanded form.

Keys and values of latent attention are computed when a token is processed, and cached for every head, values padded to the size of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepgraph.graphs.layers.dense import activate_and_mul, product, rms_norm
from stepgraph.graphs.layers.experts import choose_experts, combine_experts, expert_product
from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.layers.lora import ProductHook
from stepgraph.runtime.models.llama_config import ExpertsConfig, LatentConfig, LlamaConfig

_EPSILON = 1e-6  # of both norms of latent attention; the config's value is for other norms


class ExpertMlp(nn.Module):
    """Six operations, or eleven with a router in float32 and a shared MLP. The experts of a token are read on the device; the result of a
    row does not depend on other rows."""

    def __init__(self, config: LlamaConfig, experts: ExpertsConfig, like: Tensor) -> None:
        super().__init__()
        self.experts, self.activation = experts, config.activation
        routed = torch.empty(0, dtype=torch.float32, device=like.device) if experts.routing else like
        count, hidden, size = experts.num_experts, config.hidden_size, experts.expert_size
        self.router = empty_weight(routed, count, hidden)
        self.gate_up = empty_weight(like, count * 2 * size, hidden)
        self.down = empty_weight(like, count * hidden, size)
        self.router_bias = empty_weight(routed, count) if experts.biased else None
        self.gate_up_bias = empty_weight(like, count * 2 * size) if experts.biased else None
        self.down_bias = empty_weight(like, count * hidden) if experts.biased else None
        self.correction = empty_weight(routed, experts.num_experts) if experts.routing else None
        if experts.shared_size:
            self.shared_gate_up = empty_weight(like, 2 * experts.shared_size, config.hidden_size)
            self.shared_down = empty_weight(like, config.hidden_size, experts.shared_size)

    def forward(self, states: Tensor, product_hook: ProductHook) -> Tensor:
        experts, count = self.experts, self.experts.num_experts
        options, routed = () if experts.routing is None else (self.correction, *experts.routing), states
        if options:
            routed = states.float() if self.router.dtype is torch.uint8 else states.to(self.router.dtype)
        logits = product(routed, self.router, self.router_bias)
        weights, expert_ids = choose_experts(logits, experts.experts_per_token, experts.normalised, *options)
        gated = activate_and_mul(expert_product(states, expert_ids, self.gate_up, count, self.gate_up_bias), self.activation)
        output = combine_experts(expert_product(gated, expert_ids, self.down, count, self.down_bias), weights)
        if not experts.shared_size:
            return output
        gated = activate_and_mul(product_hook("shared_gate_up", states, product(states, self.shared_gate_up)), self.activation)
        return output + product_hook("shared_down", gated, product(gated, self.shared_down))


class LatentProjection(nn.Module):
    """Follows the first product of attention. That product gives queries or their latent state, the latent state of keys and values, and
    the rotated part of keys, which all heads share. Six operations."""

    def __init__(self, config: LlamaConfig, latent: LatentConfig, like: Tensor) -> None:
        super().__init__()
        heads, rank = config.num_heads, latent.query_rank
        self.sizes = [rank or heads * latent.size, latent.rank, latent.rotated_size]
        self.query_norm = None if rank is None else empty_weight(like, rank)
        self.entry_norm = empty_weight(like, latent.rank)
        for name, (_, outer, inner) in latent.products(heads).items():
            self.register_parameter(name, empty_weight(like, outer, inner))
        self.query: nn.Parameter
        self.entries: nn.Parameter
        self.register_buffer("columns", _head_columns(latent, heads, like.device), persistent=False)
        self.columns: Tensor

    def forward(self, qkv: Tensor, product_hook: ProductHook) -> Tensor:
        """[N, 3 * heads * size]: queries, keys and values, the rotated elements of each head first, as `rotate` expects them."""
        query, state, rotated = qkv.split(self.sizes, 1)
        if self.query_norm is not None:
            query = rms_norm(query, self.query_norm, _EPSILON)
            query = product_hook("query", query, product(query, self.query))
        state = rms_norm(state, self.entry_norm, _EPSILON)
        entries = product_hook("entries", state, product(state, self.entries))
        return torch.cat([query, entries, rotated], 1).index_select(1, self.columns)


def _head_columns(latent: LatentConfig, heads: int, device: torch.device) -> Tensor:
    """The column of each element of queries, keys and values in the concatenation of queries, entries and rotated keys."""
    size, plain = latent.size, latent.unrotated_size
    unrotated = heads * (plain + latent.value_size)
    turned = torch.arange(latent.rotated_size, device=device)
    turned = turned.view(-1, 2).T.flatten() if latent.interleaved else turned
    entries = heads * size + torch.arange(unrotated, device=device).view(heads, -1)
    queries = torch.arange(heads * size, device=device).view(heads, size)
    queries = torch.cat([queries[:, plain:][:, turned], queries[:, :plain]], 1)
    keys = torch.cat([(heads * size + unrotated + turned).expand(heads, -1), entries[:, :plain]], 1)
    values = entries[:, plain:]
    fill = values[:, :1].expand(-1, size - latent.value_size)  # any elements: nothing reads them
    return torch.cat([queries, keys, torch.cat([values, fill], 1)]).flatten()
