"""`check_masks`: a mask and an `accept_token` that are of two minds are one request's error, told as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepgraph import Engine, EngineConfig, FinishReason
from stepgraph.runtime.models.toy import ToyDraft
from stepgraph.sampling.grammar import Constraint, GrammarCompiler, MaskStatus
from stepgraph.sampling.grammar.matchers.checked import ROWS_KEPT, CheckedMatcher
from stepgraph.sampling.grammar.xgrammar_lib.matcher import XGrammarMatcher
from tests.helpers.grammar_texts import EXAMPLES, PRINTABLE, STOP, encode, filled
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, plain

CHECKED = GrammarCompiler(PRINTABLE, max_threads=1, check_masks=True)
A = encode(b"a")[0]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_matcher_that_is_right_is_left_alone(kind: str) -> None:
    constraint, good, bad = EXAMPLES[kind]
    matcher = CHECKED.compile(constraint).matcher()
    assert isinstance(matcher, CheckedMatcher)
    for token_id in [*encode(bad), *encode(good), STOP]:
        before = filled(matcher)
        if matcher.accept_token(token_id):
            matcher.rollback(1)
            assert filled(matcher) == before
    matcher = CHECKED.compile(constraint).matcher()
    for token_id in [*encode(good), STOP]:
        assert filled(matcher)[0] != MaskStatus.FAULT and matcher.accept_token(token_id)
    assert matcher.fault == ""


@pytest.mark.parametrize("does", ["refuses", "takes"])
def test_a_disagreement_is_a_fault_with_both_sides_in_it(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XGrammarMatcher, "accept_token", lambda self, token_id: does == "takes")
    matcher = CHECKED.compile(Constraint.regex("a+" if does == "refuses" else "b+")).matcher()
    filled(matcher)
    assert matcher.accept_token(A) == (does == "takes")
    says = "forbids" if does == "takes" else "allows"
    assert matcher.fault == f"check_masks: the mask of xgrammar {says} token {A} behind 0 tokens, accept_token {does} it"
    assert filled(matcher) == (MaskStatus.FAULT, []) and not matcher.accept_token(A)


def test_a_token_behind_a_rollback_is_held_against_the_mask_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = CHECKED.compile(Constraint.regex("a{3}b*")).matcher()
    for _ in range(3):
        filled(matcher)
        assert matcher.accept_token(A)
    filled(matcher)
    matcher.rollback(2)
    monkeypatch.setattr(XGrammarMatcher, "accept_token", lambda self, token_id: False)
    assert not matcher.accept_token(A)
    assert "allows" in matcher.fault and "behind 1 tokens" in matcher.fault


def test_only_the_latest_masks_are_kept() -> None:
    matcher: Any = CHECKED.compile(Constraint.regex("a*")).matcher()
    for _ in range(100):
        filled(matcher)
        assert matcher.accept_token(A)
    assert len(matcher._rows) <= ROWS_KEPT


@pytest.mark.parametrize("check", [True, False])
def test_in_the_engine_it_is_one_requests_error(check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request's masks lack a token that its grammar takes. Without the check it is a draft like any other."""
    config = EngineConfig(
        max_rows=2,
        num_speculative_tokens=2,
        max_length=96,
        backend="tape",
        greedy_only=True,
        draft_masks=False,
        host_link="python",
        compile_isolation="none",
        check_masks=check,
    )
    with Engine(TARGET, ToyDraft(TARGET, 1.0), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        asked = Constraint.regex("[^]{9}")
        assert all(engine.compile(constraint) for constraint in (asked, CONSTRAINTS[4]))
        # A drafter that knows no masks proposes the token that the mask lacks.
        prompt = next([place] for place in range(99) if plain([place], 2).tokens == plain([place], 2, asked).tokens)
        wanted = plain(prompt, 9, asked).tokens[1]
        real = XGrammarMatcher.fill_next_token_bitmask

        def without_one(self: XGrammarMatcher, masks: torch.Tensor, index: int) -> MaskStatus:
            status = real(self, masks, index)
            if self is victim and self.num_accepted == 1:
                masks[index, wanted // 32] &= ~(1 << wanted % 32)
            return status

        bad = engine.submit(prompt, constraint=asked, max_new_tokens=9)
        good = engine.submit([5], constraint=CONSTRAINTS[4], max_new_tokens=20)
        engine._scheduler.admit()
        row: Any = next(request for request in engine._scheduler.active if request.job is bad).matcher
        victim = row.matcher._inner if check else row.matcher
        monkeypatch.setattr(XGrammarMatcher, "fill_next_token_bitmask", without_one)
        for _ in engine.stream():
            pass
        assert good.tokens == plain([5], 20, CONSTRAINTS[4]).tokens
        if check:
            assert bad.finish_reason == FinishReason.ERROR
            assert f"the mask of xgrammar forbids token {wanted} behind 1 tokens, accept_token takes it" in bad.error
        else:
            assert bad.finish_reason != FinishReason.ERROR and bad.tokens[1] != wanted


def test_a_checked_engine_says_what_an_unchecked_one_says() -> None:
    config = EngineConfig(max_rows=4, num_speculative_tokens=3, max_length=96, backend="tape", greedy_only=True, check_masks=True)
    with Engine(TARGET, ToyDraft(TARGET, 0.7), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        jobs = [engine.submit([place], constraint=constraint, max_new_tokens=40) for place, constraint in enumerate(CONSTRAINTS)]
        for _ in engine.stream():
            pass
        for place, (job, constraint) in enumerate(zip(jobs, CONSTRAINTS, strict=True)):
            answer = plain([place], 40, constraint)
            assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason), job.error


@pytest.mark.parametrize("field", ["check_masks", "grammar_backend"])
def test_settings_of_no_meaning_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"EngineConfig\.{field}: got 'yes', expected"):
        EngineConfig(**{field: "yes"})  # type: ignore[arg-type]
