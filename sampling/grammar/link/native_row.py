"""A request as the native link knows it: a struct that points to its matcher, and all that has to live as long as the struct does.

What stands around a library's own matcher, a marker in front of it or a check of its masks, the row does in C as well.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from ctypes import addressof, c_uint32
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.link.callbacks import PythonLibrary
from stepgraph.sampling.grammar.link.layout import CheckedStruct, MarkerStruct, MarkerTextStruct, RowStruct
from stepgraph.sampling.grammar.link.library import NativeLibrary
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceNativeGrammar, LLGuidanceStart
from stepgraph.sampling.grammar.matchers.checked import CheckedMatcher
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.matcher import Matcher, XGrammarMatcher

_mixed: weakref.WeakKeyDictionary[Vocabulary, npt.NDArray[np.int32]] = weakref.WeakKeyDictionary()  # words with ids that are no text


@runtime_checkable
class Copied(Protocol):
    """llguidance's matcher, which shows no pointer to its inside: a row goes on with a copy. Its module may not be installed."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def fuel_seconds(self) -> float: ...

    @property
    def native_grammar(self) -> LLGuidanceNativeGrammar | None: ...

    @property
    def accepted_tokens(self) -> tuple[int, ...]: ...


class NativeRow:
    """One constrained request. The struct belongs to the host nodes; what is read of it here is for tests and messages."""

    def __init__(self, library: NativeLibrary, owner: int, matcher: Matcher, committed: int, masks_host: Tensor) -> None:
        self.owner, self.matcher = owner, matcher
        self._library = library
        self.struct = RowStruct(owner=owner, committed=committed)
        if isinstance(matcher, CheckedMatcher):
            self._check(matcher, masks_host)
            matcher = matcher.inner
        if isinstance(matcher, MarkerMatcher):
            self._mark(matcher, masks_host)
            matcher = matcher.inner
        if isinstance(matcher, XGrammarMatcher):
            self._know(matcher.vocabulary, matcher.fuel_seconds, masks_host)
            xgrammar = library.xgrammar
            self.struct.library, self.struct.matcher = xgrammar.address, xgrammar.handle_of(matcher.library_matcher)
        elif isinstance(matcher, Copied) and matcher.native_grammar is not None:
            self._know(matcher.vocabulary, matcher.fuel_seconds, masks_host)
            self._open_llguidance(matcher.native_grammar, matcher.accepted_tokens)
        else:
            self._callbacks = PythonLibrary(matcher, masks_host)
            self.struct.library, self.struct.fuel_seconds = self._callbacks.address, math.inf  # it keeps account of its fuel

    def _check(self, matcher: CheckedMatcher, masks_host: Tensor) -> None:
        """Of the masks in front of the row's first round the latest one counts: nothing there is ever taken back."""
        stages, _, words = masks_host.shape
        masks, places = np.zeros((stages, words), np.int32), np.full(stages, -1, np.int64)
        latest, kept = matcher.latest_row, matcher.num_accepted % stages
        if latest is not None:
            masks[kept], places[kept] = latest, matcher.num_accepted
        self._checked, self._backend = (masks, places), matcher.backend.encode()
        self.struct.checked = CheckedStruct(
            backend=self._backend,
            masks=masks.ctypes.data,
            places=places.ctypes.data,
            room=stages,
            words=words,
            accepted=matcher.num_accepted,
        )

    def _mark(self, matcher: MarkerMatcher, masks_host: Tensor) -> None:
        """A round takes back as many tokens as it has drafts at most: a state for each, and for the one that they came behind."""
        marker, vocabulary = matcher.marker, matcher.marker.vocabulary
        self._require_width(vocabulary, masks_host)
        self._states = np.full(len(masks_host), matcher.state, np.int32)
        arrays = {name: getattr(marker, name).ctypes.data for name in ("symbols", "shorter", "rows", "masks")}
        self._table = MarkerStruct(**arrays, num_tokens=len(vocabulary.tokens), complete=marker.complete)
        self._table.text_words = vocabulary.text_words.ctypes.data
        if marker.of_text:
            self._table.bytes, self._table.starts = (array.ctypes.data for array in vocabulary.joined)
        self.struct.marker = MarkerTextStruct(table=addressof(self._table), states=self._states.ctypes.data, room=len(masks_host))

    def _know(self, vocabulary: Vocabulary, fuel_seconds: float, masks_host: Tensor) -> None:
        """What the row itself sees to, whatever the library."""
        self._require_width(vocabulary, masks_host)
        struct = self.struct
        if vocabulary not in _mixed:
            _mixed[vocabulary] = np.flatnonzero(vocabulary.text_words != -1).astype(np.int32)
        self._words = vocabulary.text_words, vocabulary.stop_words, _mixed[vocabulary]
        struct.text_words, struct.stop_words, struct.mixed = (words.ctypes.data for words in self._words)
        struct.num_mixed = len(_mixed[vocabulary])
        struct.num_tokens, struct.fuel_seconds = len(vocabulary.tokens), fuel_seconds

    def _open_llguidance(self, grammar: LLGuidanceNativeGrammar, tokens: Sequence[int]) -> None:
        library, start, functions = self._library, grammar.start, self._library.llguidance.address
        taken = (c_uint32 * len(tokens))(*tokens)
        starts, stop_words = (start.address, grammar.cold.address), self.struct.stop_words
        text = library.waiting.stepgraph_open_llguidance(functions, *starts, stop_words, taken, len(tokens))
        if not text:
            raise MemoryError("NativeRow: no memory for its text")
        weakref.finalize(self, _close_llguidance, library, grammar, start, text).atexit = False
        self.struct.library, self.struct.matcher = functions, text

    def _require_width(self, vocabulary: Vocabulary, masks_host: Tensor) -> None:
        if vocabulary.mask_words != masks_host.shape[-1]:
            raise ValueError(f"row.matcher: got masks of {vocabulary.mask_words} words, want {masks_host.shape[-1]}")

    @property
    def fault(self) -> str:
        return self._library.fault(self.struct)

    @property
    def committed(self) -> int:
        return int(self.struct.committed)

    @property
    def pending_drafts(self) -> int:
        return int(self.struct.pending_drafts)

    @property
    def last_mask_status(self) -> MaskStatus:
        return MaskStatus(self.struct.last_mask_status)

    @property
    def fills(self) -> int:
        return int(self.struct.fills)


def _close_llguidance(library: NativeLibrary, grammar: LLGuidanceNativeGrammar, start: LLGuidanceStart, text: int) -> None:
    """`start`, and the grammar's cold one, are what the text would begin again with: there until now."""
    kept = library.waiting.stepgraph_close_llguidance(library.llguidance.address, text, grammar.learns)
    if kept:
        grammar.learn(kept)
