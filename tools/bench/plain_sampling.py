"""Sampling in plain torch, as in a decoding loop without this library: the baseline of the accept stage."""

from __future__ import annotations

import torch
from torch import Tensor

BITS_PER_WORD = 32


def plain_sampling(
    logits: Tensor, masks: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, drafts: Tensor, draft_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [B, K + 1] and accepted drafts [B], position by position.

    logits [B, K + 1, V]; masks [B, K + 1, ceil(V / 32)] int32; temperature, top_k, top_p [B, 1]; drafts [B, K] and
    their distributions draft_probs [B, K, V].
    """
    rows, positions, width = logits.shape
    bits = torch.arange(BITS_PER_WORD, device=logits.device)
    tokens, running = [], torch.ones(rows, dtype=torch.bool, device=logits.device)
    accepted = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    for index in range(positions):
        allowed = ((masks[:, index, :, None] >> bits) & 1).bool().flatten(1)[:, :width]
        scores = logits[:, index].float().masked_fill(~allowed, float("-inf")) / temperature
        probs = plain_filters(scores, top_k, top_p)
        if index == positions - 1:
            tokens.append(torch.multinomial(probs, 1).squeeze(1))
            break
        draft, offered = drafts[:, index], draft_probs[:, index]
        ratio = (probs.gather(1, draft[:, None]) / offered.gather(1, draft[:, None])).squeeze(1)
        is_accepted = torch.rand(rows, device=logits.device) < ratio
        residual = (probs - offered).clamp(min=0)
        residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, probs)
        tokens.append(torch.where(is_accepted, draft, torch.multinomial(residual, 1).squeeze(1)))
        running = running & is_accepted
        accepted += running
    return torch.stack(tokens, 1), accepted


def plain_filters(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities [B, V] after top-k and top-p, by sorting."""
    ordered, ids = scores.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(scores.shape[1], device=scores.device) >= top_k, float("-inf"))
    probs = ordered.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    return torch.zeros_like(scores).scatter_(1, ids, probs / probs.sum(-1, keepdim=True))
