"""Rows of the native host link: a matcher, and the structs through which C drives it."""

from __future__ import annotations

import math
from ctypes import addressof, byref
from typing import Any

import numpy as np
from torch import Tensor

from stepgraph.sampling.grammar.automaton.grammar import AutomatonMatcher
from stepgraph.sampling.grammar.link.layout import structs
from stepgraph.sampling.grammar.link.library import NativeLibrary
from stepgraph.sampling.grammar.link.llguidance_binding import CopiedMatcher
from stepgraph.sampling.grammar.matchers.forced import TokenTable
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher

NO_LIMIT = (1 << 63) - 1


class NativeRow:
    """One constrained request: a struct that host nodes access, and everything that the struct points to.

    A marker is handled in C around the library's own matcher.
    """

    def __init__(self, library: NativeLibrary, owner: int, matcher: Matcher, committed: int, masks_host: Tensor) -> None:
        self.owner, self.matcher = owner, matcher
        self._library = library
        self.struct = structs.matcher_row(owner=owner, committed=committed)
        if isinstance(matcher, MarkerMatcher):
            self._set_marker(matcher, masks_host)
            matcher = matcher.inner
        if isinstance(matcher, AutomatonMatcher):
            self._require_width(matcher.vocabulary, masks_host)
            self.struct.library, self.struct.matcher = addressof(matcher.functions), matcher.handle
            self.struct.grammar = matcher.grammar.number
            self.struct.fuel_seconds = math.inf  # a step is a look-up
        elif isinstance(matcher, XGrammarMatcher):
            self._set_vocabulary(matcher.vocabulary, matcher.fuel_seconds, masks_host)
            xgrammar = library.xgrammar
            self.struct.library, self.struct.matcher = addressof(xgrammar.struct), int(matcher.library_matcher._handle.__chandle__())
        elif isinstance(matcher, CopiedMatcher) and matcher.native_grammar is not None:
            self._set_vocabulary(matcher.vocabulary, matcher.fuel_seconds, masks_host)
            llguidance, stop_words = library.llguidance, self.struct.stop_words
            assert llguidance is not None
            self.struct.library = llguidance.address
            self.struct.matcher = llguidance.open_matcher(self, matcher.native_grammar, matcher.accepted_tokens, stop_words)
        else:
            raise ValueError(f"row.matcher: got {type(matcher).__name__}, expected one of a grammar library; the Python link drives others")

    def _set_marker(self, matcher: MarkerMatcher, masks_host: Tensor) -> None:
        """A rollback takes at most as many tokens as a round has drafts: the ring has one state more than that."""
        marker, vocabulary = matcher.marker, matcher.marker.vocabulary
        self._require_width(vocabulary, masks_host)
        self._states = np.full(len(masks_host), matcher.state, np.int32)
        arrays = {name: getattr(marker, name).ctypes.data for name in ("symbols", "fallback", "mask_index", "masks")}
        self._table = structs.marker_table(**arrays, num_tokens=len(vocabulary.tokens), complete=marker.complete)
        self._table.words, self._table.limit = vocabulary.mask_words, NO_LIMIT if marker.limit is None else marker.limit
        self._table.text_words = vocabulary.text_words.ctypes.data
        if marker.of_text:
            self._table.bytes, self._table.starts = (array.ctypes.data for array in vocabulary.joined)
        self.struct.marker = structs.marker_progress(table=addressof(self._table), states=self._states.ctypes.data, room=len(masks_host))
        self.struct.marker.num_free = matcher.num_free

    def _set_vocabulary(self, vocabulary: Vocabulary, fuel_seconds: float, masks_host: Tensor) -> None:
        self._require_width(vocabulary, masks_host)
        struct = self.struct
        self._words = vocabulary.text_words, vocabulary.stop_words, vocabulary.partial_words
        struct.text_words, struct.stop_words, struct.partial_words = (words.ctypes.data for words in self._words)
        struct.num_partial = len(vocabulary.partial_words)
        struct.num_tokens, struct.fuel_seconds = len(vocabulary.tokens), fuel_seconds

    def _require_width(self, vocabulary: Vocabulary, masks_host: Tensor) -> None:
        if vocabulary.mask_words != masks_host.shape[-1]:
            raise ValueError(f"row.matcher: got masks of {vocabulary.mask_words} words, expected {masks_host.shape[-1]}")

    @property
    def fault(self) -> str:
        text: bytes = self._library.quick.stepgraph_fault(byref(self.struct))
        return text.decode(errors="replace")


def token_struct(table: TokenTable) -> Any:
    """Borrows the arrays of the table."""
    arrays = {"text": table.bytes.ctypes.data, "starts": table.starts.ctypes.data, "slots": table.slots.ctypes.data}
    return structs.token_table(**arrays, num_tokens=table.num_tokens, num_slots=len(table.slots), merges=table.merges)
