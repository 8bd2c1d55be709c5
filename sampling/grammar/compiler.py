"""From a constraint to a grammar over one vocabulary, once per constraint.

Compiling takes from microseconds to seconds: call it from a thread that may wait, never from the decoding loop.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import xgrammar

from stepgraph.sampling.grammar.constraint import Constraint
from stepgraph.sampling.grammar.json_grammar import json_grammar
from stepgraph.sampling.grammar.matcher import XGrammarMatcher
from stepgraph.sampling.grammar.pattern import ebnf_of
from stepgraph.sampling.grammar.schema import check_schema
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary, is_int

_SOURCE_PREFIX = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h|cpp):\d+: (Check failed: \(.*?\) is false: )?")


@dataclass(frozen=True, eq=False)
class CompiledConstraint:
    """Immutable and shared by any number of matchers, each of which keeps it alive whatever the cache does."""

    constraint: Constraint
    vocabulary: Vocabulary
    grammar: xgrammar.CompiledGrammar
    seconds: float
    fuel_seconds: float

    @property
    def nbytes(self) -> int:
        return int(self.grammar.memory_size_bytes)

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.grammar, self.vocabulary, self.fuel_seconds)


class GrammarCompiler:
    """A bounded cache in front of the compiler; safe to call from many threads, which share the work on equal constraints."""

    def __init__(self, vocabulary: Vocabulary, max_cached: int = 256, max_threads: int = 4, fuel_seconds: float = 0.5) -> None:
        for name, value in (("max_cached", max_cached), ("max_threads", max_threads)):
            if not is_int(value) or value < 1:
                raise ValueError(f"GrammarCompiler.{name}: got {value!r}, want an int >= 1")
        if not fuel_seconds > 0:
            raise ValueError(f"GrammarCompiler.fuel_seconds: got {fuel_seconds!r}, want a number > 0")
        self._vocabulary = vocabulary
        self._fuel_seconds = fuel_seconds
        self._max_cached = max_cached
        self._compiler = xgrammar.GrammarCompiler(vocabulary.tokenizer_info, max_threads=max_threads, cache_enabled=False)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Constraint, Future[CompiledConstraint]] = OrderedDict()

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """The grammar of a constraint; ValueError naming its kind and the reason where it cannot be enforced."""
        if not isinstance(constraint, Constraint):
            raise ValueError(f"GrammarCompiler.compile: got {type(constraint).__name__}, want a Constraint")
        with self._lock:
            result = self._cache.get(constraint)
            mine = result is None
            if result is None:
                result = self._cache[constraint] = Future()
            self._cache.move_to_end(constraint)
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        if mine:
            try:
                result.set_result(self._compile(constraint))
            except BaseException as error:
                with self._lock:
                    if self._cache.get(constraint) is result:
                        del self._cache[constraint]
                result.set_exception(error)
        return result.result()

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        start = time.perf_counter()
        try:
            grammar = self._build(constraint)
            compiled = CompiledConstraint(constraint, self._vocabulary, grammar, time.perf_counter() - start, self._fuel_seconds)
            first = torch.zeros(1, self._vocabulary.mask_words, dtype=torch.int32)
            matcher = compiled.matcher()
            if matcher.fill_next_token_bitmask(first, 0) not in (MaskStatus.OK, MaskStatus.COMPLETE):
                raise ValueError(matcher.fault or "no text of this vocabulary satisfies it")
            if constraint.kind in ("json_schema", "json_object") and matcher.accept_token(self._vocabulary.stop_token_ids[0]):
                raise ValueError("the empty text would be accepted, which is not JSON")
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # the C++ side raises RuntimeError and several types of its own
            reason = _SOURCE_PREFIX.sub("", str(error)).strip()
            raise ValueError(f"constraint {constraint.kind}: cannot be compiled: {reason}") from error
        return compiled

    def _build(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        if constraint.kind == "regex":
            return self._compiler.compile_grammar(f"root ::= {ebnf_of(constraint.payload, 'pattern')}")
        if constraint.kind == "choice":
            options = " | ".join(f'"{_escape(option)}"' for option in json.loads(constraint.payload))
            return self._compiler.compile_grammar(f"root ::= {options}")
        if constraint.kind == "ebnf":
            root, grammar = json.loads(constraint.payload)
            return self._compiler.compile_grammar(grammar, root_rule_name=root)
        # The library's built-in JSON grammar forbids some legal tokens (`}]` after a string); this schema does not.
        schema = {"type": "object"} if constraint.kind == "json_object" else json.loads(constraint.payload)
        check_schema(schema)
        return self._compiler.compile_grammar(json_grammar(schema, constraint.any_whitespace))


def _escape(text: str) -> str:
    return "".join(char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text)
