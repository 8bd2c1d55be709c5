"""Acceptance of drafts in sampled rounds, and the token drawn after those that hold."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import rng, sampler
from stepgraph.sampling.acceptance import may_accept
from stepgraph.sampling.kernels.filters import race
from stepgraph.sampling.kernels.operation import Dense, Flags, Longs, operation
from stepgraph.sampling.sampler import VocabColumns


def _outputs(
    target_probs: Tensor, draft_probs: Tensor, rows: Tensor, certain: Tensor, finite: Tensor, drafts: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    assert target_probs.dtype is draft_probs.dtype is torch.float32, f"target {target_probs.dtype}, draft {draft_probs.dtype}"
    batch, positions, width = target_probs.shape
    assert draft_probs.shape[1:] in ((positions - 1, width), (0, width)), f"target {target_probs.shape}, draft {draft_probs.shape}"
    assert certain.shape == drafts.shape, f"certain {certain.shape}, drafts {drafts.shape}"
    assert drafts.shape == (batch, positions - 1), f"target {target_probs.shape}, drafts {drafts.shape}"
    tokens = torch.empty(batch, positions, dtype=torch.int64, device=target_probs.device)
    return tokens, torch.empty(batch, dtype=torch.int64, device=target_probs.device)


@operation(_outputs, triton=True, c=True)
def reject_sample(
    target_probs: Dense,
    draft_probs: Dense,
    rows: Longs,
    certain: Flags,
    finite: Flags,
    drafts: Longs,
    draft_count: Longs,
    status: Longs,
    seed: Longs,
    length: Longs,
) -> tuple[Tensor, Tensor]:
    """exact_rejection, where row b's drafts were drawn from draft_probs[rows[b]]: tokens [B, K + 1] and accepted drafts [B].

    target_probs [B, K + 1, V] float32, draft_probs [R, K, V] float32, rows [B] int64. Where all drafts are certain, draft_probs may be
    [R, 0, V].
    """
    return exact_rejection(target_probs, draft_probs[rows], certain, finite, drafts, draft_count, status, seed, length)


def exact_rejection(
    target_probs: Tensor,
    draft_probs: Tensor,
    certain: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    seed: Tensor,
    length: Tensor,
    columns: VocabColumns = sampler.ALL_COLUMNS,
) -> tuple[Tensor, Tensor]:
    """Accept drafts and draw the next token: the result is distributed as target_probs for any draft_probs.

    target_probs [B, K + 1, V]: the target's distribution p at each position; seed, length [B] select the random numbers. Returns tokens
    [B, K + 1], valid up to the drawn one, and the number of accepted drafts [B].

    certain [B, K] bool: drafts that are accepted where they equal the token that is drawn from p at their position, so that the tokens do
    not depend on them. Any other draft was drawn from draft_probs [B, K or 0, V], its distribution q, by other random numbers. It is
    accepted with probability min(1, p/q), and the first rejected one is replaced by a token drawn from max(p - q, 0).
    """
    batch, positions, width = target_probs.shape
    index = torch.arange(positions, device=drafts.device)
    numbers = seed[:, None].expand(-1, positions).flatten(), (length[:, None] + index).flatten()
    drawn = race(target_probs.flatten(0, 1), *numbers, rng.Purpose.TARGET, columns).view(batch, positions)
    holds, has_others = drawn[:, :-1] == drafts, draft_probs.shape[1] > 0
    if has_others:
        draft_index = drafts.clamp(min=0)[..., None]
        p = columns.pick(target_probs[:, :-1], draft_index).squeeze(2)
        q = columns.pick(draft_probs, draft_index).squeeze(2)
        uniforms = rng.uniform(seed[:, None], length[:, None] + index[:-1], rng.Purpose.ACCEPT)
        holds = torch.where(certain, holds, uniforms * q < p)
    is_accepted = holds & finite[:, :-1] & may_accept(status, draft_count)
    num_accepted = is_accepted.to(torch.int64).cumprod(1).sum(1)
    next_tokens = drawn.gather(1, num_accepted[:, None])
    if has_others:
        last = num_accepted.clamp(max=positions - 2)[:, None]
        is_rejected = (num_accepted < draft_count)[:, None] & ~certain.gather(1, last)
        probs = target_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, width)).squeeze(1)
        rejected = draft_probs.gather(1, last[..., None].expand(-1, 1, width)).squeeze(1)
        residual = (probs - torch.where(is_rejected, rejected, 0.0)).clamp(min=0)
        probs = torch.where(columns.total(residual.sum(1, keepdim=True)) > 0, residual, probs)  # p = q up to rounding
        next_tokens = race(probs, seed, length + num_accepted, rng.Purpose.TARGET, columns)[:, None]
    padded = torch.cat([drafts, next_tokens], 1)
    return torch.where(index < num_accepted[:, None], padded, next_tokens), num_accepted
