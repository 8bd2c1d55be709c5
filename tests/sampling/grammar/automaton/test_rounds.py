"""Rounds with automata as matchers: the tokens are those of xgrammar, with the native and the Python host link."""

from __future__ import annotations

import pytest

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.link.native import HostLinkName
from tests.helpers.c_library import needs_c
from tests.helpers.toy_engines import finish

pytestmark = needs_c

VOCABULARY = Vocabulary.printable()
TARGET = ToyTarget(VOCABULARY.logits_width)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
CONSTRAINTS = (
    Constraint.json_schema(SCHEMA),
    Constraint.regex("[a-z ]{20,30}"),
    Constraint.json_object(),
    Constraint.choice(["yes", "no"]).after("a"),
)


SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7))


def texts(backend: BackendChoice, host_link: HostLinkName) -> list[bytes]:
    config = EngineConfig(
        max_rows=2,
        num_speculative_tokens=3,
        draft_length=3,
        max_length=128,
        compile_isolation="none",
        grammar_backend=backend,
        host_link=host_link,
        forced_drafts=True,
    )
    with Engine(TARGET, ToyDraft(TARGET, agreement=0.8), vocabulary=VOCABULARY, config=config) as engine:
        jobs = [
            engine.submit([1, 2, 3], constraint=constraint, max_new_tokens=60, sampling=sampling)
            for sampling in SAMPLINGS
            for constraint in CONSTRAINTS
        ]
        finish(engine)
        assert not any(job.error for job in jobs)
        return [VOCABULARY.decode(job.tokens) for job in jobs]


@pytest.mark.parametrize("host_link", ["native", "python"])
def test_a_text_that_nests_too_deep_ends_with_an_error(host_link: HostLinkName) -> None:
    """A rejected draft that nests too deep is no error. An emitted bracket that exceeds the depth of the stack is one."""
    limits = GrammarLimits(automaton_depth=9)
    config = EngineConfig(
        max_rows=2, num_speculative_tokens=3, draft_length=3, grammar_backend="automaton", host_link=host_link, grammar_limits=limits
    )
    opening, letter = VOCABULARY.tokens.index(b"("), VOCABULARY.tokens.index(b"a")
    grammar = Constraint.ebnf('root ::= "(" root ")" | "a"')
    with Engine(TARGET, ToyDraft(TARGET, agreement=0.5), vocabulary=VOCABULARY, config=config) as engine:
        jobs = [
            engine.submit(
                [1, 2], constraint=grammar, max_new_tokens=60, sampling=SamplingParams(temperature=1.0, seed=seed, logit_bias=bias)
            )
            for seed, bias in enumerate([{opening: 100.0}, *[{opening: 1.5, letter: -1.5}] * 12])
        ]
        finish(engine)
    too_deep = "no valid grammar mask: the text nests deeper than the stack of its automaton (GrammarLimits.automaton_depth)"
    for job in jobs:
        depth = job.tokens.count(opening)
        assert job.error == (too_deep if depth == 10 else "") and depth <= 10
        assert depth == 10 or job.tokens == [opening] * depth + [letter] + [VOCABULARY.tokens.index(b")")] * depth
    assert jobs[0].error and not all(job.error for job in jobs)


def test_tokens_are_those_of_xgrammar() -> None:
    assert texts("automaton", "native") == texts("automaton", "python") == texts("xgrammar", "native")
