"""Matchers of the grammar libraries: what holds for both. `matcher.c` has the same rules for host nodes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.compile.worker_process import without_source
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary, allows


class LibraryMatcher:
    """`accept_token` never raises; `fill_next_token_bitmask` fails closed: after any failure the row is zero.

    library_matcher: an object with the methods of xgrammar's matcher. text_words: one bit per id that may be passed to it, as stop tokens.
    `fuel_seconds` is the processor time that one call may take. Some patterns cost more with every token ("(a+a+)+b"); a call
    that takes longer is the last call of the matcher, so that the grammar of one request does not delay the rounds of others.
    """

    def __init__(self, library_matcher: Any, vocabulary: Vocabulary, text_words: npt.NDArray[np.int32], fuel_seconds: float) -> None:
        self.library_matcher, self.vocabulary, self.fuel_seconds = library_matcher, vocabulary, fuel_seconds
        self.text_words, self._valid_words = text_words, text_words | vocabulary.stop_words
        self.fault = ""  # why this matcher can no longer be used; empty while it works

    def accept_token(self, token_id: int) -> bool:
        # Ids are checked here: xgrammar truncates them to 32 bits (2**32 + 5 is read as 5) and logs invalid ids to stderr.
        if not allows(self._valid_words, token_id) or self.fault or self.library_matcher.is_terminated():
            return False
        return bool(self._call_library("accept_token", token_id))

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        row, ended = self.vocabulary.mask_row(masks, index), not self.fault and self.library_matcher.is_terminated()
        if not self.fault and not ended:
            self._call_library("fill_next_token_bitmask", masks, index)
        if self.fault or ended:
            row.fill(0)
            return MaskStatus.FAULT if self.fault else MaskStatus.TERMINATED
        return self.vocabulary.classify(row)  # xgrammar also sets bits beyond the vocabulary in the last word

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self.fault:
            self._call_library("rollback", num_tokens)

    def forced_bytes(self) -> bytes:
        if self.fault or self.library_matcher.is_terminated():
            return b""
        found: str | bytes = self._call_library("find_jump_forward_string")
        return b"" if self.fault else found.encode() if isinstance(found, str) else found

    def _call_library(self, name: str, *arguments: Any) -> Any:
        """The result of a call of the library. If it raises an error: None, and a fault, which ends only this request."""
        start = time.thread_time()
        try:
            result = getattr(self.library_matcher, name)(*arguments)
        except UnicodeDecodeError as error:  # the forced text need not be UTF-8
            result = bytes(error.object)
        except Exception as error:
            self.fault = f"{name}: {without_source(str(error))}"
            return None
        seconds = time.thread_time() - start
        if seconds > self.fuel_seconds:
            self.fault = f"one step of the grammar took {seconds:.3f} s, more than the {self.fuel_seconds:g} s that it may take"
        return result
