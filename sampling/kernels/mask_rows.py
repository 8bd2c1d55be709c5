"""Whether a mask row may be used: by its tag, in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import acceptance
from stepgraph.sampling.kernels import cpu as native
from stepgraph.sampling.kernels.cpu import calls
from stepgraph.sampling.kernels.operation import contiguous, dense, operation


def mask_status(tags: Tensor, owner: Tensor, generated: Tensor, constrained: Tensor, first: int = 0, rows: Tensor | None = None) -> Tensor:
    """acceptance.mask_status, [B, N] int64, of tags [R, N, 4] of which row b reads rows[b] ([B] int64; None: row b).

    owner, generated [B] int64 of any stride, constrained [B] bool; first: the index of the first tag.
    """
    assert tags.dim() == 3 and tags.dtype is torch.int64, f"tags {tags.dtype} {tags.shape}"
    status = torch.empty(len(owner), tags.shape[1], dtype=torch.int64, device=tags.device)
    mask_status_operation(dense(tags), contiguous(rows), owner, generated, constrained.contiguous(), first, status)
    return status


def mask_status_reference(
    tags: Tensor, rows: Tensor | None, owner: Tensor, generated: Tensor, constrained: Tensor, first: int, status: Tensor
) -> None:
    mine = tags if rows is None else tags[rows]
    status.copy_(acceptance.mask_status(mine, owner, generated, constrained, first))


mask_status_operation = operation(
    "mask_rows",
    "mask_status",
    "(Tensor tags, Tensor? rows, Tensor owner, Tensor generated, Tensor constrained, int first, Tensor(a!) status) -> ()",
    mask_status_reference,
    native.prepared(calls.mask_status),
)
