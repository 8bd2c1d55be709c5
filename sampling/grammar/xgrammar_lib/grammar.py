"""Compiles constraints with xgrammar, and matches texts against its grammars."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker, library_errors
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.matchers.library import LibraryMatcher
from stepgraph.sampling.grammar.schema.patterns import takes_seconds
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.ebnf import ParsedGrammar, ebnf_text, parsed_grammar

if TYPE_CHECKING:
    import xgrammar  # the import takes a second, because xgrammar imports transformers, and automata do not need it here

MAX_PARSED_CHARS = 8_000  # characters of an EBNF grammar that `check` parses: at most about 50 ms


class XGrammarMatcher(LibraryMatcher):
    """The native host link uses the library's matcher too, without this object."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, fuel_seconds: float) -> None:
        import xgrammar

        super().__init__(xgrammar.GrammarMatcher(grammar), vocabulary, vocabulary.xgrammar_words, fuel_seconds)


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
