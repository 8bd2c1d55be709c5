"""Which grammar libraries there are, and in which order they are asked."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from stepgraph.sampling.grammar.constraint import BackendChoice, Constraint
from stepgraph.sampling.grammar.matcher import Matcher
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_grammar import XGrammarBuilder

# Under "auto" in this order. xgrammar first: its grammars are written here rule by rule and keep the masks of their states, so a
# mask costs about a microsecond in most places. llguidance enforces more schemas; its masks are computed anew each time.
BACKENDS = ("xgrammar", "llguidance")


class Grammar(Protocol):
    """A constraint as one library compiled it; immutable, shared by any number of matchers."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> Matcher: ...


class Builder(Protocol):
    """Builds grammars over one vocabulary; from any thread."""

    @property
    def name(self) -> str: ...

    def build(self, constraint: Constraint) -> Grammar:
        """ValueError, a RefusedError where the place is known, for what would not be enforced."""


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def asked(constraint: Constraint, default: BackendChoice) -> tuple[str, ...]:
    """The libraries to try, first the one that is preferred."""
    choice = constraint.backend if constraint.backend != "auto" else default
    return BACKENDS if choice == "auto" else (choice,)


def builder(name: str, vocabulary: Vocabulary, fuel_seconds: float, max_threads: int) -> Builder:
    """ValueError where the library is not installed."""
    if name == "xgrammar":
        return XGrammarBuilder(vocabulary, fuel_seconds, max_threads)
    if not installed(name):
        raise ValueError(f"{name} is not installed; pip install 'stepgraph[{name}]'")
    from stepgraph.sampling.grammar.llguidance_grammar import LLGuidanceBuilder  # an optional library

    return LLGuidanceBuilder(vocabulary, fuel_seconds)
