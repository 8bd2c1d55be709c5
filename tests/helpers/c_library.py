"""For tests that need the C library of the package, or expect its absence."""

import pytest

from stepgraph.sampling.grammar.compile.backends import BACKENDS
from stepgraph.sampling.kernels.filters import distribution, draw
from stepgraph.sampling.kernels.processors import process_logits
from stepgraph.sampling.kernels.rejection import reject_sample
from stepgraph.sampling.native import why_not

needs_c = pytest.mark.skipif(bool(why_not()), reason=f"no C library: {why_not()}")
AUTOMATON = pytest.param("automaton", marks=needs_c)
EACH_BACKEND = [AUTOMATON if name == "automaton" else name for name in BACKENDS]
NO_LINK_WARNING = ("-W", "ignore:stepgraph:RuntimeWarning") if why_not() else ()  # arguments of the interpreter


def run_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled rounds run the references in torch instead of C, so that a test can plant errors in them."""
    for operation in (distribution, draw, process_logits, reject_sample):
        monkeypatch.setattr(operation, "c", None)
