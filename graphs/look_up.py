"""N-gram look-up: which tokens followed an earlier occurrence of the last tokens of a text."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepgraph.sampling.kernels.c_kernel import CKernel
from stepgraph.sampling.kernels.operation import Contiguous, operation


def _outputs(text: Tensor, length: Tensor, generated: Tensor, given_from: int, count: int, *_: int) -> Tensor:
    return length.new_empty(len(text), count)


def _in_c(text: Tensor, length: Tensor, generated: Tensor, *_: int) -> bool:
    return text.dtype is torch.int32 and length.dtype is generated.dtype is torch.int64


@operation(_outputs, c=CKernel("look_up", _in_c))
def look_up(text: Contiguous, length: Tensor, generated: Tensor, given_from: int, count: int, longest: int, shortest: int) -> Tensor:
    """[B, count] int64: chains of drafts as NgramLookup describes them, -1 without a match. text [B, T], length [B], generated [B] and
    given_from as in History; longest and shortest match."""
    start, width = given_from, text.shape[1]
    length, generated = (column[:, None].to(torch.int32) for column in (length, generated))
    columns = torch.arange(width, dtype=torch.int32, device=text.device)
    # Unique in a row: the column in the history, or a larger number that falls with the distance to the expected column.
    distance = columns - start - generated
    preference = torch.where(columns < start, columns, 3 * width - 2 * distance.abs() - (distance < 0).to(torch.int32))
    matched = _match_lengths(text, length, longest).to(torch.int32)
    usable = (matched >= shortest) & ((columns < length) | ((columns >= start) & (text >= 0)))
    best, column = torch.where(usable, matched * 4 * width + preference, -1).max(1, keepdim=True)
    drafts = torch.arange(count, device=text.device)
    copied = column + torch.where(column < start, drafts % (length - column).clamp(min=1), drafts)
    chain = text.gather(1, copied.clamp(max=width - 1)).to(torch.int64)
    return torch.where(best >= 0, chain, -1)


def _match_lengths(text: Tensor, length: Tensor, count: int) -> Tensor:
    """[B, T] int8: how many tokens before each column equal the last tokens of the history."""
    device = text.device
    last = length - torch.arange(count, 0, -1, device=device)  # [B, count] int64
    suffix = torch.where(last >= 0, text.gather(1, last.clamp(min=0)), -2)  # -2 equals no token and no padding
    windows = pad(text, (count, 0), value=-1).unfold(1, count, 1)[:, : text.shape[1]]  # [B, T, count], the tokens before a column
    after = torch.arange(count - 1, -1, -1, dtype=torch.int8, device=device)  # match length if this is the last unequal token
    return torch.where(windows == suffix[:, None], count, after).amin(2)
