"""Which grammar libraries there are, in which order they are asked, and what becomes of a constraint under them."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from stepgraph.sampling.grammar.compile.limits import GrammarLimits, check_size, named
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker, WorkerError
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice, Constraint
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarBuilder
from stepgraph.sampling.grammar.xgrammar_lib.shortest_text import EndlessError

# Under "auto" in this order. xgrammar first: its grammars are written here rule by rule and keep the masks of their states, so a
# mask costs about a microsecond in most places. llguidance enforces more schemas; its masks are computed anew each time.
BACKENDS = ("xgrammar", "llguidance")
MAX_REASON = 600  # characters of a refusal

Result = TypeVar("Result")


class Grammar(Protocol):
    """A constraint as one library compiled it; immutable, shared by any number of matchers."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> Matcher: ...


class Builder(Protocol):
    """Builds grammars over one vocabulary; from any thread."""

    @property
    def name(self) -> str: ...

    def check(self, constraint: Constraint) -> None:
        """ValueError, a RefusedError where the place is known, for what would not be enforced, as far as it is seen without the library."""

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> Grammar:
        """ValueError, a RefusedError where the place is known, for what would not be enforced. Without a worker: in this process."""


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def asked(constraint: Constraint, default: BackendChoice) -> tuple[str, ...]:
    """The libraries to try, first the one that is preferred."""
    choice = constraint.backend if constraint.backend != "auto" else default
    return BACKENDS if choice == "auto" else (choice,)


def builder(name: str, vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> Builder:
    """ValueError where the library is not installed."""
    if name == "xgrammar":
        return XGrammarBuilder(vocabulary, limits, max_threads)
    if not installed(name):
        raise ValueError(f"{name} is not installed; pip install 'stepgraph[{name}]'")
    from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceBuilder  # an optional library

    return LLGuidanceBuilder(vocabulary, limits)


class Backends:
    """The libraries that are asked about a constraint, one after another, and the reasons of those that would not have it."""

    def __init__(self, vocabulary: Vocabulary, choice: BackendChoice, limits: GrammarLimits, max_threads: int) -> None:
        self._vocabulary, self._choice, self._limits, self._max_threads = vocabulary, choice, limits, max_threads
        self._builders: dict[str, Builder] = {}
        self._lock = threading.Lock()

    def check(self, constraint: Constraint) -> None:
        """ValueError naming the kind and the reasons, where that is known without compiling."""
        self._first(constraint, lambda name: self._builder(name).check(constraint))

    def build(self, constraint: Constraint, worker: CompileWorker | None) -> tuple[Grammar, str, str]:
        """The grammar, its library, and why it is not an earlier one; ValueError naming the kind and the reasons."""

        def tried_out(name: str) -> Grammar:
            grammar = self._builder(name).build(constraint, worker)
            try_out(grammar, constraint, self._vocabulary)
            return grammar

        return self._first(constraint, tried_out)

    def _first(self, constraint: Constraint, attempt: Callable[[str], Result]) -> tuple[Result, str, str]:
        reasons = dict[str, str]()
        try:
            check_size(constraint, self._limits)
            for name in asked(constraint, self._choice):
                try:
                    result = attempt(name)
                except (WorkerError, EndlessError):
                    raise  # a limit is not what another library is there for
                except Exception as error:  # numbers beyond floats, depths beyond the stack: what a constraint brings about is its fault
                    reasons[name] = reason_of(error)
                    continue
                return result, name, "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
        except ValueError as error:
            reasons = {"": str(error)}
        told = list(dict.fromkeys(reasons.values()))
        why = told[0] if len(told) == 1 else "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
        raise ValueError(f"constraint {constraint.kind}: cannot be compiled: {why}")

    def _builder(self, name: str) -> Builder:
        with self._lock:  # a token table takes a while to build, and no one needs two
            if name not in self._builders:
                self._builders[name] = builder(name, self._vocabulary, self._limits, self._max_threads)
        return self._builders[name]


def try_out(grammar: Grammar, constraint: Constraint, vocabulary: Vocabulary) -> None:
    """ValueError where no text satisfies a grammar, or the empty one although it is no JSON."""
    first = torch.zeros(1, vocabulary.mask_words, dtype=torch.int32)
    matcher = grammar.matcher()
    if matcher.fill_next_token_bitmask(first, 0) not in (MaskStatus.OK, MaskStatus.COMPLETE):
        raise ValueError(matcher.fault or "no text of this vocabulary satisfies it")
    if constraint.kind in ("json_schema", "json_object") and matcher.accept_token(vocabulary.stop_token_ids[0]):
        raise ValueError("the empty text would be accepted, which is not JSON")


def reason_of(error: Exception) -> str:
    """In words, not all too many: the libraries repeat what they were given, however long."""
    reason = named(str(error)) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON // 2]} ... {reason[-MAX_REASON // 2 :]}"
