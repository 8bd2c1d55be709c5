"""The most probable legal token of each row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.status import BITS_PER_WORD
from stepgraph.sampling.kernels.operation import Dense, DenseFloats, Flags, Longs, operation


class GrammarMask(NamedTuple):
    """The masks of B rows at Q positions."""

    masks: Tensor  # [R, Q, words] int32
    rows: Tensor | None  # [B] int64: row b reads masks[rows[b]]; None: masks[b]
    constrained: Tensor  # [B] bool: rows that have a mask
    status: Tensor  # [B, Q] int64 MaskStatus; where a constrained row's is not OK, no token is legal, whatever the mask


def _argmax_outputs(
    logits: Tensor, masks: Tensor | None, rows: Tensor | None, constrained: Tensor | None, ids: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    assert logits.dim() == 3 and (masks is None) == (constrained is None), f"logits {logits.shape}"
    if masks is not None:
        assert masks.dim() == 3 and masks.shape[1] == logits.shape[1], f"logits {logits.shape}, masks {masks.shape}"
        assert masks.dtype is torch.int32, f"masks {masks.dtype}"
        assert ids is not None or masks.shape[2] * BITS_PER_WORD >= logits.shape[2], f"masks {masks.shape}, logits {logits.shape}"
    finite = torch.empty(logits.shape[:2], dtype=torch.bool, device=logits.device)
    return finite, torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)


def _c_supports(
    logits: Tensor, masks: Tensor | None, rows: Tensor | None, constrained: Tensor | None, ids: Tensor | None, status: Tensor | None
) -> bool:
    if masks is None or constrained is None:
        return False
    (batch, positions, width), (mask_rows, mask_positions, words) = logits.shape, masks.shape
    covered = words * BITS_PER_WORD >= width if ids is None else words > 0 and len(ids) == width
    fits = mask_positions == positions and (rows is not None or mask_rows == batch) and len(constrained) == batch and width > 0
    return masks.dtype is torch.int32 and covered and fits


@operation(_argmax_outputs, triton=True, c=True, takes=_c_supports)
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
