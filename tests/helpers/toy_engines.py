"""Toy engines for tests: one vocabulary, several drafters, and engines that many tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import pytest
from torch import Tensor

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.graphs import TapeBackend
from stepgraph.graphs.graph_key import Drafting, GraphKey
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.models import toy
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.request import ActiveRequest
from stepgraph.sampling.grammar import CompiledConstraint, GrammarCompiler
from stepgraph.sampling.grammar.compile.compiler import Isolation
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.link.native import load
from stepgraph.sampling.native import Unavailable
from stepgraph.sampling.params import GREEDY
from tests.helpers.oracles import Answer, greedy
from tests.helpers.proposers import always, draft_ids_then_noise, noise, parrot

try:
    load()
    NO_NATIVE = ""
except Unavailable as error:
    NO_NATIVE = str(error)
needs_native = pytest.mark.skipif(bool(NO_NATIVE), reason=f"no native link: {NO_NATIVE}")

_PRINTABLE = Vocabulary.printable()
STOP = _PRINTABLE.stop_token_ids[0]
CONTROL = len(_PRINTABLE.tokens)  # a chat marker: never text, never legal under a grammar
VOCABULARY = Vocabulary([*_PRINTABLE.tokens, b"<|im_start|>"], [STOP], logits_width=CONTROL + 20, control_token_ids=[CONTROL])
COMPILER = GrammarCompiler(VOCABULARY)
TARGET = ToyTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0})


class AdversarialDraft(ToyDraft):
    """Proposes the target's least likely token."""

    def logits(self, hidden: Tensor) -> Tensor:
        return -self.target.logits(hidden)


class FixedDraft(ToyDraft):
    """Proposes one token always, such as an illegal one or a stop token."""

    def __init__(self, target: ToyTarget, token: int) -> None:
        super().__init__(target)
        self.token = token

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        logits[..., self.token] += 1000.0
        return logits


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "perfect": lambda: ToyDraft(TARGET, 1.0),
    "fair": lambda: ToyDraft(TARGET, 0.7),
    "random": lambda: ToyDraft(TARGET, 0.0),
    "adversarial": lambda: AdversarialDraft(TARGET),
    "illegal": lambda: FixedDraft(TARGET, CONTROL),
    "stopper": lambda: FixedDraft(TARGET, STOP),
    "half": lambda: ToyDraft(TARGET, 0.9, d2t=[*range(CONTROL, -1, -2)]),  # every other token, in reverse order
    "ngram": NgramLookup,
    "parrot": parrot,
    "function": lambda: draft_ids_then_noise,
    "noise": lambda: noise(CONTROL + 1),
    "control": lambda: always(CONTROL),  # never legal under a grammar
    "stops": lambda: always(STOP),
    "outside": lambda: always(7, 2**40, 7, -(2**40), CONTROL + 1),
}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "bob"]},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    None,
    Constraint.json_schema(SCHEMA),
    Constraint.json_object(),
    Constraint.regex("[a-c]{0,6}x?"),
    Constraint.regex(r"\d{3}-\d{4}"),
    Constraint.choice(["yes", "no", "not at all", "nothing"]),
    Constraint.ebnf('root ::= "(" root ")" | [0-9] [0-9]? | ""'),
    Constraint.ebnf('root ::= item ("," item)* \nitem ::= "true" | "false" | "name"'),
)


@dataclass(frozen=True)
class Setup:
    """Configuration of an engine that tests share."""

    k: int
    draft_masks: bool = True
    drafter: str = "fair"
    max_rows: int = 4
    buckets: tuple[int, ...] | None = None  # None: powers of two and all rows, one capture each
    num_pages: int = 36
    rounds_in_flight: int = 2
    asynchronous: bool = True
    eager: bool = False
    prefill_chunk: int = 5
    greedy_only: bool = True
    max_top_logprobs: int = 0
    forced_acceptance: tuple[float, ...] | None = None
    host_link: str = "auto"
    forced_drafts: bool = False
    look_up: int = 0
    grammar_backend: BackendChoice = "auto"
    grammar_lane: str = "auto"
    switching: bool = False  # every round has a random draft length
    loops: bool = False  # a launch runs rounds until an event
    compile_isolation: Isolation = "none"  # starting a worker per engine is slow


def make_engine(setup: Setup, backend: TapeBackend | None = None, *, all_graphs: bool = False, **others: Any) -> Engine:
    """An engine that records each graph at its first use, or all_graphs now: most tests use few of them.

    others: further EngineConfig fields, or other values of those in Setup.
    """
    of_tests = ("k", "drafter", "asynchronous", "switching", "loops")
    given = {field.name: getattr(setup, field.name) for field in fields(Setup) if field.name not in of_tests}
    given |= {"num_speculative_tokens": setup.k, "draft_length": "auto" if setup.switching else setup.k}
    given |= {"rounds_per_launch": "until_event" if setup.loops else 1}
    config = EngineConfig(**{"max_length": 96, "page_size": 8, "backend": "tape", **given, **others})
    draft = DRAFTERS[setup.drafter]() if setup.k else None
    engine = Engine(TARGET, draft, vocabulary=VOCABULARY, config=config, backend=backend or TapeBackend(asynchronous=setup.asynchronous))
    if all_graphs:
        engine.capture()
    else:
        engine.ensure_captured()
    if setup.switching:
        switch_draft_lengths(engine)
    for constraint in filter(None, CONSTRAINTS):
        engine.compile(constraint)  # so that the step after a submit starts the job
    return engine


def use_small_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make later steps of toy models call the operations of torch: a round then has as many as with a small real model."""
    for name in ("toy_target_hidden", "toy_draft_hidden", "toy_target_logits", "toy_draft_logits"):
        monkeypatch.setattr(toy, name, getattr(toy, name).reference)


def switch_draft_lengths(engine: Engine, seed: int = 0, share: float = 1.0) -> Random:
    """Give later rounds random draft lengths, with a change in this share of rounds. Returns their source."""
    lengths, random = engine._parts.draft_lengths, Random(seed)
    assert lengths is not None
    choose = lengths.choose

    def choose_at_random(requests: tuple[ActiveRequest, ...], key: GraphKey) -> Drafting:
        if lengths.fixed_drafting is None or share == 1 or random.random() < share:
            lengths.fixed_drafting = random.choice(lengths.choices)
        return choose(requests, key)

    lengths.choose = choose_at_random  # type: ignore[method-assign]
    return random


@functools.cache
def shared_engine(setup: Setup) -> Engine:
    """One engine per setup, for tests that leave it idle."""
    return make_engine(setup)


def compiled(constraint: Constraint | None) -> CompiledConstraint | None:
    return None if constraint is None else COMPILER.compile(constraint)


def plain(
    prompt: Sequence[int],
    max_new_tokens: int,
    constraint: Constraint | None = None,
    stop_ids: Sequence[int] = (),
    sampling: SamplingParams = GREEDY,
) -> Answer:
    """The result of plain decoding with TARGET, without drafts."""
    stops = (*(() if sampling.ignore_eos else (STOP,)), *stop_ids, *sampling.stop_token_ids)
    return greedy(TARGET, prompt, max_new_tokens, stops, compiled(constraint), len(VOCABULARY.tokens), sampling)


def finish(engine: Engine) -> None:
    """Step until all jobs have finished."""
    for _ in engine.stream():
        pass
