"""The compiler of automata, called through ctypes."""

from __future__ import annotations

import gc
from dataclasses import asdict

from stepgraph import Vocabulary
from stepgraph.sampling.grammar import Constraint
from stepgraph.sampling.grammar.automaton.grammar import automaton_vocabulary
from stepgraph.sampling.grammar.automaton.library import limits_of
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.xgrammar_lib.grammar import parse
from tests.helpers.c_library import needs_c

pytestmark = needs_c

LIMITS = GrammarLimits()
BOUNDS = limits_of(asdict(LIMITS))


def test_compiling_images_of_new_sizes_defines_no_types() -> None:
    table = automaton_vocabulary(Vocabulary.printable(logits_width=128))

    def num_types_after(lengths: range) -> int:
        images = [table.compile(*parse(Constraint.regex("a" * length), LIMITS)[1:], BOUNDS) for length in lengths]
        assert len({len(image) for image in images}) == len(lengths) and not any(image.flags.writeable for image in images)
        gc.collect()
        return sum(isinstance(item, type) for item in gc.get_objects())

    before = num_types_after(range(1, 3))
    assert num_types_after(range(3, 30)) == before
