"""Rounds with automata as matchers: the tokens are those of xgrammar, with the native and the Python host link."""

from __future__ import annotations

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice

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


def texts(backend: BackendChoice, host_link: str) -> list[bytes]:
    config = EngineConfig(
        max_rows=2,
        num_speculative_tokens=3,
        max_length=128,
        compile_isolation="none",
        grammar_backend=backend,
        host_link=host_link,
        forced_drafts=True,
    )
    with Engine(TARGET, ToyDraft(TARGET, agreement=0.8), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        jobs = [
            engine.submit([1, 2, 3], constraint=constraint, max_new_tokens=60, sampling=sampling)
            for sampling in SAMPLINGS
            for constraint in CONSTRAINTS
        ]
        while engine.has_work:
            engine.step()
        assert not any(job.error for job in jobs)
        return [VOCABULARY.decode(job.tokens) for job in jobs]


def test_tokens_are_those_of_xgrammar() -> None:
    assert texts("automaton", "native") == texts("automaton", "python") == texts("xgrammar", "native")
