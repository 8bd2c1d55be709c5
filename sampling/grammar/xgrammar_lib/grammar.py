"""Compiles constraints with xgrammar."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xgrammar

from stepgraph.sampling.grammar.compile.limits import CompileAbortedError, GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.pattern import pattern_to_ebnf
from stepgraph.sampling.grammar.constraints.structural_tag import tag_groups
from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.ebnf import parsed_grammar
from stepgraph.sampling.grammar.xgrammar_lib.matcher import XGrammarMatcher
from stepgraph.sampling.grammar.xgrammar_lib.schema import check_schema

_CORE: Any = importlib.import_module("xgrammar.base")._core  # the bindings that the compile worker uses too
_SOURCE_PREFIX = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h|cpp):\d+: (Check failed: \(.*?\) is false: )?")


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


class XGrammarBuilder:
    """Builds grammars over one vocabulary; safe to call from any thread."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> None:
        self._vocabulary, self._limits, self._max_threads = vocabulary, limits, max_threads

    def check(self, constraint: Constraint) -> None:
        """ValueError, an UnsupportedError where the part is known, for what would not be enforced; without calling the library."""
        kind, payload = constraint.kind, constraint.payload
        if kind == "lark":
            reject("#", "lark", "is a notation of llguidance; xgrammar expects ebnf")
        elif kind == "regex":
            pattern_to_ebnf(payload, "pattern")
        elif kind == "json_schema":
            check_schema(json.loads(payload))
        elif kind == "structural_tag":
            for group in tag_groups(payload):
                for tag in group.tags:
                    check_schema(tag.schema)

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> XGrammar:
        """Compile in the worker, or in this process without one. ValueError as by `check`, or with the library's message."""
        self.check(constraint)
        try:
            compiled = self._compiled_here(constraint) if worker is None else self._compiled_by(worker, constraint)
        except (MemoryError, CompileAbortedError):
            raise
        except Exception as error:  # the library raises RuntimeError and several types of its own
            raise ValueError(_SOURCE_PREFIX.sub("", str(error)).strip()) from error
        return XGrammar(compiled, self._vocabulary, self._limits.step_seconds)

    def _compiled_here(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        kind, payload, limits = constraint.kind, constraint.payload, self._limits
        parsed = parsed_grammar(_CORE, kind, payload, constraint.any_whitespace, limits.least_bytes)
        grammar: Any = xgrammar.Grammar._create_from_handle(parsed)
        compiled: xgrammar.CompiledGrammar = self._compiler.compile_grammar(grammar)
        return compiled

    def _compiled_by(self, worker: CompileWorker, constraint: Constraint) -> xgrammar.CompiledGrammar:
        serialised = worker.call("xgrammar", constraint.kind, constraint.payload, "1" if constraint.any_whitespace else "")
        return xgrammar.CompiledGrammar.deserialize_json(serialised, self._vocabulary.tokenizer_info)

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        return xgrammar.GrammarCompiler(self._vocabulary.tokenizer_info, max_threads=self._max_threads, cache_enabled=False)
