"""Exact rejection of sampled drafts, and the token drawn after those that hold."""

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

    target_probs [B, K + 1, V] float32, draft_probs [R, K, V] float32, rows [B] int64. certain [B, K] bool: drafts that were chosen, not
    drawn; each has probability 1, and draft_probs is not read for it. Where all are certain, draft_probs may be [R, 0, V].
    """
    distributions = draft_distributions(draft_probs, rows, certain, drafts, target_probs)
    return exact_rejection(target_probs, distributions, finite, drafts, draft_count, status, seed, length)


def draft_distributions(
    draft_probs: Tensor, rows: Tensor, certain: Tensor, drafts: Tensor, target_probs: Tensor, columns: VocabColumns = sampler.ALL_COLUMNS
) -> Tensor:
    """[B, K, V] the distribution of each draft: of a certain one 1 at its token, else draft_probs[rows]. Arguments as of reject_sample."""
    certain_probs = (columns.ids(target_probs) == drafts.clamp(min=0)[..., None]).to(torch.float32)
    return torch.where(certain[..., None], certain_probs, columns.part(draft_probs)[rows]) if draft_probs.shape[1] else certain_probs


def exact_rejection(
    target_probs: Tensor,
    draft_probs: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    seed: Tensor,
    length: Tensor,
    columns: VocabColumns = sampler.ALL_COLUMNS,
) -> tuple[Tensor, Tensor]:
    """Exact rejection sampling: the result is distributed as target_probs for any draft_probs.

    target_probs [B, K + 1, V]: the target's distribution p at each position; draft_probs [B, K, V]: the distribution q that each
    draft was drawn from; seed, length [B] select the random numbers. Draft j is accepted with probability min(1, p/q). The first
    rejected draft is replaced by a token drawn from max(p - q, 0); after the last draft a token is drawn from p. Returns tokens
    [B, K + 1], valid up to the drawn one, and the number of accepted drafts [B].
    """
    count = drafts.shape[1]
    index = torch.arange(count + 1, device=drafts.device)
    num_accepted = torch.zeros_like(draft_count)
    probs = target_probs[:, 0]
    if count:
        draft_index = drafts.clamp(min=0)[..., None]
        p = columns.pick(target_probs[:, :-1], draft_index).squeeze(2)
        q = columns.pick(draft_probs, draft_index).squeeze(2)
        uniforms = rng.uniform(seed[:, None], length[:, None] + index[:-1], rng.Purpose.ACCEPT)
        is_accepted = (uniforms * q < p) & finite[:, :-1] & may_accept(status, draft_count)
        num_accepted = is_accepted.to(torch.int64).cumprod(1).sum(1)
        index_3d = num_accepted[:, None, None].expand(-1, 1, target_probs.shape[2])
        probs = target_probs.gather(1, index_3d).squeeze(1)
        rejected = torch.where((num_accepted < draft_count)[:, None], draft_probs.gather(1, index_3d.clamp(max=count - 1)).squeeze(1), 0.0)
        residual = (probs - rejected).clamp(min=0)
        probs = torch.where(columns.total(residual.sum(1, keepdim=True)) > 0, residual, probs)  # p = q up to rounding
    drawn = race(probs, seed, length + num_accepted, rng.Purpose.TARGET, columns)[:, None]
    padded = torch.cat([drafts, drawn], 1)
    return torch.where(index < num_accepted[:, None], padded, drawn), num_accepted
