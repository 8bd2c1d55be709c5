"""A drafter without weights: what followed the last time the text ended like this, it proposes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.model import History
from stepgraph.graphs.proposing import ANCHOR
from stepgraph.graphs.shapes import Limits


@dataclass(frozen=True)
class NgramLookup:
    """Looks the last tokens of a history up in the history itself and in the text that the request gave, on the device.

    The longest match counts, of `max_ngram` tokens at most and `min_ngram` at least. Among equals the given text comes before
    the history; in the given text the place nearest to as many tokens as were generated, in the history the latest one. A
    copy that reaches the end of the history goes on with itself. Where the given text ends, so do the drafts.

    A draft on a slight chance costs nothing: a round verifies all its places, whether they hold drafts or not. The look-up
    makes max_ngram comparisons per token of each row's text, whatever it finds, with some 50 bytes of passing memory for each.
    """

    max_ngram: int = ANCHOR
    min_ngram: int = 1
    why: str = ""  # it was chosen, for the capture report; empty: by name

    def __post_init__(self) -> None:
        for name, most in (("max_ngram", ANCHOR), ("min_ngram", self.max_ngram)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"NgramLookup.{name}: got {value!r}, want a whole number from 1 to {most}")

    @property
    def notes(self) -> tuple[str, ...]:
        chosen = f" ({self.why})" if self.why else ""
        return (f"draft: n-gram look-up, {self.min_ngram} to {self.max_ngram} tokens{chosen}",)

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        text, start, width = history.tokens, history.given_from, history.tokens.shape[1]
        length, generated = (column[:, None].to(torch.int32) for column in (history.length, history.generated))
        places = torch.arange(width, dtype=torch.int32, device=text.device)
        # A number for each place, which no other has: how near it is to where the output would stand, or the place itself.
        distance = places - start - generated
        preference = torch.where(places < start, places, 3 * width - 2 * distance.abs() - (distance < 0).to(torch.int32))
        matched = self._matched(text, length).to(torch.int32)
        usable = (matched >= self.min_ngram) & ((places < length) | ((places >= start) & (text >= 0)))
        best, found = torch.where(usable, matched * 4 * width + preference, -1).max(1, keepdim=True)
        drafts = torch.arange(history.num_drafts, device=text.device)
        copied = found + torch.where(found < start, drafts % (length - found).clamp(min=1), drafts)
        chain = text.gather(1, copied.clamp(max=width - 1)).to(torch.int64)
        return torch.where(best >= 0, chain, -1)

    def _matched(self, text: Tensor, length: Tensor) -> Tensor:
        """[B, T] int8: how many tokens in front of each place are the last ones of the history."""
        count, device = self.max_ngram, text.device
        ends = length - torch.arange(count, 0, -1, device=device)  # int64, as gather wants it
        ending = torch.where(ends >= 0, text.gather(1, ends.clamp(min=0)), -2)  # -2 is nowhere in a text
        in_front = pad(text, (count, 0), value=-1).unfold(1, count, 1)[:, : text.shape[1]]
        behind = torch.arange(count - 1, -1, -1, dtype=torch.int8, device=device)  # equal tokens, if this is the last that differs
        return torch.where(in_front == ending[:, None], count, behind).amin(2)
