"""Constraints on text: what is asked, compiled against a vocabulary, and matched token by token."""

from stepgraph.sampling.grammar.compiler import CompiledConstraint, CompileStats, GrammarCompiler
from stepgraph.sampling.grammar.constraint import Constraint
from stepgraph.sampling.grammar.coverage import Coverage
from stepgraph.sampling.grammar.grammar_cache import Claim
from stepgraph.sampling.grammar.limits import GrammarLimits
from stepgraph.sampling.grammar.matcher import Matcher, XGrammarMatcher
from stepgraph.sampling.grammar.refusal import Refusal
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary

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
    "Refusal",
    "Vocabulary",
    "XGrammarMatcher",
]
