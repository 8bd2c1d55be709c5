"""From masked logits to the distribution a request asked for, and from a distribution to a token. Pure tensor functions.

The order is the ecosystem's: temperature, min-p, top-k, top-p. Ties are broken by token id, so that every device keeps the
same tokens. A row with temperature 0 is greedy: its distribution is one token.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Param(IntEnum):
    """Columns of a row's sampling parameters, float32."""

    TEMPERATURE = 0
    TOP_K = 1  # 0: all tokens
    TOP_P = 2
    MIN_P = 3
    REPETITION_PENALTY = 4  # from here on: processors.py
    PRESENCE_PENALTY = 5
    FREQUENCY_PENALTY = 6
    MIN_NEW_TOKENS = 7


def distribution(logits: Tensor, params: Tensor) -> Tensor:
    """Probabilities [B, ..., V] float32 of masked logits [B, ..., V] under params [B, 4 or more], columns as in Param.

    A row without any finite logit gives zeros: nothing can be drawn from it.
    """
    shape = (-1, *[1] * (logits.dim() - 1))
    temperature, top_k, top_p, min_p = (params[:, column].view(shape) for column in range(Param.MIN_P + 1))
    greedy = temperature <= 0
    scaled = logits.to(torch.float32) / torch.where(greedy, 1.0, temperature)
    # Sorted once, stably: equal logits stay in the order of their ids.
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[..., :1]).exp()  # of the likeliest token: 1
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = torch.where(weights >= min_p, weights, 0.0)
    kept = torch.where((rank < top_k) | (top_k <= 0), kept, 0.0)
    before = kept.cumsum(-1) - kept
    kept = torch.where((before < top_p * kept.sum(-1, keepdim=True)) | (rank == 0), kept, 0.0)
    kept = torch.where(greedy, (rank == 0).to(torch.float32), kept)
    probabilities = kept / kept.sum(-1, keepdim=True)
    probabilities = torch.where(torch.isfinite(ordered[..., :1]), probabilities, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, tokens, probabilities)


def race(weights: Tensor, noise: Tensor) -> Tensor:
    """Draw by exponential race: index i with probability weights[i] / weights.sum(). [..., V] each -> [...] int64."""
    return (weights / noise).argmax(-1)
