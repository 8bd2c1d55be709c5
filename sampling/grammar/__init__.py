"""Constraints on text: their definition, compilation against a vocabulary, and matching token by token."""

from stepgraph.sampling.grammar.compile.backends import Coverage, coverage
from stepgraph.sampling.grammar.compile.compiler import Claim, CompiledConstraint, CompileStats, GrammarCompiler
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.unsupported import Unsupported
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher

__all__ = [
    "Claim",
    "CompileStats",
    "CompiledConstraint",
    "Constraint",
    "Coverage",
    "GrammarCompiler",
    "GrammarLimits",
    "MaskStatus",
    "Matcher",
    "Unsupported",
    "Vocabulary",
    "XGrammarMatcher",
    "coverage",
]
