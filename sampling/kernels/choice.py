"""The most probable legal token of each row, which masks are valid, how many drafts of a chain hold, and whether a row is finished."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import acceptance, bitmask
from stepgraph.sampling.grammar.status import BITS_PER_WORD, TAG_FIELDS
from stepgraph.sampling.kernels.operation import Dense, DenseFloats, Flags, Longs, StridedLongs, operation


class GrammarMask(NamedTuple):
    """The masks of B rows at Q positions."""

    masks: Tensor  # [R, Q, words] int32
    rows: Tensor | None  # [B] int64: row b reads masks[rows[b]]; None: masks[b]
    constrained: Tensor  # [B] bool: rows that have a mask
    status: Tensor  # [B, Q] int64 MaskStatus; where a constrained row's is not OK, no token is legal, whatever the mask


def _argmax_outputs(
    logits: Tensor, masks: Tensor | None, rows: Tensor | None, constrained: Tensor | None, ids: Tensor | None, status: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert logits.dim() == 3 and (masks is None) == (constrained is None), f"logits {logits.shape}"
    if masks is not None:
        assert masks.dim() == 3 and masks.shape[1] == logits.shape[1], f"logits {logits.shape}, masks {masks.shape}"
        assert masks.dtype is torch.int32, f"masks {masks.dtype}"
        assert ids is not None or masks.shape[2] * BITS_PER_WORD >= logits.shape[2], f"masks {masks.shape}, logits {logits.shape}"
    assert status is None or status.shape == logits.shape[:2], f"logits {logits.shape}, status {status.shape}"
    finite = torch.empty(logits.shape[:2], dtype=torch.bool, device=logits.device)
    return finite, torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)


def _c_supports(logits: Tensor, masks: Tensor | None, rows: Tensor | None, constrained: Tensor | None, ids: Tensor | None) -> bool:
    if masks is None or constrained is None:
        return False
    (batch, positions, width), (mask_rows, mask_positions, words) = logits.shape, masks.shape
    covered = words * BITS_PER_WORD >= width if ids is None else words > 0 and len(ids) == width
    fits = mask_positions == positions and (rows is not None or mask_rows == batch) and len(constrained) == batch and width > 0
    return masks.dtype is torch.int32 and covered and fits


@operation(_argmax_outputs, triton=True, c=True, supports=_c_supports)
def masked_argmax(
    logits: DenseFloats,
    masks: Dense | None,
    rows: Longs | None = None,
    constrained: Flags | None = None,
    ids: Longs | None = None,
    status: Longs | None = None,
) -> tuple[Tensor, Tensor]:
    """Whether the best legal logit is finite, and its index, both [B, Q]: as bitmask.apply and max, without storing the masked logits.

    logits [B, Q, V] float32, bfloat16 or float16; masks [R, Q, >= ceil(V / 32)] int32, of which row b of the logits reads row
    rows[b] ([B] int64; None: row b), None: every token is legal; constrained [B] bool: rows that have a mask; ids [V] int64: the
    mask bit of each logit, None: its index; status [B, Q] int64 MaskStatus: where a constrained row's is not OK, no token is legal.
    The lowest index wins a tie, a NaN wins over every number; without a legal token the best is not finite and the index 0.
    """
    if masks is not None:
        assert constrained is not None
        logits = bitmask.apply(logits, masks if rows is None else masks[rows], constrained, ids, status)
    best, token = logits.max(-1)
    return torch.isfinite(best), token


def most_probable(logits: Tensor, mask: GrammarMask | None, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Whether the largest legal logit of [B, Q, V] is finite, and its index, both [B, Q]. ids as for masked_argmax."""
    if mask is None and not logits.is_cpu:
        return masked_argmax(logits, None)  # on a GPU a quarter of the time that `max` takes
    if mask is None:
        best, index = logits.max(-1)
        return best.abs() < math.inf, index  # isfinite takes two kernels more
    return masked_argmax(logits, mask.masks, mask.rows, mask.constrained, ids, mask.status)


class Emission(NamedTuple):
    """The tokens that one round adds to each row."""

    tokens: Tensor  # [B, K + 1] int64, valid below emitted
    emitted: Tensor  # [B] int64, number of tokens
    accepted: Tensor  # [B] int64, number of drafts among them
    finish: Tensor  # [B] int64 FinishCode


def _status_outputs(tags: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    assert tags.dim() == 3 and tags.dtype is torch.int64 and tags.shape[2] == TAG_FIELDS, f"tags {tags.dtype} {tags.shape}"
    batch = len(tags if others[-1] is None else others[-1])
    return tags.new_empty(batch, tags.shape[1]), tags.new_empty(batch, dtype=torch.bool)


@operation(_status_outputs, triton=True, c=True, supports=lambda tags, owner: len(tags) == len(owner))
def mask_status(
    tags: Dense, owner: StridedLongs, generated: StridedLongs, constrained: StridedLongs, first: int = 0, rows: Longs | None = None
) -> tuple[Tensor, Tensor]:
    """acceptance.mask_status of tags [R, N, 4] of which row b reads rows[b] ([B] int64; None: row b); and `constrained` as bool.

    owner, generated, constrained [R] int64, the last one not 0 for rows with a constraint; first: the index of the first tag.
    """
    if rows is not None:
        tags, owner, generated, constrained = (table[rows] for table in (tags, owner, generated, constrained))
    has_grammar = constrained != 0
    return acceptance.mask_status(tags, owner, generated, has_grammar, first), has_grammar


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
