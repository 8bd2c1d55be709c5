"""Exact rejection of sampled drafts, and the token drawn after those that hold."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import rejection
from stepgraph.sampling.kernels.operation import Contiguous, Dense, operation


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


@operation(_outputs, triton=True)
def reject_sample(
    target_probs: Dense,
    draft_probs: Dense,
    rows: Contiguous,
    certain: Contiguous,
    finite: Contiguous,
    drafts: Contiguous,
    draft_count: Contiguous,
    status: Contiguous,
    seed: Contiguous,
    length: Contiguous,
) -> tuple[Tensor, Tensor]:
    """rejection.reject_sample, where row b's drafts were drawn from draft_probs[rows[b]]: tokens [B, K + 1] and accepted drafts [B].

    target_probs [B, K + 1, V] float32, draft_probs [R, K, V] float32, rows [B] int64. certain [B, K] bool: drafts that were chosen, not
    drawn; each has probability 1, and draft_probs is not read for it. Where all are certain, draft_probs may be [R, 0, V].
    """
    proposed = torch.zeros_like(target_probs[:, :-1]).scatter_(2, drafts.clamp(min=0)[..., None], 1.0)
    if draft_probs.shape[1]:
        proposed = torch.where(certain[..., None], proposed, draft_probs[rows])
    return rejection.reject_sample(target_probs, proposed, finite, drafts, draft_count, status, seed, length)
