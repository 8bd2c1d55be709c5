"""Which mask rows are valid, how many drafts of a chain hold, how many tokens each row emits, and whether it is finished."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import acceptance
from stepgraph.sampling.grammar.status import TAG_FIELDS
from stepgraph.sampling.kernels.operation import Dense, Flags, Longs, StridedLongs, operation


class Emission(NamedTuple):
    """The tokens that one round adds to each row."""

    tokens: Tensor  # [B, K + 1] int64, valid below emitted
    emitted: Tensor  # [B] int64, number of tokens
    accepted: Tensor  # [B] int64, number of drafts among them
    finish: Tensor  # [B] int64 FinishCode


class MaskCheck(NamedTuple):
    """What mask_status finds."""

    status: Tensor  # [B, N] int64 MaskStatus
    constrained: Tensor  # [B] bool


def _status_outputs(tags: Tensor, owner: Tensor, *_: object) -> MaskCheck:
    assert tags.dim() == 3 and tags.dtype is torch.int64 and tags.shape[2] == TAG_FIELDS, f"tags {tags.dtype} {tags.shape}"
    status = torch.empty(len(owner), tags.shape[1], dtype=torch.int64, device=tags.device)
    return MaskCheck(status, torch.empty(len(owner), dtype=torch.bool, device=tags.device))


@operation(_status_outputs, triton=True, c=True)
def mask_status(
    tags: Dense, owner: StridedLongs, generated: StridedLongs, constrained: StridedLongs, first: int = 0, rows: Longs | None = None
) -> MaskCheck:
    """acceptance.mask_status of tags [R, N, 4] of which row b reads rows[b] ([B] int64; None: row b); and `constrained` as bool.

    owner, generated, constrained [B] int64, the last one not 0 for rows with a constraint; first: the index of the first tag.
    """
    has_grammar = constrained != 0
    return MaskCheck(acceptance.mask_status(tags if rows is None else tags[rows], owner, generated, has_grammar, first), has_grammar)


def _outputs(sampled: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    emitted, accepted, finish = torch.empty(3, len(sampled), dtype=torch.int64, device=sampled.device)
    return emitted, accepted, finish


@operation(_outputs, triton=True, c=True)
def chain_accept(
    sampled: Longs,
    finite: Flags,
    drafts: Longs,
    draft_count: Longs,
    status: Longs,
    stop_ids: Longs,
    room: Longs,
    accepted: Longs | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """acceptance.count_accepted and acceptance.emit in one: Emission.emitted, .accepted and .finish, [B] int64 each.

    accepted [B]: how many drafts hold, where that is decided already.
    """
    count = acceptance.count_accepted(sampled, finite, drafts, draft_count, status) if accepted is None else accepted
    return acceptance.emit(sampled, finite, count, status, stop_ids, room)
