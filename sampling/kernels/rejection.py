"""Judging sampled drafts by exact rejection, and drawing the token behind those that hold."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import acceptance
from stepgraph.sampling.kernels.operation import dense, operation


def reject_sample(
    target_probs: Tensor,
    draft_probs: Tensor,
    rows: Tensor,
    certain: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    seed: Tensor,
    length: Tensor,
) -> tuple[Tensor, Tensor]:
    """acceptance.reject_sample, which tells the rest, where row b's drafts were drawn from draft_probs[rows[b]].

    target_probs [B, K + 1, V] float32, draft_probs [R, K, V] float32, rows [B] int64. certain [B, K] bool: drafts that were not
    drawn but chosen; each is a certainty, and what draft_probs say of it is not read. Where all are certain, draft_probs may
    be [R, 0, V].
    """
    assert target_probs.dtype is draft_probs.dtype is torch.float32, f"target {target_probs.dtype}, draft {draft_probs.dtype}"
    batch, positions, width = target_probs.shape
    assert draft_probs.shape[1:] in ((positions - 1, width), (0, width)), f"target {target_probs.shape}, draft {draft_probs.shape}"
    assert certain.shape == drafts.shape, f"certain {certain.shape}, drafts {drafts.shape}"
    assert drafts.shape == (batch, positions - 1), f"target {target_probs.shape}, drafts {drafts.shape}"
    tokens = torch.empty(batch, positions, dtype=torch.int64, device=target_probs.device)
    accepted = torch.empty(batch, dtype=torch.int64, device=target_probs.device)
    others = [tensor.contiguous() for tensor in (rows, certain, finite, drafts, draft_count, status, seed, length)]
    reject_sample_operation(dense(target_probs), dense(draft_probs), *others, tokens, accepted)
    return tokens, accepted


def reject_sample_reference(
    target_probs: Tensor,
    draft_probs: Tensor,
    rows: Tensor,
    certain: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    seed: Tensor,
    length: Tensor,
    tokens: Tensor,
    accepted: Tensor,
) -> None:
    offered = torch.zeros_like(target_probs[:, :-1]).scatter_(2, drafts.clamp(min=0)[..., None], 1.0)
    if draft_probs.shape[1]:
        offered = torch.where(certain[..., None], offered, draft_probs[rows])
    drawn, held = acceptance.reject_sample(target_probs, offered, finite, drafts, draft_count, status, seed, length)
    tokens.copy_(drawn)
    accepted.copy_(held)


reject_sample_operation = operation(
    "rejection",
    "reject_sample",
    "(Tensor target_probs, Tensor draft_probs, Tensor rows, Tensor certain, Tensor finite, Tensor drafts, Tensor draft_count, "
    "Tensor status, Tensor seed, Tensor length, Tensor(a!) tokens, Tensor(b!) accepted) -> ()",
    reject_sample_reference,
)
