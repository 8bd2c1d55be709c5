"""Chain verification: how many drafts are accepted, what is emitted, and whether the row is finished. Pure tensor functions.

All decisions of a round about a row are made on the device, so that the host can launch the next round without them. The kernels run
these functions where they have neither a Triton nor a C implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling.grammar.status import FinishCode, MaskStatus


def mask_status(tags: Tensor, owner: Tensor, generated: Tensor, constrained: Tensor, first: int = 0) -> Tensor:
    """Status [B, N] of every mask row; NONE if its tag does not match the row, so that the mask is not used.

    tags [B, N, 4] = (owner, committed tokens, index, status), written by the host for the indices from `first` on; the
    other tensors are [B]. A row without a constraint is always OK.
    """
    index = torch.arange(first, first + tags.shape[1], device=tags.device)
    valid = (tags[..., 0] == owner[:, None]) & (tags[..., 1] == generated[:, None]) & (tags[..., 2] == index)
    status = torch.where(valid, tags[..., 3], int(MaskStatus.NONE))
    return torch.where(constrained[:, None], status, int(MaskStatus.OK))


def count_accepted(sampled: Tensor, finite: Tensor, drafts: Tensor, draft_count: Tensor, status: Tensor) -> Tensor:
    """Number of leading drafts that equal the target's own choice.

    sampled, finite, status [B, K + 1]; drafts [B, K]; draft_count [B] -> [B]. Draft j is compared under mask row j and must be
    legal: the status of row j + 1 describes the text after draft j.
    """
    holds = (sampled[:, :-1] == drafts) & finite[:, :-1] & may_accept(status, draft_count)
    return holds.to(torch.int64).cumprod(1).sum(1)


def may_accept(status: Tensor, draft_count: Tensor) -> Tensor:
    """[B, K] bool: drafts within draft_count, with a valid mask, that the grammar accepted.

    A grammar that fails after a draft does not make the draft illegal: the mask of the draft is still valid, and rejecting the draft
    would change the distribution.
    """
    index = torch.arange(status.shape[1] - 1, device=status.device)
    legal = (status[:, 1:] != MaskStatus.NONE) & (status[:, 1:] != MaskStatus.ILLEGAL)
    return legal & (status[:, :-1] == MaskStatus.OK) & (index < draft_count[:, None])


def emit(
    sampled: Tensor, finite: Tensor, accepted: Tensor, status: Tensor, stop_ids: Tensor, room: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Count the accepted drafts and, where a mask allows one, the target's next token; cut at a stop id or at the length limit.

    Returns the emitted and the accepted tokens, and the FinishCode, [B] int64 each.

    sampled, finite, status [B, K + 1]; accepted, room [B]; stop_ids [B, S] padded with -1.
    """
    positions = sampled.shape[1]
    index = torch.arange(positions, device=sampled.device)
    last_status = status.gather(1, accepted[:, None]).squeeze(1)
    last_finite = finite.gather(1, accepted[:, None]).squeeze(1)
    has_bonus = (last_status == MaskStatus.OK) & last_finite
    offered = accepted + has_bonus
    is_stop = (sampled[:, :, None] == stop_ids[:, None, :]).any(2) & (index < offered[:, None])
    first_stop = torch.where(is_stop, index, positions).amin(1)
    count = torch.minimum(torch.minimum(offered, first_stop + 1), room)

    finish = _finish_of_status(last_status)
    finish = torch.where((last_status == MaskStatus.OK) & ~last_finite, int(FinishCode.LOGITS_FAULT), finish)
    finish = torch.where(count == room, int(FinishCode.LENGTH), finish)
    finish = torch.where(first_stop < count, int(FinishCode.STOP), finish)
    return count, torch.minimum(accepted, count), finish


def _finish_of_status(status: Tensor) -> Tensor:
    finish = torch.full_like(status, int(FinishCode.MASK_FAULT))
    for known, code in (
        (MaskStatus.OK, FinishCode.RUNNING),
        (MaskStatus.COMPLETE, FinishCode.CONSTRAINT_COMPLETE),
        (MaskStatus.TERMINATED, FinishCode.STOP),
        (MaskStatus.DEAD_END, FinishCode.DEAD_END),
    ):
        finish = torch.where(status == int(known), int(code), finish)
    return finish
