"""Grammars over small vocabularies: legal tokens, mask statuses, rollback, and errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, GrammarLimits, MaskStatus, Vocabulary
from stepgraph.sampling.grammar.compile.backends import Grammar
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.native import why_not
from tests.helpers.c_library import EACH_BACKEND
from tests.helpers.grammar_texts import COMPILER, CONTROL, EXAMPLES, PERSON, PRINTABLE, STOP, accepts, encode, fill_mask, matcher_of


@pytest.mark.parametrize("kind", EXAMPLES)
def test_each_kind_accepts_its_texts_only(kind: str) -> None:
    constraint, good, bad = EXAMPLES[kind]
    assert accepts(constraint, good)
    assert not accepts(constraint, bad)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_mask_status_along_a_text(backend: BackendChoice) -> None:
    matcher = matcher_of(Constraint.regex("ab?", backend))
    a, b = encode(b"a")[0], encode(b"b")[0]
    assert fill_mask(matcher) == (MaskStatus.OK, [a])
    assert matcher.accept_token(a)
    assert fill_mask(matcher) == (MaskStatus.OK, sorted([b, STOP]))
    assert matcher.accept_token(b)
    assert fill_mask(matcher) == (MaskStatus.COMPLETE, [STOP])
    assert matcher.accept_token(STOP)
    assert fill_mask(matcher) == (MaskStatus.TERMINATED, [])
    assert not matcher.accept_token(a)
    matcher.rollback(2)
    assert fill_mask(matcher) == (MaskStatus.OK, sorted([b, STOP]))
    matcher.rollback(1)
    assert fill_mask(matcher) == (MaskStatus.OK, [a])


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_dead_end_where_no_token_continues(backend: BackendChoice) -> None:
    vocabulary = Vocabulary([b"a", b"b", b""], stop_token_ids=[2])
    matcher = GrammarCompiler(vocabulary).compile(Constraint.regex("a(b|ac)", backend)).matcher()
    assert matcher.accept_token(0) and matcher.accept_token(0)
    for _ in range(2):
        assert fill_mask(matcher, 1) == (MaskStatus.DEAD_END, [])
        assert not any(matcher.accept_token(token_id) for token_id in range(3)) and not matcher.fault
        matcher.rollback(1)
        assert fill_mask(matcher, 1) == (MaskStatus.OK, [0, 1])
        assert matcher.accept_token(0)


def test_library_error_is_a_fault_with_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("planted")

    matcher = matcher_of(Constraint.regex("a+", "xgrammar"))
    monkeypatch.setattr(matcher.library_matcher, "fill_next_token_bitmask", fail, raising=False)
    assert fill_mask(matcher) == (MaskStatus.FAULT, [])
    assert not matcher.accept_token(encode(b"a")[0])
    assert matcher.fault == "fill_next_token_bitmask: planted"


def test_slow_step_is_a_fault() -> None:
    compiler = GrammarCompiler(PRINTABLE, max_threads=1, limits=GrammarLimits(step_seconds=0.02))
    matcher = compiler.compile(Constraint.regex("((a{1,50}){1,50}){1,50}", "xgrammar")).matcher()
    steps = 0
    while matcher.accept_token(encode(b"a")[0]):
        steps += 1
    assert 5 < steps < 500
    assert fill_mask(matcher) == (MaskStatus.FAULT, [])
    assert "one step of the grammar took" in matcher.fault


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("token_id", [-1, len(PRINTABLE.tokens), 2**31, 2**32 + 65, 10**20])
def test_out_of_range_ids_are_not_accepted(token_id: int, backend: BackendChoice) -> None:
    matcher = matcher_of(Constraint.regex("[ -~]*", backend))
    before = fill_mask(matcher)
    assert matcher.accept_token(token_id) is False
    assert fill_mask(matcher) == before


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_padding_and_control_tokens_are_never_legal(backend: BackendChoice) -> None:
    vocabulary = Vocabulary([b'"', b"a", b"<", CONTROL, b"", b"</s>"], stop_token_ids=[5], logits_width=71, control_token_ids=[3])
    matcher = GrammarCompiler(vocabulary).compile(Constraint.json_schema({"type": "string"}, backend=backend)).matcher()
    for token_id, legal in [(0, [0]), (1, [0, 1, 2]), (2, [0, 1, 2]), (0, [0, 1, 2])]:
        assert fill_mask(matcher, 3) == (MaskStatus.OK, legal)
        assert not any(matcher.accept_token(never) for never in (3, 4, 6, 70))
        assert matcher.accept_token(token_id)
    assert fill_mask(matcher, 3) == (MaskStatus.COMPLETE, [5])
    assert vocabulary.decode([0, 3, 1, 5]) == b'"a'


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_bits_beyond_the_vocabulary_are_always_clear(backend: BackendChoice) -> None:
    vocabulary = Vocabulary([bytes([65 + index]) for index in range(26)], stop_token_ids=[25])
    matcher = GrammarCompiler(vocabulary).compile(Constraint.regex("[A-Z]*", backend)).matcher()
    assert fill_mask(matcher, 1) == (MaskStatus.OK, list(range(26)))


walks = st.lists(st.tuples(st.sampled_from(["accept", "accept", "accept", "illegal", "rollback"]), st.integers(0, 2**16)), max_size=40)


@pytest.mark.parametrize("kind", EXAMPLES)
@given(walk=walks)
def test_masks_after_rollbacks_equal_those_of_a_fresh_matcher(kind: str, walk: list[tuple[str, int]]) -> None:
    constraint, history = EXAMPLES[kind][0], list[int]()
    matcher = matcher_of(constraint)
    for action, number in walk:
        legal = fill_mask(matcher)[1]
        if action == "rollback":
            count = number % (len(history) + 1)
            matcher.rollback(count)
            del history[len(history) - count :]
        elif action == "illegal":
            token_id = number % PRINTABLE.logits_width
            assert matcher.accept_token(token_id) == (token_id in legal)
            history += [token_id] if token_id in legal else []
        elif legal:
            assert matcher.accept_token(legal[number % len(legal)])
            history.append(legal[number % len(legal)])
        fresh = matcher_of(constraint)
        assert all(fresh.accept_token(token_id) for token_id in history)
        assert fill_mask(matcher) == fill_mask(fresh)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_rollback_of_any_length(backend: BackendChoice) -> None:
    matcher = matcher_of(Constraint.regex("a*", backend))
    start = fill_mask(matcher)
    assert all(matcher.accept_token(encode(b"a")[0]) for _ in range(500))
    matcher.rollback(500)
    assert fill_mask(matcher) == start


@pytest.mark.parametrize("backend", EACH_BACKEND)
@given(options=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4, unique=True))
def test_choice_accepts_arbitrary_strings(backend: BackendChoice, options: list[str]) -> None:
    options = [option.encode("utf-8", "ignore").decode() or "x" for option in options]
    vocabulary = Vocabulary([*(bytes([code]) for code in range(256)), b""], stop_token_ids=[256])
    compiled = GrammarCompiler(vocabulary, max_threads=1).compile(Constraint.choice(options, backend))
    for option in options:
        matcher = compiled.matcher()
        assert all(matcher.accept_token(byte) for byte in option.encode()) and matcher.accept_token(256)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Vocabulary([], [0]),
        lambda: Vocabulary(["a"], [0]),  # type: ignore[list-item]
        lambda: Vocabulary([b"a"], []),
        lambda: Vocabulary([b"a"], [1]),
        lambda: Vocabulary([b"a"], [True]),
        lambda: Vocabulary([b"a"], [0], control_token_ids=[-1]),
        lambda: Vocabulary([b"a", b"b"], [0], logits_width=1),
        lambda: Vocabulary([b"a"], [0]).decode([1]),
        lambda: GrammarCompiler(PRINTABLE, cache_bytes=0),
        lambda: GrammarLimits(step_seconds=0.0),
        lambda: COMPILER.compile("a+"),  # type: ignore[arg-type]
    ],
)
def test_malformed_vocabularies_raise(build: Any) -> None:
    with pytest.raises(ValueError, match=r": got .*, expected "):
        build()


def test_cache_is_bounded_and_dropped_grammars_stay_usable() -> None:
    first = GrammarCompiler(PRINTABLE).compile(Constraint.regex("a+"))
    compiler = GrammarCompiler(PRINTABLE, max_threads=1, cache_bytes=3 * first.nbytes)
    first = compiler.compile(Constraint.regex("a+"))
    matcher = first.matcher()
    assert compiler.compile(Constraint.regex("a+")) is first
    for index in range(5):
        compiler.compile(Constraint.regex(f"b{{{index + 1}}}"))
        assert compiler.stats.nbytes <= 3 * first.nbytes
    assert 1 <= compiler.stats.grammars <= 3 and compiler.stats.dropped >= 3
    assert compiler.compile(Constraint.regex("a+")) is not first
    del first
    assert matcher.accept_token(encode(b"a")[0]) and fill_mask(matcher)[0] is MaskStatus.OK


def test_threads_share_one_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, calls, results = GrammarCompiler(PRINTABLE, max_threads=1), list[Constraint](), list[object]()
    library, gate = compiler._backends._builder("xgrammar" if why_not() else "automaton"), threading.Barrier(9)
    build = library.build

    def counted(constraint: Constraint, worker: CompileWorker | None) -> Grammar:
        calls.append(constraint)
        return build(constraint, worker)

    def work() -> None:
        gate.wait()
        results.append(compiler.compile(Constraint.json_schema(PERSON)))

    monkeypatch.setattr(library, "build", counted)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(results) == 8 and len({id(result) for result in results}) == 1


def test_failed_compile_is_not_cached() -> None:
    compiler = GrammarCompiler(PRINTABLE, max_threads=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="constraint regex"):
            compiler.compile(Constraint.regex("("))
    assert compiler.stats.grammars == 0
