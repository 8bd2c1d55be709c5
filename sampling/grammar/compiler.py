"""From a constraint to a grammar over one vocabulary, once per constraint.

Compiling takes from microseconds to seconds: call it from a thread that may wait, never from the decoding loop.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from stepgraph.sampling.grammar.backends import Builder, Grammar, asked, builder
from stepgraph.sampling.grammar.checked_matcher import CheckedMatcher
from stepgraph.sampling.grammar.constraint import BackendChoice, Constraint, checked_backend
from stepgraph.sampling.grammar.marker import Marker, MarkerMatcher
from stepgraph.sampling.grammar.matcher import Matcher
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary, is_int


@dataclass(frozen=True, eq=False)
class CompiledConstraint:
    """Immutable and shared by any number of matchers, each of which keeps it alive whatever the cache does."""

    constraint: Constraint
    vocabulary: Vocabulary
    grammar: Grammar
    backend: str  # the library that enforces it
    reason: str  # why it is not the one that would have been preferred; empty where it is
    seconds: float
    marker: Marker | None = None
    check_masks: bool = False

    @property
    def nbytes(self) -> int:
        return self.grammar.nbytes

    def matcher(self) -> Matcher:
        """A matcher at the start of a text, for one request."""
        matcher = self.grammar.matcher()
        if self.marker:
            matcher = MarkerMatcher(matcher, self.marker, self.vocabulary)
        return CheckedMatcher(matcher, self.backend) if self.check_masks else matcher


class GrammarCompiler:
    """A bounded cache in front of the compiler; safe to call from many threads, which share the work on equal constraints."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_cached: int = 256,
        max_threads: int = 4,
        fuel_seconds: float = 0.5,
        backend: BackendChoice = "auto",
        check_masks: bool = False,
    ) -> None:
        for name, value in (("max_cached", max_cached), ("max_threads", max_threads)):
            if not is_int(value) or value < 1:
                raise ValueError(f"GrammarCompiler.{name}: got {value!r}, want an int >= 1")
        if not fuel_seconds > 0:
            raise ValueError(f"GrammarCompiler.fuel_seconds: got {fuel_seconds!r}, want a number > 0")
        checked_backend("GrammarCompiler.backend", backend)
        self._vocabulary = vocabulary
        self._fuel_seconds, self._max_threads = fuel_seconds, max_threads
        self._max_cached = max_cached
        self._backend, self._check_masks = backend, check_masks
        self._builders: dict[str, Builder] = {}
        self._builder_lock = threading.Lock()
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
        start, reasons = time.perf_counter(), dict[str, str]()
        for name in asked(constraint, self._backend):
            try:
                grammar = self._build(name, constraint)
                self._try_out(grammar, constraint)
            except ValueError as error:
                reasons[name] = str(error)
                continue
            why = "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
            marker = None if constraint.marker is None else Marker(constraint.marker, self._vocabulary)
            seconds = time.perf_counter() - start
            return CompiledConstraint(constraint, self._vocabulary, grammar, name, why, seconds, marker, self._check_masks)
        told = list(dict.fromkeys(reasons.values()))
        why = told[0] if len(told) == 1 else "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
        raise ValueError(f"constraint {constraint.kind}: cannot be compiled: {why}")

    def _build(self, name: str, constraint: Constraint) -> Grammar:
        with self._builder_lock:  # a token table takes a while to build, and no one needs two
            if name not in self._builders:
                self._builders[name] = builder(name, self._vocabulary, self._fuel_seconds, self._max_threads)
        return self._builders[name].build(constraint)

    def _try_out(self, grammar: Grammar, constraint: Constraint) -> None:
        first = torch.zeros(1, self._vocabulary.mask_words, dtype=torch.int32)
        matcher = grammar.matcher()
        if matcher.fill_next_token_bitmask(first, 0) not in (MaskStatus.OK, MaskStatus.COMPLETE):
            raise ValueError(matcher.fault or "no text of this vocabulary satisfies it")
        if constraint.kind in ("json_schema", "json_object") and matcher.accept_token(self._vocabulary.stop_token_ids[0]):
            raise ValueError("the empty text would be accepted, which is not JSON")
