"""N-gram look-up: the tokens that followed an earlier occurrence of a text's last tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepgraph.sampling.kernels.c_kernel import CKernel
from stepgraph.sampling.kernels.operation import Dense, operation


def _outputs(text: Tensor, length: Tensor, generated: Tensor, start: int, count: int, most: int, least: int) -> Tensor:
    assert text.dtype is torch.int32 and text.dim() == 2, f"text {text.dtype} {text.shape}"
    return torch.empty(len(text), count, dtype=torch.int64, device=text.device)


def _in_c(text: Tensor, length: Tensor, generated: Tensor, *_: int) -> bool:
    return length.dtype is generated.dtype is torch.int64


@operation(_outputs, c=CKernel("ngram_chains", _in_c))
def ngram_chains(text: Dense, length: Tensor, generated: Tensor, start: int, count: int, most: int, least: int) -> Tensor:
    """The `count` tokens after the longest match of a text's last tokens, `least` to `most` of them; -1 where there is none.

    text [B, T] int32: a history of `length` [B], `generated` [B] of them output; from `start` on a given text, then -1. NgramLookup says
    which match wins.
    """
    width = text.shape[1]
    length, generated = (column[:, None].to(torch.int32) for column in (length, generated))
    columns = torch.arange(width, dtype=torch.int32, device=text.device)
    # Unique in a row: the column in the history, or a larger number that falls with the distance to the expected column.
    distance = columns - start - generated
    preference = torch.where(columns < start, columns, 3 * width - 2 * distance.abs() - (distance < 0).to(torch.int32))
    matched = _match_lengths(text, length, most).to(torch.int32)
    usable = (matched >= least) & ((columns < length) | ((columns >= start) & (text >= 0)))
    best, column = torch.where(usable, matched * 4 * width + preference, -1).max(1, keepdim=True)
    drafts = torch.arange(count, device=text.device)
    copied = column + torch.where(column < start, drafts % (length - column).clamp(min=1), drafts)
    chain = text.gather(1, copied.clamp(max=width - 1)).to(torch.int64)
    return torch.where(best >= 0, chain, -1)


def _match_lengths(text: Tensor, length: Tensor, most: int) -> Tensor:
    """[B, T] int8: how many tokens before each column equal the last tokens of the history."""
    device = text.device
    last = length - torch.arange(most, 0, -1, device=device)  # [B, most] int64
    suffix = torch.where(last >= 0, text.gather(1, last.clamp(min=0)), -2)  # -2 equals no token and no padding
    windows = pad(text, (most, 0), value=-1).unfold(1, most, 1)[:, : text.shape[1]]  # [B, T, most], the tokens before a column
    after = torch.arange(most - 1, -1, -1, dtype=torch.int8, device=device)  # match length if this is the last unequal token
    return torch.where(windows == suffix[:, None], most, after).amin(2)
