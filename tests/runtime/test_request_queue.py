"""Requests that wait for a grammar do not delay others; claims are released when jobs end."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stepgraph import Constraint, Engine, FinishReason, Job, StepEvent
from stepgraph.sampling.grammar import GrammarCompiler, GrammarLimits
from stepgraph.sampling.native import why_not
from tests.helpers.toy_engines import CONSTRAINTS, Setup, make_engine, plain
from tests.sampling.grammar.compile.test_compiler import GREEDY, SLOW, busy_worker, gone, waited

SETUP = Setup(k=2, max_rows=2, compile_isolation="process")
TEXTS = (([1, 2], None), ([3], CONSTRAINTS[1]), ([4, 5], CONSTRAINTS[3]))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine(SETUP, grammar_limits=GrammarLimits(compile_seconds=120)) as engine:
        yield engine


def compiler_of(engine: Engine) -> GrammarCompiler:
    assert engine._parts.compiler is not None
    return engine._parts.compiler


def submitted(engine: Engine) -> list[Job]:
    return [engine.submit(prompt, constraint=constraint, max_new_tokens=24) for prompt, constraint in TEXTS]


def check_undisturbed(jobs: list[Job]) -> None:
    """The tokens of each request equal those it has alone."""
    for job, (prompt, constraint) in zip(jobs, TEXTS, strict=True):
        answer = plain(prompt, 24, constraint)
        assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason)


def stepped(engine: Engine, jobs: list[Job]) -> None:
    while not all(job.finished for job in jobs):
        engine.step()


def test_request_waiting_for_a_grammar_does_not_delay_later_ones(engine: Engine) -> None:
    assert "grammars: compiled in a worker process, in at most 120 s and 1024 MiB" in engine.notes
    slow = engine.submit([7], constraint=SLOW, max_new_tokens=4)
    jobs = submitted(engine)
    pid = busy_worker(compiler_of(engine))
    stepped(engine, jobs)
    check_undisturbed(jobs)
    assert engine.has_work and not slow.finished and not gone(pid)
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.grammars.running, stats.grammars.waiting) == (1, 0, 1, 0)
    assert engine.step() == []
    assert engine.stats().grammars.running == 1 and not gone(pid), "a step waited for the compile"
    assert engine.cancel(slow)
    (event,) = engine.step()
    waited(lambda: gone(pid), "the compile of an unused grammar continues")
    assert (event.job_id, slow.finish_reason, slow.error) == (slow.id, FinishReason.CANCELLED, "")
    assert not engine.has_work


def test_compile_is_shared_and_continues_while_a_job_needs_it(engine: Engine) -> None:
    before = engine.stats().grammars
    first, second = (engine.submit([7], constraint=SLOW, max_new_tokens=4) for _ in range(2))
    pid = busy_worker(compiler_of(engine))
    engine.cancel(first)
    engine.step()
    after = engine.stats().grammars
    assert first.finished and not gone(pid) and (after.misses, after.hits) == (before.misses + 1, before.hits + 1)
    engine.cancel(second)
    engine.step()
    waited(lambda: gone(pid), "the compile of an unused grammar continues")


def test_cancel_does_not_wait_for_the_compiler(engine: Engine) -> None:
    """A finaliser may cancel a request in a thread that is being started under the lock of the compiler."""
    job = engine.submit([7], constraint=SLOW, max_new_tokens=4)
    thread = threading.Thread(target=engine.cancel, args=(job,), daemon=True)
    with compiler_of(engine)._lock:
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
    stepped(engine, [job])
    waited(lambda: engine.stats().grammars.running == 0, "the compile of an unused grammar continues")


@pytest.mark.parametrize("killer", [signal.SIGSEGV, signal.SIGKILL])
def test_killed_worker_fails_one_request(engine: Engine, killer: signal.Signals) -> None:
    bad = engine.submit([7], constraint=SLOW, max_new_tokens=4)
    jobs = submitted(engine)
    os.kill(busy_worker(compiler_of(engine)), killer)
    stepped(engine, [bad, *jobs])
    assert (bad.finish_reason, bad.tokens) == (FinishReason.ERROR, [])
    assert f"constraint ebnf: cannot be compiled: the compile worker died of {killer.name}" in bad.error
    check_undisturbed(jobs)


def test_compile_error_ends_the_job_and_is_raised_by_compile(engine: Engine) -> None:
    impossible = Constraint.json_schema({"type": "string", "minLength": 4, "maxLength": 3})
    bad, jobs = engine.submit([7], constraint=impossible, max_new_tokens=4), submitted(engine)
    errors = dict[int, StepEvent]()
    while engine.has_work:
        errors |= {event.job_id: event for event in engine.step() if event.finish_reason == FinishReason.ERROR}
    assert list(errors) == [bad.id] and "no value satisfies both #: minLength and #: maxLength" in errors[bad.id].error == bad.error
    assert bad.finish_reason == FinishReason.ERROR
    check_undisturbed(jobs)
    with pytest.raises(ValueError, match=r"constraint json_schema: cannot be compiled: .*no value satisfies both"):
        engine.compile(impossible)


def in_items(schema: dict[str, Any]) -> dict[str, Any]:
    """Puts the schema where only a reference leads to it."""
    return {"type": "array", "items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"anyOf": [{}, schema]}, "unused": {"type": "x"}}}


AT = "#/$defs/a~1b/anyOf/1"
REFUSED = [
    (Constraint.regex("a("), "constraint regex: cannot be compiled: pattern: got the end at position 2, expected a closing parenthesis"),
    (Constraint.ebnf("root ::= missing"), 'Rule "missing" is not defined'),
    (Constraint.ebnf('root ::= "a" root'), "no text of finite length satisfies it"),
    (Constraint.json_schema(in_items({"type": "strnig"})), f'{AT}: type: got "strnig", expected one or several of null, boolean, '),
    (
        Constraint.json_schema(in_items({"pattern": "(a"})),
        f'{AT}: pattern: got "(a", which has the end at position 2, expected a closing parenthesis',
    ),
    (
        Constraint.json_schema(in_items({"patternProperties": {"a**": {}}})),
        f"{AT}: patternProperties: got {{\"a**\": {{}}}}, which has '*' at position 2, expected",
    ),
    (Constraint.json_schema(in_items({"minLength": -1})), f"{AT}: minLength: got -1, expected an integer in 0.."),
    (Constraint.json_schema(in_items({"not": {"items": 5}})), f"{AT}/not/items: schema: got 5, expected an object, true or false"),
    (Constraint.json_schema(in_items({"$ref": "#/a"})), f'{AT}: $ref: got "#/a", expected a reference to a schema in the same document'),
    (Constraint.json_schema(in_items({"mininum": 3}), unknown_keywords="refuse"), f"{AT}: mininum: got 3 for no known keyword; remove"),
    (
        Constraint.json_schema(in_items({"format": "color"}), unknown_formats="refuse"),
        f'{AT}: format: got "color", expected',
    ),
    (Constraint.structural_tag({"triggers": ["<"], "structures": [{"begin": "<", "schema": {"type": 1}, "end": ""}]}), "'<': #: type: got"),
    (Constraint.lark('start: %json {"type": "strnig"}'), '#: type: got "strnig"'),
]


@pytest.mark.parametrize(("constraint", "message"), REFUSED)
def test_submit_refuses_malformed_constraints_before_any_change(engine: Engine, constraint: Constraint, message: str) -> None:
    before = engine.stats()
    for call in (lambda: engine.submit([7], constraint=constraint), lambda: engine.compile(constraint)):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert not engine.has_work and engine.stats() == before


def test_parts_left_out_of_an_approximate_schema_are_not_refused_by_submit(engine: Engine) -> None:
    schema = in_items({"type": "string", "pattern": "(?<=a)b"})
    with pytest.raises(
        ValueError, match=re.escape(f"{AT}: pattern: got \"(?<=a)b\", which has '?<=a)b' at position 1, expected no look-behind")
    ):
        engine.submit([7], constraint=Constraint.json_schema(schema))
    assert engine.compile(Constraint.json_schema(schema, approximate=True)).backend == ("xgrammar" if why_not() else "automaton")


def test_compiled_grammar_is_used_at_once(engine: Engine) -> None:
    fresh = Constraint.regex("[a-c]{2,9}z")
    assert engine.compile(fresh).matcher().fault == ""
    job = engine.submit([7], constraint=fresh, max_new_tokens=9)
    engine.step()
    assert engine.stats().running == 1, "a request with a compiled grammar is admitted in the next step"
    stepped(engine, [job])


def test_grammar_in_use_is_kept_beyond_the_cache_limit() -> None:
    with make_engine(Setup(k=0, max_rows=2), grammar_cache_bytes=1) as engine:
        assert "grammars: compiled in this process, without limits on time and memory" in engine.notes
        assert engine.stats().grammars.grammars == 0, "a grammar that no job uses is kept"
        requested = Constraint.regex("[a-d]{30,}")
        jobs = [engine.submit([7], constraint=requested, max_new_tokens=20) for _ in range(2)]
        waited(lambda: engine.stats().grammars.grammars == 1, "the compile goes on")
        engine.step()
        used = engine.stats().grammars
        assert (used.grammars, used.nbytes > 1) == (1, True)
        assert engine.compile(requested) is engine.compile(requested), "a grammar in use was dropped"
        engine.cancel(jobs[0])
        engine.step()
        assert engine.stats().grammars.grammars == 1
        stepped(engine, jobs)
        left = engine.stats().grammars
        assert (left.grammars, left.nbytes, jobs[1].tokens) == (0, 0, plain([7], 20, requested).tokens)


def test_a_request_that_a_full_queue_refuses_begins_no_compile_and_close_ends_compiles() -> None:
    engine = make_engine(SETUP, max_queued=1)
    job = engine.submit([7], constraint=GREEDY, max_new_tokens=4)
    pid = busy_worker(compiler_of(engine))
    with pytest.raises(RuntimeError, match=r"EngineConfig\.max_queued"):
        engine.submit([7], constraint=SLOW, max_new_tokens=4)
    grammars = engine.stats().grammars
    assert (grammars.misses, grammars.running, grammars.workers_started) == (len(CONSTRAINTS), 1, 1)
    engine.close()
    waited(lambda: gone(pid), "a worker outlives its engine")
    assert (job.finish_reason, job.error) == (FinishReason.CANCELLED, "the engine was closed")
