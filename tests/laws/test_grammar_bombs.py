"""Expensive grammars ("bombs") are served or end with an error that names the exceeded limit; other requests keep their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from stepgraph import Engine
from stepgraph.sampling.grammar import GrammarLimits
from stepgraph.sampling.grammar.compile.limits import MIB
from stepgraph.sampling.native import why_not
from tests.helpers.grammar_bombs import BOMBS
from tests.helpers.toy_engines import CONSTRAINTS, finish, make_engine
from tests.runtime.test_request_queue import SETUP, check_undisturbed, submitted

SMALL = GrammarLimits(max_nesting=50, compile_seconds=5.0, compile_bytes=128 * MIB, result_bytes=8 * MIB, compile_fuel=50_000)
NAMED = re.compile(r"(constraint \w+|Constraint\.\w+.*): (cannot be compiled: |got ).*[\w)]", re.DOTALL)
SERVED = "stop|length|constraint_complete"
# Expected error (regular expression) or "" for served, under small limits. The other bombs take seconds each and run in `make soak`.
OUTCOMES = {
    "schema: 10,000 levels": "not JSON",
    "schema: 100 levels": "",
    "schema: references without progress": "refers to itself and to nothing else",
    "schema: branches without progress": "refers to itself and to nothing else",
    "schema: an object that requires itself": "no value satisfies ",
    "schema: references with progress": "",
    "schema: exponential references in branches": "",
    "schema: 7,000 values": "",
    "schema: 3,000 properties": "GrammarLimits.(result|compile)_bytes",
    "schema: nested counts": "GrammarLimits.least_bytes",
    "schema: a bound above the range of floats": "expected a number of at most 400 digits",
    "schema: an infinite bound": "not JSON",
    "schema: a NaN bound": "not JSON",
    "schema: a lone surrogate": "half of a surrogate pair",
    "schema: two million characters": "got 2000013 characters, expected at most 1000000",
    "schema, llguidance: nested counts": "",
    "pattern: 10,000 groups": "GrammarLimits.max_nesting: got 10000 brackets open at once, expected at most 50",
    "pattern: a million repetitions": "expected at most 100000 repetitions",
    "pattern: nested counts": "GrammarLimits.(compile|result)_bytes" if why_not() else "GrammarLimits.compile_bytes|length",
    "pattern: catastrophic": "",
    "pattern: 100,000 characters": "",
    "pattern: a lone surrogate": "surrogate",
    "pattern, llguidance: 50,000 optional letters": "GrammarLimits.compile_bytes|GrammarLimits.compile_fuel",
    "ebnf: 10,000 brackets": "GrammarLimits.max_nesting",
    "ebnf: a million repetitions": "",
    "ebnf: doubling rules": "GrammarLimits.least_bytes",
    "ebnf: endless recursion": "rule root: no text of finite length satisfies it",
    "ebnf: endless recursion after a letter": "rule endless: no text of finite length satisfies it",
    "ebnf: doubling rules after a letter": "got 262,144 bytes that rule r42 leads to, expected at most 200,000",
    "ebnf: a cycle of rules": "no text of finite length satisfies it",
    "ebnf: 29,000 optional letters": "GrammarLimits.compile_bytes",
    "lark: 10,000 groups": "GrammarLimits.max_nesting",
    "lark: a million repetitions": "",
    "a marker id above all tokens": "got id 1000000000",
    "a negative marker id": r"got \(-1,\)",
    "a NaN marker id": r"got \(nan,\)",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine(SETUP, grammar_limits=SMALL) as engine:
        yield engine


def outcome(engine: Engine, name: str) -> str:
    """Submit a bomb beside three other requests; return its error message, or its finish reason if it was served."""
    jobs = submitted(engine)
    try:
        bomb = engine.submit([3], constraint=BOMBS[name](), max_new_tokens=8)
    except ValueError as error:
        message = str(error)
    else:
        while not bomb.finished:
            engine.step()
        message = bomb.error or str(bomb.finish_reason)
    finish(engine)
    check_undisturbed(jobs)
    failed_in_a_step = message.startswith("no valid grammar mask: ") and "(GrammarLimits." in message
    assert re.fullmatch(SERVED, message) or failed_in_a_step or (NAMED.fullmatch(message) and len(message) < 2000), message
    return message


SLOW = ("schema: 3,000 properties", "ebnf: 29,000 optional letters")  # three seconds each


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OUTCOMES])
def test_expensive_grammar_is_refused_or_served_without_affecting_others(engine: Engine, name: str) -> None:
    message = outcome(engine, name)
    assert re.search(OUTCOMES[name] or SERVED, message), message


@pytest.mark.soak
@pytest.mark.parametrize("limits", [SMALL, GrammarLimits()], ids=["small", "default"])
def test_every_expensive_grammar_is_refused_or_served(limits: GrammarLimits) -> None:
    with make_engine(SETUP, grammar_limits=limits) as engine:
        for name in BOMBS:
            outcome(engine, name)
        assert engine.generate([3], constraint=CONSTRAINTS[1], max_new_tokens=8).error == ""
