"""Thousands of schemas that are never seen again: memory, matchers and the cache stay where they were."""

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
from stepgraph.sampling.grammar.llguidance_lib.matcher import LLGuidanceMatcher
from tests.helpers.toy_engines import CONSTRAINTS, Setup, make_engine

CACHE_BYTES = MIB // 4
AHEAD = sum(constraint is not None for constraint in CONSTRAINTS)  # compiled with the engine
ROWS = 4
STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists() or "RssAnon" not in STATUS.read_text(), reason="the system does not tell")


def resident_bytes() -> int:
    """Of the heaps, without what they can give back; not of mapped files, which come and go."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def live_matchers() -> int:
    gc.collect()
    return sum(type(item) in (XGrammarMatcher, LLGuidanceMatcher) for item in gc.get_objects())


def unique(number: int) -> Constraint:
    """A schema of tens of kilobytes, compiled, by either library."""
    properties = {f"p{number}_{place}": {"type": ["string", "integer"]} for place in range(12)}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return Constraint.json_schema(schema, backend="llguidance" if number % 10 == 0 else "xgrammar")


def serve(engine: Engine, numbers: range) -> None:
    for start in range(numbers.start, numbers.stop, 20):
        batch = range(start, min(start + 20, numbers.stop))
        jobs = [engine.submit([number % 90], constraint=unique(number), max_new_tokens=5) for number in batch]
        while engine.has_work:
            engine.step()
        assert all(job.finish_reason == FinishReason.LENGTH for job in jobs), [job.error for job in jobs if job.error]
    engine.generate([1], max_new_tokens=40)  # rounds without matchers: the last ones of those that had some are still in hand


def check_flat(engine: Engine, settling: int, more: int, growth: int) -> None:
    """After `settling` schemas, `more` others leave as many matchers, no more in the cache than it may hold, and `growth` bytes at most."""
    serve(engine, range(settling))
    matchers, resident = live_matchers(), resident_bytes()
    serve(engine, range(settling, settling + more))
    stats = engine.stats().grammars
    assert stats.misses == settling + more + AHEAD and stats.running == stats.failures == 0
    assert stats.nbytes <= CACHE_BYTES and stats.grammars + stats.dropped == stats.misses
    assert live_matchers() <= matchers
    assert resident_bytes() - resident <= growth


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine(Setup(k=0, max_rows=ROWS), grammar_cache_bytes=CACHE_BYTES) as engine:
        yield engine


def test_sixty_schemas_leave_nothing_behind(engine: Engine) -> None:
    check_flat(engine, 20, 40, growth=12 * MIB)


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
def test_a_planted_leak_is_found(engine: Engine, leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LEAKS[leak](monkeypatch)
    with pytest.raises(AssertionError):
        check_flat(engine, 5, 15, growth=1 << 40)


@pytest.mark.soak
def test_two_thousand_schemas_leave_nothing_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 3 to 8 MiB, as heaps break up; what the C library has given out is the same to 0.2 MiB."""
    check_flat(engine, 200, 1800, growth=24 * MIB)
    resident = resident_bytes()
    monkeypatch.setattr(GrammarCache, "_shrink", lambda cache: None)
    serve(engine, range(2000, 3000))
    assert resident_bytes() - resident > 24 * MIB, "a leak of every grammar is not seen"
