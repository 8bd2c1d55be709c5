"""Acceptance of a chain of drafts: how many hold, how many tokens each row emits, and whether it is finished."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import acceptance
from stepgraph.sampling.kernels.operation import CKernel, Contiguous, operation


def _outputs(sampled: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    emitted, accepted, finish = torch.empty(3, len(sampled), dtype=torch.int64, device=sampled.device)
    return emitted, accepted, finish


@operation(_outputs, triton=True, c=CKernel("chain_accept", lambda *tensors: all(each is None or each.is_contiguous() for each in tensors)))
def chain_accept(
    sampled: Contiguous,
    finite: Contiguous,
    drafts: Contiguous,
    draft_count: Contiguous,
    status: Contiguous,
    stop_ids: Contiguous,
    room: Contiguous,
    accepted: Contiguous | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """acceptance.count_accepted and acceptance.emit in one: Emission.emitted, .accepted and .finish, [B] int64 each.

    accepted [B]: how many drafts hold, where that is decided already.
    """
    count = acceptance.count_accepted(sampled, finite, drafts, draft_count, status) if accepted is None else accepted
    return acceptance.emit(sampled, finite, count, status, stop_ids, room)[1:]
