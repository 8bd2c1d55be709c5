"""Packed token masks: bit t % 32 of word t // 32 is set where token t is legal. Pure tensor functions.

The bits of ids beyond the tokenizer are 0, so padding logits are never chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus


def unpack(masks: Tensor, width: int) -> Tensor:
    """[..., words] int32 -> [..., width] bool. The shift is arithmetic; `& 1` discards the sign."""
    bits = torch.arange(BITS_PER_WORD, dtype=torch.int32, device=masks.device)
    return ((masks.unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :width] != 0


def pack(allowed: Tensor) -> Tensor:
    """[..., width] bool -> [..., ceil(width / 32)] int32."""
    missing = -allowed.shape[-1] % BITS_PER_WORD
    bits = torch.nn.functional.pad(allowed, (0, missing)).unflatten(-1, (-1, BITS_PER_WORD)).to(torch.int32)
    shifts = torch.arange(BITS_PER_WORD, dtype=torch.int32, device=allowed.device)
    return torch.bitwise_left_shift(bits, shifts).sum(-1, dtype=torch.int32)


def apply(logits: Tensor, masks: Tensor, constrained: Tensor, ids: Tensor | None = None, status: Tensor | None = None) -> Tensor:
    """Logits with minus infinity for the tokens that the mask of a constrained row forbids.

    logits [B, ..., V] float, masks [B, ..., words] int32, constrained [B] bool. Rows without a constraint are unchanged.
    ids [V] int64: the mask bit of each logit, for a draft model with its own vocabulary; None: the index of the logit.
    status [B, ...] int64 MaskStatus: a mask that is not OK forbids every token.
    """
    unconstrained = ~constrained.view(-1, *[1] * (logits.dim() - 1))
    legal = unpack(masks, logits.shape[-1]) if ids is None else unpack(masks, masks.shape[-1] * BITS_PER_WORD)[..., ids]
    if status is not None:
        legal = legal & (status == int(MaskStatus.OK)).unsqueeze(-1)
    return torch.where(legal | unconstrained, logits, float("-inf"))


def allowed(tokens: Tensor, masks: Tensor, constrained: Tensor, status: Tensor, rows: Tensor | None = None) -> Tensor:
    """[B] bool: whether each row's token is allowed, under masks [R, words] of status [B]. Unspecified for a token of -1."""
    known = tokens.clamp(min=0)
    word = known // BITS_PER_WORD
    words = masks.gather(1, word[:, None]).squeeze(1) if rows is None else masks[rows, word]
    return ((words >> (known % BITS_PER_WORD)) & 1 != 0) & (status == MaskStatus.OK) | ~constrained
