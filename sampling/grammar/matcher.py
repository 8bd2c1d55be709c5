"""The state of one constrained text: takes tokens, takes them back, and says which may come next.

One thread per matcher, and one owner: whoever moves the token history moves the matcher with it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xgrammar
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class Matcher(Protocol):
    """All that a round asks of a grammar. The bool of `accept_token` must always be consumed."""

    def accept_token(self, token_id: int) -> bool: ...

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus: ...

    def rollback(self, num_tokens: int) -> None: ...

    def is_terminated(self) -> bool: ...

    def reset(self) -> None: ...


class XGrammarMatcher:
    """`accept_token` never raises; `fill_next_token_bitmask` fails closed: whatever goes wrong, the row is zero."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)  # takes back any number of tokens
        self._vocabulary = vocabulary
        self._text_words = vocabulary.text_words
        self._stop_words = vocabulary.stop_words
        self._unheard = vocabulary.silent_ids - set(vocabulary.stop_token_ids)
        self._num_accepted = 0
        self._faulted = False

    @property
    def num_accepted(self) -> int:
        """Tokens accepted and not taken back, a stop token included."""
        return self._num_accepted

    def accept_token(self, token_id: int) -> bool:
        """Take one token; False, and no change, where the grammar does not allow it here."""
        # The library truncates ids to 32 bits (2**32 + 5 would pass for 5) and logs every refusal of these kinds to stderr.
        if not 0 <= token_id < len(self._vocabulary.tokens) or token_id in self._unheard or self._faulted or self.is_terminated():
            return False
        try:
            accepted = bool(self._matcher.accept_token(token_id))
        except RuntimeError:
            self._faulted = True
            return False
        self._num_accepted += accepted
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        """Write row `index` of masks [rows, mask_words]: bit i of the row is set where token i may come next."""
        row = self._row(masks, index)
        if self._faulted or self.is_terminated():
            row.fill(0)
            return MaskStatus.FAULT if self._faulted else MaskStatus.TERMINATED
        try:
            self._matcher.fill_next_token_bitmask(masks, index)
        except RuntimeError:
            self._faulted = True
            row.fill(0)
            return MaskStatus.FAULT
        # The library also sets bits beyond the vocabulary in the last word.
        stops = row & self._stop_words
        row &= self._text_words
        status = MaskStatus.OK if row.any() else MaskStatus.COMPLETE if stops.any() else MaskStatus.DEAD_END
        row |= stops
        return status

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted, a stop token included."""
        if not 0 <= num_tokens <= self._num_accepted:
            raise ValueError(f"rollback.num_tokens: got {num_tokens}, want 0..{self._num_accepted}, the number of accepted tokens")
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._num_accepted -= num_tokens

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted. Asked of the library each time: a rollback may take the stop token back."""
        return bool(self._matcher.is_terminated())

    def reset(self) -> None:
        """Back to the start of the text."""
        self._matcher.reset()
        self._num_accepted = 0
        self._faulted = False

    def _row(self, masks: Tensor, index: int) -> npt.NDArray[np.int32]:
        words = self._vocabulary.mask_words
        if masks.dtype is not torch.int32 or masks.dim() != 2 or masks.shape[1] != words or masks.device.type != "cpu":
            raise ValueError(f"masks: got {masks.dtype} {tuple(masks.shape)} on {masks.device}, want torch.int32 [rows, {words}] on cpu")
        if not masks.is_contiguous() or not 0 <= index < masks.shape[0]:
            raise ValueError(f"index: got {index} for {masks.shape[0]} rows of stride {masks.stride()}, want a row of a contiguous tensor")
        row: npt.NDArray[np.int32] = masks[index].numpy()
        return row
