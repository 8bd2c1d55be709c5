"""Thousands of distinct schemas: memory, live matchers and the grammar cache stay bounded."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepgraph import Constraint, Engine, FinishReason
from stepgraph.sampling.grammar import Claim, CompiledConstraint, Matcher, XGrammarMatcher
from stepgraph.sampling.grammar.compile.compiler import GrammarCache
from stepgraph.sampling.grammar.compile.limits import MIB
from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceMatcher
from tests.helpers.toy_engines import CONSTRAINTS, Setup, finish, make_engine

CACHE_BYTES = MIB // 4
PRECOMPILED = sum(constraint is not None for constraint in CONSTRAINTS)  # compiled with the engine
ROWS = 4
STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists() or "RssAnon" not in STATUS.read_text(), reason="no RssAnon in /proc/self/status")


def resident_bytes() -> int:
    """Anonymous resident memory after trimming the heap; mapped files are not counted."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def live_matchers() -> int:
    gc.collect()
    return sum(type(item) in (XGrammarMatcher, LLGuidanceMatcher) for item in gc.get_objects())


def unique(number: int) -> Constraint:
    """A schema that compiles to tens of kilobytes; every tenth with llguidance."""
    properties = {f"p{number}_{index}": {"type": ["string", "integer"]} for index in range(12)}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return Constraint.json_schema(schema, backend="llguidance" if number % 10 == 0 else "xgrammar")


def serve(engine: Engine, numbers: range) -> None:
    for start in range(numbers.start, numbers.stop, 20):
        batch = range(start, min(start + 20, numbers.stop))
        jobs = [engine.submit([number % 90], constraint=unique(number), max_new_tokens=5) for number in batch]
        finish(engine)
        assert all(job.finish_reason == FinishReason.LENGTH for job in jobs), [job.error for job in jobs if job.error]
    engine.generate([1], max_new_tokens=40)  # releases the rows of the last constrained rounds


def check_no_growth(engine: Engine, warm_up: int, more: int, growth: int) -> None:
    """After `warm_up` schemas, `more` others add no matchers, keep the cache within its limit and add at most `growth` bytes."""
    serve(engine, range(warm_up))
    matchers, resident = live_matchers(), resident_bytes()
    serve(engine, range(warm_up, warm_up + more))
    stats = engine.stats().grammars
    assert stats.misses == warm_up + more + PRECOMPILED and stats.running == stats.failures == 0
    assert stats.nbytes <= CACHE_BYTES and stats.grammars + stats.dropped == stats.misses
    assert live_matchers() <= matchers
    assert resident_bytes() - resident <= growth


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine(Setup(k=0, max_rows=ROWS), grammar_cache_bytes=CACHE_BYTES) as engine:
        yield engine


def test_sixty_schemas_leak_nothing(engine: Engine) -> None:
    check_no_growth(engine, 20, 40, growth=12 * MIB)


def keep_matchers(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, real = list[object](), CompiledConstraint.matcher

    def matcher(compiled: CompiledConstraint) -> Matcher:
        kept.append(real(compiled))
        return kept[-1]  # type: ignore[return-value]

    monkeypatch.setattr(CompiledConstraint, "matcher", matcher)


LEAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "claims are not released": lambda patch: patch.setattr(Claim, "release", lambda claim: None),
    "the cache drops nothing": lambda patch: patch.setattr(GrammarCache, "_shrink", lambda cache: None),
    "matchers are kept": keep_matchers,
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_detected(engine: Engine, leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LEAKS[leak](monkeypatch)
    with pytest.raises(AssertionError):
        check_no_growth(engine, 5, 15, growth=1 << 40)


@pytest.mark.soak
def test_two_thousand_schemas_leak_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured growth: 3 to 8 MiB from heap fragmentation; allocated bytes stay equal within 0.2 MiB."""
    check_no_growth(engine, 200, 1800, growth=24 * MIB)
    resident = resident_bytes()
    monkeypatch.setattr(GrammarCache, "_shrink", lambda cache: None)
    serve(engine, range(2000, 3000))
    assert resident_bytes() - resident > 24 * MIB, "the limit must detect a leak of every grammar"
