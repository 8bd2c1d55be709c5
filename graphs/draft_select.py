"""Which token a row drafts: one that the grammar forces, else one that was looked up and is legal, else the draft model's choice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling.bitmask import WORD
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import GrammarMask
from stepgraph.sampling.kernels.operation import CKernel, Contiguous, operation


class SelectedDraft(NamedTuple):
    tokens: Tensor  # [B] int64, -1 where a row drafts no more
    looked_up: Tensor | None  # [B] bool: the token is the one that was looked up; None: without look-up
    forced: Tensor | None  # [B] bool: the token is the only one that the grammar allows; None: without forced tokens


def select_draft(
    tokens: Tensor,
    finite: Tensor,
    alive: Tensor,
    limit: Tensor,
    step: int,
    looked_up: Tensor | None = None,
    forced: Tensor | None = None,
    mask: GrammarMask | None = None,
) -> SelectedDraft:
    """tokens [B] int64, finite [B] bool: the model's choice, and whether its logit is finite; alive [B] bool; limit [B]: maximum drafts.

    looked_up [B]: the token found by look-up, -1 where there is none; forced [B]: the token that the grammar forces, -1 where it
    leaves a choice. In a constrained row both need a valid mask, and a looked-up token has to be legal under it; a row that is not
    constrained is never forced.
    """
    first = (None, None, None) if mask is None else (mask.masks[:, 0], mask.constrained, mask.status[:, 0])
    selected, took_found, took_forced = select_draft_tensors(tokens, finite, alive, limit, step, looked_up, forced, *first)
    return SelectedDraft(selected, None if looked_up is None else took_found, None if forced is None else took_forced)


def legal(tokens: Tensor, masks: Tensor, constrained: Tensor, status: Tensor) -> Tensor:
    """[B] bool: whether each row's token is allowed, under masks [B, words] of status [B]. Unspecified for a token of -1."""
    known = tokens.clamp(min=0)
    words = masks.gather(1, known[:, None] // WORD).squeeze(1)
    return ((words >> (known % WORD)) & 1 != 0) & (status == MaskStatus.OK) | ~constrained


def _in_c(tokens: Tensor, finite: Tensor, alive: Tensor, limit: Tensor, step: int, looked_up: Tensor | None, *given: Tensor | None) -> bool:
    forced, masks, constrained, status = given
    dense = (tokens, finite, alive, forced, constrained, status)
    return all(each is None or each.is_contiguous() for each in dense) and (masks is None or masks.stride(-1) == 1)


def _outputs(tokens: Tensor, finite: Tensor, *_: object) -> SelectedDraft:
    return SelectedDraft(torch.empty_like(tokens), torch.empty_like(finite), torch.empty_like(finite))


@operation(_outputs, name="select_draft", c=CKernel("select_draft", _in_c))
def select_draft_tensors(
    tokens: Contiguous,
    finite: Contiguous,
    alive: Contiguous,
    limit: Tensor,
    step: int,
    looked_up: Tensor | None,
    forced: Contiguous | None,
    masks: Tensor | None,
    constrained: Contiguous | None,
    status: Contiguous | None,
) -> SelectedDraft:
    took_found = took_forced = None
    mask = None if masks is None or constrained is None or status is None else (masks, constrained, status)
    if looked_up is not None:
        took_found = looked_up >= 0 if mask is None else (looked_up >= 0) & legal(looked_up, *mask)
        tokens, finite = torch.where(took_found, looked_up, tokens), finite | took_found
    if forced is not None:
        assert mask is not None, "a token is forced only by a grammar"
        took_forced = (forced >= 0) & mask[1] & (mask[2] == MaskStatus.OK)
        tokens, finite = torch.where(took_forced, forced, tokens), finite | took_forced
    return SelectedDraft(torch.where(alive & finite & (limit >= step), tokens, -1), took_found, took_forced)
