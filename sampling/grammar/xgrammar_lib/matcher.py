"""The matcher of grammars that xgrammar compiled."""

from __future__ import annotations

import time

import xgrammar
from torch import Tensor

from stepgraph.sampling.grammar.matchers.protocol import checked_row, classify
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class XGrammarMatcher:
    """`accept_token` never raises; `fill_next_token_bitmask` fails closed: after any failure the row is zero.

    `fuel_seconds` is the processor time that one call may take. Some patterns cost more with every token ("(a+a+)+b"); a call
    that takes longer is the matcher's last one, so that the grammar of one request does not delay the rounds of the others.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, fuel_seconds: float) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)  # without a limit on the number of tokens to roll back
        self._vocabulary = vocabulary
        self._fuel_seconds = fuel_seconds
        self._hidden_ids = (vocabulary.non_text_ids | vocabulary.xgrammar_unsafe_ids) - set(vocabulary.stop_token_ids)
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
        """The library's own object, for the native host link. This matcher does not see tokens accepted through it."""
        return self._matcher

    @property
    def num_accepted(self) -> int:
        """Tokens accepted and not rolled back, a stop token included."""
        return self._num_accepted

    @property
    def fault(self) -> str:
        """Why this matcher can no longer be used; empty while it works."""
        return self._fault

    def accept_token(self, token_id: int) -> bool:
        """Append one token; False, and no change, where the grammar does not allow it."""
        # The library truncates ids to 32 bits (2**32 + 5 is read as 5) and logs each rejected id of these kinds to stderr.
        if not 0 <= token_id < len(self._vocabulary.tokens) or token_id in self._hidden_ids or self._fault or self.is_terminated():
            return False
        start = time.thread_time()
        try:
            accepted = bool(self._matcher.accept_token(token_id))
        except Exception as error:  # any library error ends this request only
            self._fault = f"accept_token: {error}"
            return False
        self._num_accepted += accepted
        self._burn(start)
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        """Write row `index` of masks [rows, mask_words]: bit i of the row is set where token i may come next."""
        row = checked_row(masks, index, self._vocabulary.mask_words)
        if not self._fault and self.is_terminated():
            row.fill(0)
            return MaskStatus.TERMINATED
        if not self._fault:
            start = time.thread_time()
            try:
                self._matcher.fill_next_token_bitmask(masks, index)
                self._burn(start)
            except Exception as error:  # any library error ends this request only
                self._fault = f"fill_next_token_bitmask: {error}"
        if self._fault:
            row.fill(0)
            return MaskStatus.FAULT
        return classify(row, self._vocabulary)  # the library also sets bits beyond the vocabulary in the last word

    def rollback(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` accepted tokens, a stop token included."""
        if not 0 <= num_tokens <= self._num_accepted:
            raise ValueError(f"rollback.num_tokens: got {num_tokens}, expected 0..{self._num_accepted}, the number of accepted tokens")
        if num_tokens:
            start = time.thread_time()
            self._matcher.rollback(num_tokens)
            self._num_accepted -= num_tokens
            self._burn(start)

    def forced_bytes(self) -> bytes:
        """The bytes that must come next; the last character may be incomplete."""
        if self._fault or self.is_terminated():
            return b""
        start = time.thread_time()
        try:
            found: bytes = self._matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # the library returns bytes that need not be UTF-8
            found = bytes(error.object)
        except Exception as error:  # any library error ends this request only
            self._fault = f"find_jump_forward_string: {error}"
            return b""
        self._burn(start)
        return b"" if self._fault else found

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted and not rolled back."""
        return bool(self._matcher.is_terminated())

    def _burn(self, start: float) -> None:
        seconds = time.thread_time() - start
        if seconds > self._fuel_seconds:
            self._fault = f"one step of the grammar took {seconds:.3f} s, more than the {self._fuel_seconds:g} s that it may take"
