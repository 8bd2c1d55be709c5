"""Compiles constraints with llguidance, and matches texts against its grammars. Imported only where it is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict

import llguidance
import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceNativeGrammar, LLGuidanceTokenizer, llguidance_api
from stepgraph.sampling.grammar.llguidance_lib.lark import checked_lark, lark_text
from stepgraph.sampling.grammar.llguidance_lib.library import LLGuidance, library_limits
from stepgraph.sampling.grammar.matchers.library import LibraryMatcher
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.patterns import takes_seconds
from stepgraph.sampling.grammar.schema.reader import check_schema
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.native import Unavailable

# The library does not report the memory of a grammar. Measured, with the copy for host nodes: 60 kB to 0.7 MB, within a factor of two
# of this. The states that a lexer adds while masks are computed are not included; `GrammarLimits.lexer_states` bounds them.
BYTES_PER_GRAMMAR, BYTES_PER_CHAR = 60_000, 120

_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")  # line and column in the grammar
_NOISE = re.compile(rf"^{_POSITION.pattern}(failed to compile JSON schema: )?|\n *\d+ \| .*|<(non-verbose|state).*", re.DOTALL)
LEXER_FULL = "too many states"


class LLGuidanceText:
    """The library's matcher with the methods of xgrammar's, which raise its errors.

    Stop tokens are not passed to the library, whose rollback miscounts them. The shared start matcher is copied, never advanced.
    """

    def __init__(self, grammar: LLGuidanceGrammar) -> None:
        self._grammar, self._start_matcher = grammar, grammar.start
        self._matcher = self._start_matcher.deep_copy()
        self.native_grammar = grammar.native  # for the native host link, whose accepted tokens do not change this matcher
        self._stop_token_ids = grammar.vocabulary.stop_token_ids
        self._scratch: npt.NDArray[np.int32] = np.zeros(grammar.vocabulary.mask_words, dtype=np.int32)
        self._history = list[int]()  # text tokens that the library has accepted
        self._mask_position = 0  # length of the history when a mask was last computed
        self._ended = self._dead_end = False

    @property
    def accepted_tokens(self) -> tuple[int, ...]:
        """Tokens accepted and not rolled back. Any accepted stop token is reported as the first stop token of the vocabulary."""
        return (*self._history, *self._stop_token_ids[: self._ended])

    def is_terminated(self) -> bool:
        return self._ended

    def accept_token(self, token_id: int) -> bool:
        if self._dead_end:
            return False
        if token_id in self._stop_token_ids:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        accepted = self._consume(token_id)
        if not accepted and self._replaced_full_lexer(token_id):
            accepted = self._consume(token_id)
        if accepted:
            self._history.append(token_id)
        self._raise_error()
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> None:
        row = self._grammar.vocabulary.mask_row(masks, index)
        if not self._dead_end:
            self._compute(row)
        if self._dead_end:
            row.fill(0)  # after an error the library leaves the bits of stop tokens set
        self._raise_error()

    def rollback(self, num_tokens: int) -> None:
        count = num_tokens - self._ended
        self._ended = False
        del self._history[len(self._history) - count :]
        if count and self._dead_end:
            self._restart()
        elif count:
            self._matcher.rollback(count)
            if not self._replaced_full_lexer() and len(self._history) < self._mask_position:
                # The library caches its latest mask by the number of items and the lexer state. Another path may reach the same pair with
                # other items. Computing a mask here, where the paths diverge, replaces the cached one.
                self._compute(self._scratch)
            self._raise_error()

    def find_jump_forward_string(self) -> str:
        """None is known: the library reports forced text only as tokens of its own tokenizer."""
        return ""

    def _compute(self, row: npt.NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._replaced_full_lexer():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._mask_position = len(self._history)
        # The library reports a dead end as a permanent error; here it only ends one draft.
        self._dead_end = self._matcher.is_error() and self._matcher.get_error().startswith("NoExtensionBias")

    def _consume(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def _replaced_full_lexer(self, rejected: int = -1) -> bool:
        """Whether the lexer was full and a new lexer has accepted the text so far. A text that still fails exceeds the limit by itself.

        A full lexer rejects tokens without an error. Only a copy that must consume the rejected token reports one.
        """
        probe = self._matcher
        if rejected >= 0 and not probe.is_error():
            probe = probe.deep_copy()
            probe.consume_token(rejected)
        if not probe.is_error() or LEXER_FULL not in probe.get_error():
            return False
        self._start_matcher = self._grammar.start = self._grammar.new_matcher()
        self._restart()
        return True

    def _restart(self) -> None:
        self._matcher, self._dead_end, self._mask_position = self._start_matcher.deep_copy(), False, 0
        if self._matcher.try_consume_tokens(self._history) != len(self._history):
            raise RuntimeError("the accepted tokens are not accepted again")

    def _raise_error(self) -> None:
        if self._matcher.is_error() and not self._dead_end:
            raise RuntimeError(self._matcher.get_error().splitlines()[0])


class LLGuidanceMatcher(LibraryMatcher):
    def __init__(self, grammar: LLGuidanceGrammar) -> None:
        super().__init__(LLGuidanceText(grammar), grammar.vocabulary, grammar.vocabulary.text_words, grammar.fuel_seconds)


class LLGuidanceGrammar:
    """A compiled grammar: a matcher at the start of a text, copied by each matcher.

    The copies share a lexer, which stores the states that any of them reaches. If the lexer is full, a copy replaces the start matcher,
    and later copies use the new one.
    """

    def __init__(self, new_matcher: Callable[[], llguidance.LLMatcher], vocabulary: Vocabulary, fuel_seconds: float) -> None:
        self.new_matcher, self.start = new_matcher, new_matcher()
        self.vocabulary, self.fuel_seconds = vocabulary, fuel_seconds
        self.nbytes = 0
        self.native: LLGuidanceNativeGrammar | None = None  # None if the library cannot be called from C

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self)


class LLGuidanceBuilder:
    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._fuel = library_limits(asdict(limits))
        self._library = LLGuidance(vocabulary.for_llguidance, vocabulary.stop_token_ids, sorted(vocabulary.non_text_ids), self._fuel)
        try:
            api = llguidance_api()
        except Unavailable:  # then the Python host link is used, which reports the reason
            api = None
        self._native = LLGuidanceTokenizer(api, vocabulary) if api else None

    def check(self, constraint: Constraint) -> None:
        """ValueError for what would not be enforced, an UnsupportedError if the part is known; does not call the library."""
        if constraint.kind == "lark":
            for schema in checked_lark(constraint.payload)[1]:
                check_schema(schema, Options())
        elif constraint.kind == "ebnf" or (constraint.kind == "regex" and not takes_seconds(constraint.payload)):
            lark_text(constraint.kind, constraint.payload, constraint.schema_options)

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> LLGuidanceGrammar:
        """Compile in the worker as a trial, then here: the library's grammars cannot be sent between processes."""
        kind, payload, options = constraint.kind, constraint.payload, constraint.schema_options
        grammar = worker.call("lark", kind, payload, asdict(options)).decode() if worker else lark_text(kind, payload, options)
        compiled = LLGuidanceGrammar(lambda: self._library.matcher(grammar), self._vocabulary, self._limits.step_seconds)
        if compiled.start.is_error():
            error = compiled.start.get_error()
            reason = _NOISE.sub("", error).strip()
            if kind != "lark":  # the grammar is not the user's
                reject("#", kind, reason.splitlines()[0])
            at = _POSITION.match(error)
            got = f"got {clip_repr(grammar.split(chr(10))[int(at[1]) - 1])} at column {at[2]}: " if at else ""
            reject("#", kind, got + reason)
        compiled.nbytes = BYTES_PER_GRAMMAR + BYTES_PER_CHAR * len(grammar)
        compiled.native = LLGuidanceNativeGrammar(self._native, grammar, self._fuel) if self._native else None
        return compiled
