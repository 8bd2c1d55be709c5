"""The matcher of grammars that llguidance compiled. The library does not raise its errors, and keeps some of them for good."""

from __future__ import annotations

import time
from collections.abc import Callable

import llguidance
import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceNativeGrammar
from stepgraph.sampling.grammar.matchers.protocol import checked_row, classify
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary

LEXER_FULL = "too many states"


class SharedStart:
    """A matcher at the start of a text, to be copied. The copies share its lexer, which stores the states that any of them reaches. A
    copy that finds the lexer full renews it, and later copies use the new one."""

    def __init__(self, make: Callable[[], llguidance.LLMatcher]) -> None:
        self._make, self.matcher = make, make()

    def renew(self) -> llguidance.LLMatcher:
        self.matcher = self._make()
        return self.matcher


class LLGuidanceMatcher:
    """`accept_token` never raises; `fill_next_token_bitmask` fails closed: after any failure the row is zero.

    Stop tokens are not passed to the library, whose rollback miscounts them. The shared start is copied, never advanced.
    """

    def __init__(
        self,
        start: SharedStart,
        vocabulary: Vocabulary,
        fuel_seconds: float,
        native_grammar: LLGuidanceNativeGrammar | None = None,
    ) -> None:
        self._start, self._pristine = start, start.matcher
        self._native_grammar = native_grammar
        self._matcher = self._pristine.deep_copy()
        self._vocabulary = vocabulary
        self._fuel_seconds = fuel_seconds
        self._stop_ids = frozenset(vocabulary.stop_token_ids)
        self._scratch: npt.NDArray[np.int32] = np.zeros(vocabulary.mask_words, dtype=np.int32)
        self._history = list[int]()  # text tokens that the library has accepted
        self._filled = 0  # its length when a mask was last computed
        self._ended = False
        self._dead_end = False
        self._fault = ""

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def fuel_seconds(self) -> float:
        return self._fuel_seconds

    @property
    def native_grammar(self) -> LLGuidanceNativeGrammar | None:
        """The same grammar for the native host link. This matcher does not see tokens accepted through it."""
        return self._native_grammar

    @property
    def accepted_tokens(self) -> tuple[int, ...]:
        """Tokens accepted and not rolled back. The first stop token represents whichever was accepted."""
        return (*self._history, *self._vocabulary.stop_token_ids[: self._ended])

    @property
    def num_accepted(self) -> int:
        """Tokens accepted and not rolled back, a stop token included."""
        return len(self._history) + self._ended

    @property
    def fault(self) -> str:
        """Why this matcher can no longer be used; empty while it works."""
        return self._fault

    def accept_token(self, token_id: int) -> bool:
        """Append one token; False, and no change, where the grammar does not allow it."""
        vocabulary = self._vocabulary
        if not 0 <= token_id < len(vocabulary.tokens) or self._ended or self._dead_end or self._fault:
            return False
        if token_id in self._stop_ids:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        if token_id in vocabulary.non_text_ids:
            return False
        start = time.thread_time()
        accepted = self._consumed(token_id)
        if not accepted and self._renewed_lexer(token_id):
            accepted = self._consumed(token_id)
        if accepted:
            self._history.append(token_id)
        self._burn(start, "accept_token")
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        """Write row `index` of masks [rows, mask_words]: bit i of the row is set where token i may come next."""
        row = checked_row(masks, index, self._vocabulary.mask_words)
        row.fill(0)
        if self._fault:
            return MaskStatus.FAULT
        if self._ended:
            return MaskStatus.TERMINATED
        if not self._dead_end:
            start = time.thread_time()
            self._compute(row)
            self._burn(start, "fill_next_token_bitmask")
        if self._fault or self._dead_end:
            row.fill(0)  # an error leaves the stop tokens' bits set
            return MaskStatus.FAULT if self._fault else MaskStatus.DEAD_END
        return classify(row, self._vocabulary)

    def rollback(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` accepted tokens, a stop token included."""
        if not 0 <= num_tokens <= self.num_accepted:
            raise ValueError(f"rollback.num_tokens: got {num_tokens}, expected 0..{self.num_accepted}, the number of accepted tokens")
        count = num_tokens - self._ended if num_tokens else 0
        self._ended = self._ended and num_tokens == 0
        if count == 0 or self._fault:
            return
        del self._history[len(self._history) - count :]
        if self._dead_end:
            self._restart()
            return
        start = time.thread_time()
        self._matcher.rollback(count)
        if not self._renewed_lexer() and len(self._history) < self._filled:
            # The library caches its latest mask by the number of items and the lexer state, which another path may reach with other
            # items. Only a mask computed here, where the paths diverge, replaces the cached one.
            self._compute(self._scratch)
        self._burn(start, "rollback")

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted and not rolled back."""
        return self._ended

    def _compute(self, row: npt.NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._renewed_lexer():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._filled = len(self._history)
        # The library reports a dead end as a permanent error; here it only ends one draft.
        self._dead_end = self._matcher.is_error() and self._matcher.get_error().startswith("NoExtensionBias")

    def _consumed(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def _renewed_lexer(self, rejected: int = -1) -> bool:
        """Whether the lexer was full and a new one has accepted the text so far. A text that still fails exceeds the limit by itself.

        A full lexer rejects tokens without an error. Only a copy that must consume the rejected token reports one.
        """
        probe = self._matcher
        if rejected >= 0 and not probe.is_error():
            probe = probe.deep_copy()
            probe.consume_token(rejected)
        if not probe.is_error() or LEXER_FULL not in probe.get_error():
            return False
        self._pristine = self._start.renew()
        self._restart()
        return not self._fault

    def _restart(self) -> None:
        self._matcher, self._dead_end, self._filled = self._pristine.deep_copy(), False, 0
        if self._matcher.try_consume_tokens(self._history) != len(self._history):
            self._fault = "rollback: the accepted tokens are not accepted again"

    def _burn(self, start: float, call: str) -> None:
        seconds = time.thread_time() - start
        if self._matcher.is_error() and not self._dead_end:
            self._fault = f"{call}: {self._matcher.get_error().splitlines()[0]}"
        elif seconds > self._fuel_seconds:
            self._fault = f"one step of the grammar took {seconds:.3f} s, more than the {self._fuel_seconds:g} s that it may take"
