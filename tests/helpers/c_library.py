"""For tests that need the C library of the package, or expect its absence."""

import pytest

from stepgraph.sampling.grammar.compile.backends import BACKENDS
from stepgraph.sampling.native import why_not

needs_c = pytest.mark.skipif(bool(why_not()), reason=f"no C library: {why_not()}")
AUTOMATON = pytest.param("automaton", marks=needs_c)
EACH_BACKEND = [AUTOMATON if name == "automaton" else name for name in BACKENDS]
NO_LINK_WARNING = ("-W", "ignore:stepgraph:RuntimeWarning") if why_not() else ()  # arguments of the interpreter
