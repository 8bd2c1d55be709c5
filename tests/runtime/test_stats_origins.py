"""Origin of each token: the same in events, jobs and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Constraint, Engine, EngineConfig, Origin, StepEvent
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.request import describe_drafts
from tests.graphs.test_proposing import asks_with_texts
from tests.helpers.oracles import greedy
from tests.helpers.proposers import draft_ids_then_noise
from tests.helpers.toy_engines import COMPILER, STOP, VOCABULARY, Setup, shared_engine
from tests.laws.test_greedy_oracle import Ask, submit

TARGET = ToyTarget(VOCABULARY.logits_width, seed=3, biases={STOP: -9.0})
LETTERS = {"T": Origin.TARGET, "D": Origin.DRAFT, "L": Origin.LOOK_UP, "F": Origin.FORCED}


def engine(draft: Any, k: int = 3, **options: Any) -> Engine:
    config = EngineConfig(
        max_rows=2,
        num_speculative_tokens=k,
        draft_length=k,
        max_length=96,
        backend="tape",
        eager=True,
        compile_isolation="none",
        rounds_in_flight=1,
        **options,
    )
    return Engine(TARGET, draft, vocabulary=VOCABULARY, config=config)


def spelled(event: StepEvent) -> str:
    return "".join(letter for origin in event.origins for letter, its in LETTERS.items() if its is origin)


def rounds(made: Engine, *jobs: Any) -> list[list[str]]:
    """By job, the origins of each round, one letter per token."""
    output: dict[int, list[str]] = {job.id: [] for job in jobs}
    for event in made.stream():
        output[event.job_id].append(spelled(event))
    for job in jobs:
        assert "".join(output[job.id]) == "".join(letter for origin in job.origins for letter, its in LETTERS.items() if its is origin)
        assert len(job.origins) == len(job.tokens)
    return [output[job.id] for job in jobs]


def test_look_up_resumes_after_a_wrong_token_in_draft_ids() -> None:
    """The sixth token of draft_ids is wrong, and a match needs eight tokens: look-up drafts end at it and resume eight tokens later."""
    prompt = [*range(20, 30)]
    expected = greedy(TARGET, prompt, 25, (), None, len(VOCABULARY.tokens)).tokens
    given_ids = [*expected[:5], (expected[5] + 1) % 90, *expected[6:]]
    with engine(ToyDraft(TARGET, 1.0), look_up=8) as made:
        job = made.submit(prompt, max_new_tokens=25, draft_ids=given_ids)
        plain = made.submit(prompt, max_new_tokens=9)
        copied, drafted = rounds(made, job, plain)
    assert job.tokens == expected
    assert copied == ["LLLT", "LT", "DDDT", "DDDT", "LLLT", "LLLT", "LLL"], "all but the first and the last round draft three"
    assert drafted == ["T", "DDDT", "DDDT"]


def test_forced_drafts_take_precedence_over_looked_up_ones() -> None:
    """A token that is forced and looked up counts as forced; the look-up continues after it: the prompt contains "ef12"."""
    constraint = Constraint.regex("abcdef[12]{3}")
    e, f, one, two = (VOCABULARY.tokens.index(letter) for letter in (b"e", b"f", b"1", b"2"))

    def answer(prompt: list[int]) -> list[int]:
        return greedy(TARGET, prompt, 9, (), COMPILER.compile(constraint), len(VOCABULARY.tokens)).tokens

    prompt = next(each for each in ([first, e, f, one, two] for first in range(90)) if answer(each)[6:8] == [one, two])
    with engine(ToyDraft(TARGET, 0.0), forced_drafts=True, look_up=1) as made:
        job = made.submit(prompt, constraint=constraint, max_new_tokens=9)
        (output,) = rounds(made, job)
    assert output == ["T", "FFFT", "FLLT"]


def test_new_request_in_a_row_inherits_no_looked_up_drafts() -> None:
    with engine(ToyDraft(TARGET, 1.0), look_up=1) as made:
        former = made.submit([1, 2], max_new_tokens=40, draft_ids=greedy(TARGET, [1, 2], 40, (), None, len(VOCABULARY.tokens)).tokens)
        while len(former.tokens) < 8:
            made.step()
        made.cancel(former)
        made.step()
        before = made.stats().drafts.looked_up
        job = made.generate([3], max_new_tokens=1)
        assert job.origins == [Origin.TARGET] and made.stats().drafts.looked_up == before > 0


def test_new_request_in_a_row_inherits_no_forced_drafts() -> None:
    """The first rounds of the new request are unconstrained; then another row has a grammar."""
    constraint = Constraint.choice(["total currency"])
    with engine(ToyDraft(TARGET, 1.0), forced_drafts=True) as made:
        made.compile(constraint)
        former = made.submit([5, 6], constraint=constraint, max_new_tokens=12)
        while len(former.tokens) < 2:
            made.step()
        made.cancel(former)
        made.step()
        job = made.submit([1, 2], max_new_tokens=30)
        while len(job.tokens) < 6:
            made.step()
        beside = made.submit([5, 6], constraint=constraint, max_new_tokens=12)
        output: dict[int, list[StepEvent]] = {job.id: [], beside.id: []}
        for event in made.stream():
            output[event.job_id].append(event)
    assert Origin.FORCED in beside.origins and len(output[job.id]) > len(output[beside.id]), "both requests ran at the same time"
    assert set(job.origins) == {Origin.TARGET, Origin.DRAFT} and not any(event.drafts.forced for event in output[job.id])


@pytest.mark.parametrize(("draft", "origin"), [("ngram", "L"), (draft_ids_then_noise, "D")])
def test_origin_of_drafts_from_a_single_proposer(draft: Any, origin: str) -> None:
    """Drafts of a look-up are LOOK_UP, those of a function DRAFT, whichever request had the row before."""
    expected, constraint = greedy(TARGET, [1, 2], 9, (), None, len(VOCABULARY.tokens)).tokens, Constraint.regex("abcdef[0-9]{3}")
    with engine(draft) as made:
        former = made.submit([5, 6], constraint=Constraint.choice(["total currency"]), max_new_tokens=12)
        while len(former.tokens) < 2:
            made.step()
        made.cancel(former)
        made.step()
        made.compile(constraint)
        before = made.stats()
        job = made.submit([1, 2], max_new_tokens=9, draft_ids=expected)
        beside = made.submit([5, 6], constraint=constraint, max_new_tokens=12)
        output, _ = rounds(made, job, beside)
        after = made.stats()
    assert output == [3 * origin + "T", 3 * origin + "T", origin]
    assert (after.drafts.accepted_looked_up - before.drafts.accepted_looked_up > 0) == (origin == "L")


SETUPS = [
    Setup(k=6, drafter="half", look_up=1, forced_drafts=True, max_rows=2, eager=True),
    Setup(k=3, drafter="noise", max_rows=2, forced_drafts=True, eager=True),
    Setup(k=6, drafter="ngram", forced_drafts=True, eager=True),
]


def counts(made: Engine) -> list[int]:
    stats = made.stats()
    return [stats.tokens, stats.drafts.accepted, stats.drafts.accepted_forced, stats.drafts.accepted_looked_up, stats.drafts.looked_up]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@settings(max_examples=4)
@given(batch=st.lists(asks_with_texts(), min_size=1, max_size=5))
def test_origins_agree_with_every_count(setup: Setup, batch: Sequence[Ask]) -> None:
    made = shared_engine(setup)
    before, jobs, output = counts(made), [submit(made, ask) for ask in batch], list[StepEvent]()
    for event in made.stream():
        held = Counter(event.origins)
        assert len(event.origins) == len(event.tokens) and held[Origin.TARGET] <= 1
        assert event.num_accepted_drafts == len(event.tokens) - held[Origin.TARGET]
        assert Origin.TARGET not in event.origins[: event.num_accepted_drafts]
        assert (held[Origin.FORCED], held[Origin.LOOK_UP]) == (event.drafts.accepted_forced, event.drafts.accepted_looked_up)
        assert event.drafts.looked_up + event.drafts.forced <= made.limits.num_speculative_tokens
        output.append(event)
    for job in jobs:
        assert [origin for event in output if event.job_id == job.id for origin in event.origins] == job.origins
    total = Counter(origin for event in output for origin in event.origins)
    drafted = total.total() - total[Origin.TARGET]
    found = [after - former for after, former in zip(counts(made), before, strict=True)]
    offered = sum(event.drafts.looked_up for event in output)
    assert found == [total.total(), drafted, total[Origin.FORCED], total[Origin.LOOK_UP], offered]


def test_origins_are_strings_and_cached() -> None:
    assert [str(origin) for origin in describe_drafts(4, 3, 0b001, 0b010, 0)[1]] == ["forced", "look_up", "draft", "target"]
    assert describe_drafts(2, 2, 0, 0b10, 0)[1] == ("draft", "look_up") and describe_drafts(0, 0, 0, 0, 0)[1] == ()
    assert describe_drafts(3, 1, 0, 0, 0) is describe_drafts(3, 1, 0, 0, 0)
