"""Compiles constraints with xgrammar, and matches texts against its grammars."""

from __future__ import annotations

import importlib
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker, library_errors, without_source
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.schema.patterns import takes_seconds
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.ebnf import ParsedGrammar, ebnf_text, parsed_grammar

if TYPE_CHECKING:
    import xgrammar  # the import takes a second, because xgrammar imports transformers, and automata do not need it here

MAX_PARSED_CHARS = 8_000  # characters of an EBNF grammar that `check` parses: at most about 50 ms


class XGrammarMatcher:
    """`accept_token` never raises; `fill_next_token_bitmask` fails closed: after any failure the row is zero.

    `fuel_seconds` is the processor time that one call may take. Some patterns cost more with every token ("(a+a+)+b"); a call
    that takes longer is the last call of the matcher, so that the grammar of one request does not delay the rounds of others.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, fuel_seconds: float) -> None:
        # The number of tokens to roll back is unlimited. The native host link uses the library's matcher too, without this object.
        import xgrammar

        self.library_matcher = xgrammar.GrammarMatcher(grammar)
        self.vocabulary, self.fuel_seconds = vocabulary, fuel_seconds
        self.num_accepted = 0  # tokens accepted and not rolled back, including a stop token
        self.fault = ""  # why this matcher can no longer be used; empty while it works
        self._hidden_ids = (vocabulary.non_text_ids | vocabulary.xgrammar_unsafe_ids) - set(vocabulary.stop_token_ids)

    def accept_token(self, token_id: int) -> bool:
        # Ids are checked here: the library truncates them to 32 bits (2**32 + 5 is read as 5) and logs invalid ids to stderr.
        if not 0 <= token_id < len(self.vocabulary.tokens) or token_id in self._hidden_ids or self.fault or self.is_terminated():
            return False
        accepted = bool(self._call_library("accept_token", token_id))
        self.num_accepted += accepted
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        row = self.vocabulary.mask_row(masks, index)
        if not self.fault and self.is_terminated():
            row.fill(0)
            return MaskStatus.TERMINATED
        if not self.fault:
            self._call_library("fill_next_token_bitmask", masks, index)
        if self.fault:
            row.fill(0)
            return MaskStatus.FAULT
        return self.vocabulary.classify(row)  # the library also sets bits beyond the vocabulary in the last word

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self.num_accepted
        if num_tokens:
            self._call_library("rollback", num_tokens)
            self.num_accepted -= num_tokens

    def forced_bytes(self) -> bytes:
        found: str | bytes | None = None if self.fault or self.is_terminated() else self._call_library("find_jump_forward_string")
        return b"" if self.fault or found is None else found.encode() if isinstance(found, str) else found

    def is_terminated(self) -> bool:
        return bool(self.library_matcher.is_terminated())

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


@dataclass(frozen=True, eq=False)
class XGrammar:
    """A compiled grammar, shared by its matchers."""

    grammar: xgrammar.CompiledGrammar
    vocabulary: Vocabulary
    fuel_seconds: float

    @property
    def nbytes(self) -> int:
        return int(self.grammar.memory_size_bytes)

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.grammar, self.vocabulary, self.fuel_seconds)


def parse(constraint: Constraint, limits: GrammarLimits) -> ParsedGrammar:
    """The grammar of a checked constraint, parsed in this process."""
    bindings: Any = importlib.import_module("xgrammar").base._core  # as in the worker. Its lock first, as in imports of other threads
    return parsed_grammar(bindings, constraint.kind, constraint.payload, constraint.schema_options, limits.least_bytes)


def check_payload(constraint: Constraint, limits: GrammarLimits) -> None:
    """ValueError for a notation of another library, a malformed pattern, and a malformed grammar of at most MAX_PARSED_CHARS characters."""
    kind, payload = constraint.kind, constraint.payload
    if kind == "lark" or (kind == "regex" and not takes_seconds(payload)):
        ebnf_text(None, kind, payload, constraint.schema_options)
    elif kind == "ebnf" and len(payload) <= MAX_PARSED_CHARS:
        with library_errors():
            parse(constraint, limits)


class XGrammarBuilder:
    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> None:
        self._vocabulary, self._limits, self._max_threads = vocabulary, limits, max_threads

    def check(self, constraint: Constraint) -> None:
        check_payload(constraint, self._limits)

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> XGrammar:
        with library_errors():
            kind, payload, options = constraint.kind, constraint.payload, constraint.schema_options
            found: Any = worker.call("xgrammar", kind, payload, asdict(options)) if worker else parse(constraint, self._limits).grammar
            import xgrammar  # an error above does not need it

            if worker is None:
                grammar: Any = xgrammar.Grammar._create_from_handle(found)
                compiled: xgrammar.CompiledGrammar = self._compiler.compile_grammar(grammar)
            else:
                compiled = xgrammar.CompiledGrammar.deserialize_json(found.decode(), self._vocabulary.tokenizer_info)
        return XGrammar(compiled, self._vocabulary, self._limits.step_seconds)

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        return xgrammar.GrammarCompiler(self._vocabulary.tokenizer_info, max_threads=self._max_threads, cache_enabled=False)
