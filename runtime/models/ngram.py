"""N-gram look-up: proposes the tokens that followed an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.proposer import History
from stepgraph.graphs.proposing import ANCHOR
from stepgraph.sampling.fields import is_int


@dataclass(frozen=True)
class NgramLookup:
    """Searches the history, and the request's `draft_ids`, for the last tokens of the history. Runs on the device.

    The longest match wins, of at most `max_ngram` and at least `min_ngram` tokens. Among matches of equal length, one in
    draft_ids precedes one in the history; in draft_ids the one closest to the number of generated tokens wins, in the
    history the latest. A copy that reaches the end of the history continues with its own tokens; one that reaches the end of
    draft_ids ends.

    Unlikely drafts cost nothing, as a round verifies all draft positions in any case. A look-up makes max_ngram comparisons
    per token of each row's text and needs about 50 bytes of temporary memory for each.
    """

    max_ngram: int = ANCHOR
    min_ngram: int = 1
    why: str = ""  # the reason for the choice of this drafter, for the capture report

    def __post_init__(self) -> None:
        for name, most in (("max_ngram", ANCHOR), ("min_ngram", self.max_ngram)):
            value = getattr(self, name)
            if not is_int(value) or not 1 <= value <= most:
                raise ValueError(f"NgramLookup.{name}: got {value!r}, expected a whole number from 1 to {most}")

    @property
    def notes(self) -> tuple[str, ...]:
        reason = f" ({self.why})" if self.why else ""
        return (f"draft: n-gram look-up, {self.min_ngram} to {self.max_ngram} tokens{reason}",)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        text, start, width = history.tokens, history.given_from, history.tokens.shape[1]
        length, generated = (column[:, None].to(torch.int32) for column in (history.length, history.generated))
        columns = torch.arange(width, dtype=torch.int32, device=text.device)
        # Unique in a row: the column in the history, or a larger number that falls with the distance to the expected column.
        distance = columns - start - generated
        preference = torch.where(columns < start, columns, 3 * width - 2 * distance.abs() - (distance < 0).to(torch.int32))
        matched = self._match_lengths(text, length).to(torch.int32)
        usable = (matched >= self.min_ngram) & ((columns < length) | ((columns >= start) & (text >= 0)))
        best, column = torch.where(usable, matched * 4 * width + preference, -1).max(1, keepdim=True)
        drafts = torch.arange(history.num_drafts, device=text.device)
        copied = column + torch.where(column < start, drafts % (length - column).clamp(min=1), drafts)
        chain = text.gather(1, copied.clamp(max=width - 1)).to(torch.int64)
        return torch.where(best >= 0, chain, -1)

    def _match_lengths(self, text: Tensor, length: Tensor) -> Tensor:
        """[B, T] int8: how many tokens before each column equal the last tokens of the history."""
        count, device = self.max_ngram, text.device
        last = length - torch.arange(count, 0, -1, device=device)  # [B, count] int64
        suffix = torch.where(last >= 0, text.gather(1, last.clamp(min=0)), -2)  # -2 equals no token and no padding
        windows = pad(text, (count, 0), value=-1).unfold(1, count, 1)[:, : text.shape[1]]  # [B, T, count], the tokens before a column
        after = torch.arange(count - 1, -1, -1, dtype=torch.int8, device=device)  # match length if this is the last unequal token
        return torch.where(windows == suffix[:, None], count, after).amin(2)
