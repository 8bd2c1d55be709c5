"""Constraints that begin after a marker: the grammar applies from its end, anywhere in a chain of drafts, and rollback reverts it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from stepgraph import FinishReason
from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, MaskStatus, Matcher, Vocabulary
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.matchers.marker import Marker, MarkerMatcher
from tests.helpers.c_library import EACH_BACKEND
from tests.helpers.grammar_texts import fill_mask
from tests.helpers.oracles import accepts
from tests.helpers.toy_engines import CONSTRAINTS, CONTROL, VOCABULARY, Setup, compiled, finish, plain, shared_engine

TOKENS = [b"a", b"b", b"aa", b"ab", b"aab", b"ba", b"bab", b"x", b"bx", b"<think>", b"</think>", b""]
SMALL = Vocabulary(TOKENS, stop_token_ids=[11], logits_width=40, control_token_ids=[9, 10])
A, B, AA, AB, AAB, BA, BAB, X, BX, OPEN, CLOSE, STOP = range(12)
TEXT = [A, B, AA, AB, AAB, BA, BAB, X, BX]


def small(marker: str | list[int], inner: str = "x+", backend: BackendChoice = "xgrammar") -> CompiledConstraint:
    return GrammarCompiler(SMALL, max_threads=1).compile(Constraint.regex(inner, backend).after(marker))


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_before_the_marker_all_text_is_legal_and_after_it_the_grammar_applies(backend: BackendChoice) -> None:
    matcher, after_aa = small("aab", backend=backend).matcher(), [A, B, AA, AB, AAB, X]
    assert fill_mask(matcher, 2) == (MaskStatus.OK, TEXT)
    for token_id, legal in [(A, TEXT), (A, after_aa), (AA, after_aa), (B, [X]), (X, [X, STOP])]:
        assert matcher.accept_token(token_id)
        assert fill_mask(matcher, 2) == (MaskStatus.OK, legal)
    assert matcher.accept_token(STOP) and fill_mask(matcher, 2) == (MaskStatus.TERMINATED, [])


def legal_by_definition(text: bytes, marker: bytes) -> list[int]:
    """The legal tokens after a text without the marker: those that do not extend beyond its end."""
    return [i for i in TEXT if marker not in (text + TOKENS[i])[:-1]]


def legal_in_state(marker: str | Sequence[int], state: int) -> list[int]:
    """The legal tokens where the text ends with so many bytes or ids of the marker."""
    if isinstance(marker, str):
        return legal_by_definition(marker.encode()[:state], marker.encode())
    return sorted({*TEXT, marker[0], marker[state]})


@pytest.mark.parametrize("marker", ["a", "ab", "aab", "abab", "aaba", "bb"])
def test_only_tokens_that_extend_beyond_the_marker_are_forbidden(marker: str) -> None:
    random, ends = Random(3), 0
    for _ in range(60):
        matcher, text = small(marker).matcher(), b""
        for _ in range(12):
            status, legal = fill_mask(matcher, 2)
            assert (status, legal) == (MaskStatus.OK, legal_by_definition(text, marker.encode()))
            assert [i for i in range(40) if _accepts(matcher, i)] == legal
            choice = random.choice(legal)
            assert matcher.accept_token(choice)
            text += TOKENS[choice]
            if marker.encode() in text:
                assert text.endswith(marker.encode()) and fill_mask(matcher, 2) == (MaskStatus.OK, [X])
                ends += 1
                break
    assert ends > 20


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("marker", ["a", "aab", "abab", [OPEN, A, CLOSE]], ids=str)
def test_after_the_limit_only_tokens_are_legal_that_continue_the_marker(marker: Any, backend: BackendChoice) -> None:
    constraint, random = Constraint.regex("x+", backend).after(marker, limit=4), Random(5)
    compiled_small, parts = GrammarCompiler(SMALL, max_threads=1).compile(constraint), [TOKENS[i] for i in range(12)]
    for _ in range(30):
        matcher, text, ids, count = compiled_small.matcher(), b"", list[int](), 0
        while True:
            legal = fill_mask(matcher, 2)[1]
            assert [i for i in range(40) if _accepts(matcher, i)] == legal
            if isinstance(marker, str):
                held = next(size for size in range(len(marker), -1, -1) if text.endswith(marker.encode()[:size]))
                rest, free = marker.encode()[held:], legal_by_definition(text, marker.encode())
                expected = free if count < 4 else [i for i in TEXT if rest.startswith(parts[i])]
            else:
                held = next(size for size in range(len(marker), -1, -1) if ids[len(ids) - size :] == marker[:size])
                rest, expected = marker[held:], sorted({*TEXT, OPEN, marker[held]} if count < 4 else {marker[held]}) if held < 3 else []
            if not rest:
                assert legal == [X]
                break
            assert legal == expected
            token = random.choice(legal)
            assert matcher.accept_token(token)
            text, ids, count = text + parts[token], [*ids, token], count + 1
        assert count <= 4 + len(marker)


def test_a_marker_with_a_limit_must_be_one_that_tokens_can_write() -> None:
    with pytest.raises(ValueError, match=r"Constraint\.marker: got b'a%' with a limit, expected a marker .*; none begins with byte 1"):
        GrammarCompiler(SMALL).compile(Constraint.regex("x").after("a%", limit=3))
    GrammarCompiler(SMALL).compile(Constraint.regex("x").after("a%"))


@pytest.mark.parametrize("limit", [0, -1, True, 2.0, 1 << 31, "3"])
def test_invalid_limits_are_rejected(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"Constraint\.marker_limit: got"):
        Constraint.regex("a").after("b", limit=limit)
    with pytest.raises(ValueError, match=r"Constraint\.marker_limit: got 5 without a marker"):
        Constraint("regex", "a", marker_limit=5)


def _accepts(matcher: Matcher, token_id: int) -> bool:
    accepted = matcher.accept_token(token_id)
    if accepted:
        matcher.rollback(1)
    return accepted


def test_a_marker_of_ids_may_contain_control_tokens() -> None:
    matcher = small([OPEN, A, CLOSE]).matcher()
    assert fill_mask(matcher, 2) == (MaskStatus.OK, sorted([*TEXT, OPEN]))
    for token_id, legal in [
        (X, [*TEXT, OPEN]),
        (OPEN, [*TEXT, OPEN]),
        (OPEN, [*TEXT, OPEN]),
        (A, [*TEXT, OPEN, CLOSE]),
        (B, [*TEXT, OPEN]),
        (OPEN, [*TEXT, OPEN]),
        (A, [*TEXT, OPEN, CLOSE]),
        (CLOSE, [X]),
    ]:
        assert matcher.accept_token(token_id)
        assert fill_mask(matcher, 2) == (MaskStatus.OK, sorted(legal))
    assert not matcher.accept_token(CLOSE) and matcher.accept_token(X)


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("marker", ["aab", [OPEN, CLOSE]], ids=str)
def test_masks_after_rollbacks_are_those_of_a_fresh_matcher(marker: Any, backend: BackendChoice) -> None:
    constraint, random, num_taken_back = small(marker, "(x|ab){2,5}", backend), Random(8), 0
    matcher, history = constraint.matcher(), list[int]()
    for _ in range(400):
        _, legal = fill_mask(matcher, 2)
        token_id = random.choice([*legal, random.randrange(40)]) if random.random() < 0.7 else CLOSE if OPEN in history[-1:] else B
        assert matcher.accept_token(token_id) == (token_id in legal)
        history += [token_id] if token_id in legal else []
        if random.random() < 0.4 or not legal:
            begun = matcher.past_marker if isinstance(matcher, MarkerMatcher) else False
            count = random.randint(0, min(len(history), 6))
            matcher.rollback(count)
            del history[len(history) - count :]
            num_taken_back += begun and not (isinstance(matcher, MarkerMatcher) and matcher.past_marker)
        fresh = constraint.matcher()
        assert all(fresh.accept_token(token) for token in history)
        assert fill_mask(matcher, 2) == fill_mask(fresh, 2)
    assert num_taken_back > 5 or not isinstance(matcher, MarkerMatcher), "the image of an automaton contains the marker"


@pytest.mark.parametrize(
    ("drafter", "draft_masks", "backend"),
    [("perfect", True, "xgrammar"), ("perfect", True, "llguidance"), ("fair", True, "xgrammar"), ("perfect", False, "llguidance")],
)
def test_a_marker_that_ends_inside_the_drafts_takes_effect_there(drafter: str, draft_masks: bool, backend: BackendChoice) -> None:
    engine = shared_engine(Setup(k=4, drafter=drafter, draft_masks=draft_masks))
    requests = []
    for index in range(8):
        free = plain([index, 7], 12, Constraint.regex("[^]{60,}")).tokens
        start = index % 5
        marker = VOCABULARY.decode(free[start : start + 2]).decode("utf-8", "ignore")
        inner = Constraint.json_schema(CONSTRAINT_SCHEMA, backend=backend)
        requests.append(([index, 7], inner, inner.after(marker), marker))
    jobs = [engine.submit(prompt, constraint=constraint, max_new_tokens=60) for prompt, _, constraint, _ in requests]
    finish(engine)
    switched = 0
    for job, (prompt, inner, constraint, marker) in zip(jobs, requests, strict=True):
        answer = plain(prompt, 60, constraint)
        assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason), job.error
        text = VOCABULARY.decode(job.tokens)
        before, found, after = text.partition(marker.encode())
        if found and job.finish_reason != FinishReason.LENGTH:
            switched += 1
            assert accepts(compiled(inner), _split(job.tokens, len(before) + len(found)), finished=True), after  # type: ignore[arg-type]
    assert switched >= 6
    assert (drafter, draft_masks) != ("perfect", True) or sum(job.num_accepted_drafts for job in jobs) > sum(job.rounds for job in jobs)


CONSTRAINT_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}


def _split(tokens: list[int], size: int) -> list[int]:
    """The tokens after the first `size` bytes, which end at a token boundary."""
    index = next(index for index in range(len(tokens) + 1) if len(VOCABULARY.decode(tokens[:index])) >= size)
    assert len(VOCABULARY.decode(tokens[:index])) == size
    return tokens[index:]


def test_a_control_token_as_the_marker_in_the_engine() -> None:
    engine = shared_engine(Setup(k=3, drafter="illegal"))  # drafts CONTROL wherever it is legal
    constraint = CONSTRAINTS[1].after([CONTROL])
    jobs = [engine.submit([index], constraint=constraint, max_new_tokens=60) for index in range(4)]
    finish(engine)
    for index, job in enumerate(jobs):
        answer = plain([index], 60, constraint)
        assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason)
        assert STOP_ID not in job.tokens[: job.tokens.index(CONTROL) if CONTROL in job.tokens else None]


STOP_ID = VOCABULARY.stop_token_ids[0]


@pytest.mark.parametrize("marker", ["", [], [-1], [True], ["a"], 5.0])
def test_invalid_markers_are_rejected(marker: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Constraint.regex("a").after(marker)


def test_marker_ids_outside_the_vocabulary_are_rejected_at_compilation() -> None:
    for ids in ([40], [12], [A, STOP]):
        with pytest.raises(ValueError, match=r"Constraint.marker: got id \d+, expected an id below 12 that is not a stop token"):
            small(ids)


def test_states_with_equal_masks_share_one() -> None:
    long = Marker("x" + "ab" * 100, SMALL)
    assert long.masks.shape == (2, 2) and long.nbytes < 4000, "one mask for the state before the last letter, one for all others"
    assert np.shares_memory(long.mask(1, 9), long.mask(7, 9)) and not np.shares_memory(long.mask(7, 9), long.mask(200, 9))


@pytest.mark.parametrize(
    "marker", ["a", "b", "ab", "ba", "aba", "abab", "xabx", "aabaab", (OPEN, A, CLOSE), (A, B), (A, OPEN, A, A)], ids=str
)
def test_masks_and_next_states_of_each_state(marker: str | tuple[int, ...]) -> None:
    made = Marker(marker, SMALL)
    for state in range(made.complete):
        legal = legal_in_state(marker, state)
        assert legal == [token_id for token_id in range(40) if int(made.mask(state, 0)[token_id // 32]) >> (token_id % 32) & 1]
        for token_id in legal:
            whole: Any = marker.encode() if isinstance(marker, str) else marker
            text = whole[:state] + (TOKENS[token_id] if isinstance(marker, str) else (token_id,))
            held = [count for count in range(min(len(whole), len(text)) + 1) if text[len(text) - count :] == whole[:count]]
            assert made.next_state(state, token_id) == max(held)


def test_a_marker_that_is_too_long_or_not_unicode_is_rejected() -> None:
    for marker in ("x" * 1001, [OPEN] * 1001):
        with pytest.raises(ValueError, match=r"Constraint\.marker: got 1001 characters or ids, expected at most 1000"):
            Constraint.regex("a").after(marker)
    with pytest.raises(ValueError, match=r"Constraint\.marker: got half of a surrogate pair at position 1, expected text"):
        Constraint.regex("a").after("x\ud800")
