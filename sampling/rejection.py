"""Acceptance of sampled drafts, and of drafts at a given rate. Pure tensor functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepgraph.sampling import rng, sampler
from stepgraph.sampling.acceptance import may_accept


def reject_sample(
    target_probs: Tensor,
    draft_probs: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    seed: Tensor,
    length: Tensor,
) -> tuple[Tensor, Tensor]:
    """Exact rejection sampling: the result is distributed as target_probs for any draft_probs.

    target_probs [B, K + 1, V]: the target's distribution p at each position; draft_probs [B, K, V]: the distribution q that each
    draft was drawn from; seed, length [B] select the random numbers. Draft j is accepted with probability min(1, p/q). The first
    rejected draft is replaced by a token drawn from max(p - q, 0); after the last draft a token is drawn from p. Returns tokens
    [B, K + 1], valid up to the drawn one, and the number of accepted drafts [B].
    """
    count = drafts.shape[1]
    index = torch.arange(count + 1, device=drafts.device)
    last = torch.zeros_like(draft_count)
    probs = target_probs[:, 0]
    if count:
        proposed = drafts.clamp(min=0)[..., None]
        p = target_probs[:, :-1].gather(2, proposed).squeeze(2)
        q = draft_probs.gather(2, proposed).squeeze(2)
        coins = rng.uniform(seed[:, None], length[:, None] + index[:-1], rng.Purpose.ACCEPT)
        holds = (coins * q < p) & finite[:, :-1] & may_accept(status, draft_count)
        last = holds.to(torch.int64).cumprod(1).sum(1)
        index_3d = last[:, None, None].expand(-1, 1, target_probs.shape[2])
        probs = target_probs.gather(1, index_3d).squeeze(1)
        rejected = torch.where((last < draft_count)[:, None], draft_probs.gather(1, index_3d.clamp(max=count - 1)).squeeze(1), 0.0)
        rest = (probs - rejected).clamp(min=0)
        probs = torch.where(rest.sum(1, keepdim=True) > 0, rest, probs)  # p = q up to rounding
    vocabulary = torch.arange(target_probs.shape[2], device=drafts.device)
    noise = rng.exponential(seed[:, None], (length + last)[:, None], rng.Purpose.TARGET, vocabulary)
    drawn = sampler.race(probs, noise)[:, None]
    padded = torch.cat([drafts, drawn], 1)
    return torch.where(index < last[:, None], padded, drawn), last


def force_accepted(shares: Sequence[float], finite: Tensor, draft_count: Tensor, status: Tensor, owner: Tensor, length: Tensor) -> Tensor:
    """For benchmarks: accept a legal draft j with probability shares[j]. Returns the number of leading accepted drafts, [B]."""
    coins = [rng.uniform(owner, length + index, rng.Purpose.ACCEPT) < share for index, share in enumerate(shares)]
    holds = torch.stack(coins, 1) & finite[:, :-1] & may_accept(status, draft_count)
    return holds.to(torch.int64).cumprod(1).sum(1)
