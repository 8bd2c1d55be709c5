"""Compiles happen elsewhere: in a thread of their own and, where asked, in a process that may crash, hang or grow."""

from __future__ import annotations

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, GrammarLimits, MaskStatus
from tests.grammar_texts import EXAMPLES, PRINTABLE, STOP, encode, filled

SLOW = Constraint.regex("a?" * 50_000)  # seconds, and hundreds of megabytes


def isolated(**limits: float) -> GrammarCompiler:
    return GrammarCompiler(PRINTABLE, 1, isolation="process", limits=GrammarLimits(**limits))  # type: ignore[arg-type]


COMPILER = isolated()
PLAIN = GrammarCompiler(PRINTABLE, 1)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_grammar_from_the_worker_has_the_masks_of_one_compiled_here(kind: str) -> None:
    constraint, good, _ = EXAMPLES[kind]
    there, here = COMPILER.compile(constraint), PLAIN.compile(constraint)
    assert (there.backend, there.nbytes) == (here.backend, here.nbytes)
    matchers = there.matcher(), here.matcher()
    for token in [*encode(good), STOP]:
        first, second = map(filled, matchers)
        assert first == second and token in first[1]
        assert all(matcher.accept_token(token) for matcher in matchers)
    assert filled(matchers[0]) == (MaskStatus.TERMINATED, [])
