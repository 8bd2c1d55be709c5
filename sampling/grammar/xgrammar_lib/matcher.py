"""The state of one constrained text: takes tokens, takes them back, and says which may come next.

One thread per matcher, and one owner: whoever moves the token history moves the matcher with it.
"""

from __future__ import annotations

import time
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

    @property
    def fault(self) -> str:
        """Why the matcher is of no further use; empty while it works."""


class XGrammarMatcher:
    """`accept_token` never raises; `fill_next_token_bitmask` fails closed: whatever goes wrong, the row is zero.

    `fuel_seconds` is the processor time that one call may take. Some patterns cost more with every token ("(a+a+)+b"); a
    call that took longer is the last one, so that one request's grammar does not hold up the others' rounds.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, fuel_seconds: float) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)  # takes back any number of tokens
        self._vocabulary = vocabulary
        self._fuel_seconds = fuel_seconds
        self._text_words = vocabulary.text_words
        self._stop_words = vocabulary.stop_words
        self._unheard = (vocabulary.non_text_ids | vocabulary.xgrammar_unsafe_ids) - set(vocabulary.stop_token_ids)
        self._num_accepted = 0
        self._fault = ""

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def fuel_seconds(self) -> float:
        return self._fuel_seconds

    @property
    def library_matcher(self) -> xgrammar.GrammarMatcher:
        """The library's own object, for who drives it without Python; this one then knows nothing of what it has accepted."""
        return self._matcher

    @property
    def num_accepted(self) -> int:
        """Tokens accepted and not taken back, a stop token included."""
        return self._num_accepted

    @property
    def fault(self) -> str:
        """Why this matcher is of no further use; empty while it works."""
        return self._fault

    def accept_token(self, token_id: int) -> bool:
        """Take one token; False, and no change, where the grammar does not allow it here."""
        # The library truncates ids to 32 bits (2**32 + 5 would pass for 5) and logs every refusal of these kinds to stderr.
        if not 0 <= token_id < len(self._vocabulary.tokens) or token_id in self._unheard or self._fault or self.is_terminated():
            return False
        start = time.thread_time()
        try:
            accepted = bool(self._matcher.accept_token(token_id))
        except Exception as error:  # whatever the library raises is this request's fault
            self._fault = f"accept_token: {error}"
            return False
        self._num_accepted += accepted
        self._burn(start)
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        """Write row `index` of masks [rows, mask_words]: bit i of the row is set where token i may come next."""
        row = self._row(masks, index)
        if not self._fault and self.is_terminated():
            row.fill(0)
            return MaskStatus.TERMINATED
        if not self._fault:
            start = time.thread_time()
            try:
                self._matcher.fill_next_token_bitmask(masks, index)
                self._burn(start)
            except Exception as error:  # whatever the library raises is this request's fault
                self._fault = f"fill_next_token_bitmask: {error}"
        if self._fault:
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
            start = time.thread_time()
            self._matcher.rollback(num_tokens)
            self._num_accepted -= num_tokens
            self._burn(start)

    def forced_bytes(self) -> bytes:
        """The bytes that must come next. Cut anywhere: the last character may be missing some of its own."""
        if self._fault or self.is_terminated():
            return b""
        start = time.thread_time()
        try:
            found: bytes = self._matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # the library's text is bytes
            found = bytes(error.object)
        except Exception as error:  # whatever the library raises is this request's fault
            self._fault = f"find_jump_forward_string: {error}"
            return b""
        self._burn(start)
        return b"" if self._fault else found

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted. Asked of the library each time: a rollback may take the stop token back."""
        return bool(self._matcher.is_terminated())

    def reset(self) -> None:
        """Back to the start of the text."""
        self._matcher.reset()
        self._num_accepted = 0
        self._fault = ""

    def _burn(self, start: float) -> None:
        seconds = time.thread_time() - start
        if seconds > self._fuel_seconds:
            self._fault = f"one step of the grammar took {seconds:.3f} s, more than the {self._fuel_seconds:g} s that it may take"

    def _row(self, masks: Tensor, index: int) -> npt.NDArray[np.int32]:
        words = self._vocabulary.mask_words
        if masks.dtype is not torch.int32 or masks.dim() != 2 or masks.shape[1] != words or masks.device.type != "cpu":
            raise ValueError(f"masks: got {masks.dtype} {tuple(masks.shape)} on {masks.device}, want torch.int32 [rows, {words}] on cpu")
        if not masks.is_contiguous() or not 0 <= index < masks.shape[0]:
            raise ValueError(f"index: got {index} for {masks.shape[0]} rows of stride {masks.stride()}, want a row of a contiguous tensor")
        row: npt.NDArray[np.int32] = masks[index].numpy()
        return row
