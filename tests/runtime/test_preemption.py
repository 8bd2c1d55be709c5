"""Priorities, turns of tenants, and preemption: a preempted request continues with the tokens it would have had."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, Job, SamplingParams
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.runtime.preemption import PreemptingScheduler
from stepgraph.runtime.request import ActiveRequest
from stepgraph.sampling.grammar import GrammarLimits
from tests.helpers.stat_checks import check_invariants
from tests.helpers.toy_engines import VOCABULARY, Setup, finish, make_engine, shared_engine

PLAIN, DRAFTED = (Setup(k=k, greedy_only=False, max_rows=2, buckets=(2,)) for k in (0, 3))
SETUPS = {
    "plain": PLAIN,
    "drafted": DRAFTED,
    "unmasked": replace(DRAFTED, drafter="half", draft_masks=False, rounds_in_flight=3),
    "look-up": replace(DRAFTED, drafter="ngram"),
    "host": replace(DRAFTED, grammar_lane="host"),
    "Python link": replace(DRAFTED, grammar_lane="host", host_link="python"),
    "loops": replace(DRAFTED, loops=True),
    "eager": replace(DRAFTED, eager=True),
}
LASTING = SamplingParams(ignore_eos=True)
PENALTIES = SamplingParams(temperature=0, min_new_tokens=9, repetition_penalty=1.4, frequency_penalty=0.9, logprobs=True)
SAMPLED = SamplingParams(temperature=1.3, top_p=0.95, seed=11, presence_penalty=0.7)
LONG = Constraint.regex("([a-f]{3}-){12}")
EXPENSIVE = Constraint.lark('start: a*\na: "a" | "b" | c\nc: "a" c | "a"')
ASKS: list[dict[str, Any]] = [
    {"constraint": LONG},
    {"sampling": PENALTIES},
    {"sampling": SAMPLED, "num_speculative_tokens": 0},
    {"sampling": SAMPLED, "num_speculative_tokens": 0, "constraint": LONG},
    {"sampling": SamplingParams(stop="zz", ignore_eos=True)},
]
MOST = 40


def one_row(**config: Any) -> Engine:
    return make_engine(Setup(k=0, max_rows=1, buckets=(1,)), **config)


def started(jobs: list[Job]) -> list[int]:
    return sorted(range(len(jobs)), key=lambda index: jobs[index].submitted_at + (jobs[index].queue_seconds or 0.0))


@pytest.mark.parametrize(
    ("asks", "expected"),
    [
        ([(0, ""), (0, ""), (0, "")], [0, 1, 2]),
        ([(1, ""), (0, ""), (-1, ""), (0, "")], [2, 1, 3, 0]),
        ([(0, "a"), (0, "a"), (0, "a"), (0, "b"), (0, "c"), (0, "b")], [0, 3, 4, 1, 5, 2]),
        ([(1, "a"), (0, "a"), (1, "a"), (1, "b")], [1, 0, 3, 2]),
    ],
)
def test_waiting_requests_have_rows_by_priority_then_in_turns_of_tenants(asks: list[tuple[int, str]], expected: list[int]) -> None:
    with one_row() as engine:
        running = engine.submit([9], max_new_tokens=4)
        engine.step()
        jobs = [engine.submit([1, index], max_new_tokens=2, priority=p, tenant=tenant) for index, (p, tenant) in enumerate(asks)]
        finish(engine)
        assert running.finished and started(jobs) == expected


def test_a_long_queue_of_one_tenant_delays_no_other() -> None:
    with one_row() as engine:
        many = [engine.submit([1, index], max_new_tokens=2, tenant="many") for index in range(12)]
        for _ in range(4):
            engine.step()
        late = engine.submit([2], max_new_tokens=2, tenant="late")
        finish(engine)
        after = [job for job in many if job.submitted_at + (job.queue_seconds or 0) > late.submitted_at + (late.queue_seconds or 0)]
        assert len(after) >= 8


def test_turns_equal_those_found_by_a_search_of_all_requests() -> None:
    draws = Random(5)
    with make_engine(Setup(k=0, max_rows=3), preemption=True) as engine:
        for index in range(400):
            priority, tenant = draws.choice([0, 0, 1]), draws.choice("aabc")
            equal = [each for each in engine.queue.unfinished.values() if each.job.priority == priority]
            waiting = [each.order[1] for each in equal if each in engine.queue.waiting]
            present = max([min(waiting, default=0), *(each.order[1] for each in equal if each not in engine.queue.waiting)])
            own = [each.order[1] for each in equal if each in engine.queue.waiting and each.job.tenant == tenant]
            job = engine.submit([1, index % 90], max_new_tokens=draws.randint(1, 6), priority=priority, tenant=tenant)
            assert engine.queue.unfinished[job.id].order[1] == max([present, *(turn + 1 for turn in own)])
            if draws.random() < 0.2:
                engine.cancel(draws.choice(list(engine.queue.unfinished)))
            for _ in range(draws.choice([0, 0, 1, 2])):
                engine.step()


def test_a_submit_takes_no_more_operations_in_a_long_queue() -> None:
    counts = list[int]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        counts[-1] += event == "opcode"
        return trace

    with make_engine(Setup(k=0, max_rows=1)) as engine:
        for index in range(1025):
            before = sys.gettrace()
            if index in (32, 1024):
                counts.append(0)
                sys.settrace(trace)
            try:
                engine.submit([1, 2], max_new_tokens=2, tenant=f"tenant {index % 10}")
            finally:
                sys.settrace(before)
    assert 0 < counts[1] < 1.5 * counts[0], counts


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_preempted_request_keeps_its_place_before_later_ones_of_equal_priority(tenant: str) -> None:
    with one_row(preemption=True) as engine:
        early = [engine.submit([1, index], max_new_tokens=20, sampling=LASTING, priority=1, tenant="a") for index in range(3)]
        while len(early[-1].tokens) < 3:
            engine.step()
        late = [engine.submit([5], max_new_tokens=2, priority=1, tenant=tenant), engine.submit([6], max_new_tokens=2)]
        ended = [event.job_id for event in engine.stream() if event.finish_reason]
        assert early[-1].num_preemptions == 1 and ended == [late[1].id, early[-1].id, late[0].id]


def run_with_arrivals(engine: Engine, slow: list[Job], seed: int) -> list[Job]:
    """Submits requests of higher priority while the jobs in `slow` run."""
    draw, urgent = Random(seed), list[Job]()
    while engine.has_work:
        if draw.random() < 0.4 and not all(job.finished for job in slow):
            urgent.append(engine.submit([3, len(urgent) % 50], max_new_tokens=draw.randrange(1, 4), priority=-len(urgent) % 3 - 3))
        engine.step()
        check_invariants(engine.stats())
    return urgent


@functools.cache
def alone(prompt: tuple[int, ...], most: int, ask: int | None = None) -> Job:
    return shared_engine(PLAIN).generate(prompt, max_new_tokens=most, **({} if ask is None else ASKS[ask]))


SLOW = ("unmasked", "Python link", "eager")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SETUPS])
def test_preempted_requests_have_the_tokens_that_they_have_alone(name: str) -> None:
    preempted = [0] * len(ASKS)
    with make_engine(SETUPS[name], preemption=True) as engine:
        for seed in range(2):
            jobs = [engine.submit([5, index, 7], max_new_tokens=MOST, priority=(index + seed) % 2, **ask) for index, ask in enumerate(ASKS)]
            urgent = run_with_arrivals(engine, jobs, seed)
            for index, job in enumerate(jobs):
                expected = alone((5, index, 7), MOST, index)
                assert (job.tokens, job.finish_reason, job.error) == (expected.tokens, expected.finish_reason, "")
                assert job.text == expected.text and len(job.origins) == len(job.tokens)
                assert [each.masked for each in job.logprobs] == [each.masked for each in expected.logprobs]
                preempted[index] += job.num_preemptions
            for index, job in enumerate(urgent):
                assert job.tokens == alone((3, index % 50), job.max_new_tokens).tokens
            assert not engine._scheduler.active and not engine.queue.waiting
            assert len(engine._scheduler.rows) == 0
        lanes = engine.stats().lanes
        assert lanes.device + lanes.host == 2 * sum("constraint" in ask for ask in ASKS), "a preempted request is counted once"
    assert sum(preempted) > 8 and sum(map(bool, preempted)) >= 3, preempted


def test_a_request_takes_the_row_at_once_and_the_other_continues_after_it() -> None:
    with one_row(preemption=True) as engine:
        slow = engine.submit([4], max_new_tokens=40, sampling=SamplingParams(ignore_eos=True))
        while len(slow.tokens) < 5:
            engine.step()
        equal, urgent = engine.submit([5], max_new_tokens=3), engine.submit([6], max_new_tokens=3, priority=-1)
        while not urgent.finished:
            engine.step()
        assert not slow.finished and slow.num_preemptions == 1 and not equal.tokens and len(slow.tokens) < 12
        finish(engine)
        assert started([slow, equal])[0] == 1 or equal.finished
        expected = shared_engine(PLAIN).generate([4], max_new_tokens=40, sampling=SamplingParams(ignore_eos=True))
        assert slow.tokens == expected.tokens and slow.num_preemptions == 1


def test_tokens_that_a_preempted_request_finds_again_are_not_reported_as_cached() -> None:
    with one_row(preemption=True) as engine:
        slow = engine.submit([4] * 20, max_new_tokens=40, sampling=SamplingParams(ignore_eos=True))
        while len(slow.tokens) < 5:
            engine.step()
        reused = engine.stats().reused_tokens
        engine.submit([6], max_new_tokens=3, priority=-1)
        finish(engine)
        assert slow.num_preemptions == 1 and engine.stats().reused_tokens > reused and slow.num_cached_tokens == 0


@pytest.mark.parametrize("prompt", [4, 32])
def test_a_request_takes_pages_at_once_however_much_of_its_prompt_could_be_cached(prompt: int) -> None:
    with make_engine(replace(PLAIN, num_pages=12), preemption=True) as engine:  # of eight tokens
        slow = engine.submit([9] * 8, max_new_tokens=64, sampling=SamplingParams(ignore_eos=True))  # nine pages
        while len(slow.tokens) < 5:
            engine.step()
        queue_seconds = slow.queue_seconds
        urgent = engine.submit([index + 3 for index in range(prompt)], max_new_tokens=40 - prompt, priority=-1)  # five pages
        while not urgent.finished:
            engine.step()
        assert not slow.finished and slow.num_preemptions == 1
        finish(engine)
        assert slow.queue_seconds == queue_seconds and engine.stats().queue_seconds.count == 2, "it was queued once"


@pytest.mark.parametrize("ask", [*ASKS, {"sampling": replace(SAMPLED, seed=-3)}], ids=range(len(ASKS) + 1))
def test_a_request_gives_up_its_row_within_its_prompt(ask: dict[str, Any]) -> None:
    with make_engine(replace(DRAFTED, max_rows=1, buckets=(1,), prefill_chunk=4), preemption=True) as engine:
        (expected,) = engine.generate([[*range(40)]], max_new_tokens=20, cache_salt="other", **ask)
        slow = engine.submit([*range(40)], max_new_tokens=20, **ask)
        for _ in range(3):
            engine.step()
        urgent = engine.submit([6], max_new_tokens=3, priority=-1)
        while not urgent.finished:
            engine.step()
        assert (slow.num_preemptions, slow.tokens, urgent.tokens) == (1, [], alone((6,), 3).tokens)
        computed = engine.stats().prompt_tokens
        for _ in engine.stream():
            pass
        assert engine.stats().prompt_tokens - computed < 39, "full pages of the prompt are kept"
        if "num_speculative_tokens" in ask or ask.get("sampling", LASTING).greedy:
            assert (slow.tokens, slow.finish_reason) == (expected.tokens, expected.finish_reason)
        assert slow.num_preemptions == 1 and slow.finish_reason != FinishReason.ERROR


def test_no_request_is_suspended_for_one_that_would_still_have_no_room() -> None:
    with make_engine(replace(PLAIN, num_pages=12, max_rows=3, buckets=(3,)), preemption=True) as engine:  # pages of eight tokens
        equal = engine.submit([4], max_new_tokens=63, sampling=LASTING)  # eight pages
        later = engine.submit([5], max_new_tokens=31, sampling=LASTING, priority=1)  # four pages
        while not later.tokens:
            engine.step()
        first = engine.submit([6], max_new_tokens=40, sampling=LASTING)  # six pages: more than those of `later`
        while not later.finished:
            engine.step()
        assert later.num_preemptions == 0 and not equal.finished and not first.tokens
        for _ in engine.stream():
            pass
        assert [job.finish_reason for job in (equal, later, first)] == [FinishReason.LENGTH] * 3


def test_shared_pages_of_a_request_count_once_as_room_for_another() -> None:
    shared = [*range(1, 17)]  # two pages
    with make_engine(replace(PLAIN, num_pages=12, max_rows=3, buckets=(3,)), preemption=True) as engine:
        engine.submit([4], max_new_tokens=47, sampling=LASTING)  # six pages
        later = engine.submit([*shared, 5], max_new_tokens=31, sampling=LASTING, priority=1)  # six pages
        while not later.tokens:
            engine.step()
        engine.submit([*shared, 6], max_new_tokens=47, sampling=LASTING)  # eight pages, two of them those of `later`
        while not later.finished:
            engine.step()
        assert later.num_preemptions == 0


def test_the_first_round_after_a_preemption_loses_no_drafts_in_statistics() -> None:
    with make_engine(replace(DRAFTED, max_rows=1, buckets=(1,), drafter="perfect"), preemption=True) as engine:
        slow = engine.submit([4], max_new_tokens=40, sampling=LASTING)
        while len(slow.tokens) < 9:
            engine.step()
        engine.submit([6], max_new_tokens=3, priority=-1, num_speculative_tokens=0)
        for _ in engine.stream():
            pass
        drafting = engine.stats().drafting
        assert slow.num_preemptions == 1 and (drafting.rounds, drafting.undrafted) == (slow.rounds - 2, 0)


def test_most_waiting_counts_preempted_requests() -> None:
    with make_engine(replace(PLAIN, num_pages=12), preemption=True) as engine:
        for index in range(2):
            slow = engine.submit([4, index], max_new_tokens=40, sampling=SamplingParams(ignore_eos=True))  # six pages
            while not slow.tokens:
                engine.step()
        engine.submit([6], max_new_tokens=90, priority=-1)  # twelve pages
        engine.step()
        assert engine.stats().most_waiting >= engine.stats().waiting == 2


@pytest.mark.parametrize("link", ["auto", "python"])
def test_a_request_whose_matcher_fails_when_it_is_preempted_or_resumed_ends_alone(link: str) -> None:
    sampling = SamplingParams(logit_bias={VOCABULARY.tokens.index(b"a"): 90.0})
    ask: dict[str, Any] = {"constraint": EXPENSIVE, "sampling": sampling, "max_new_tokens": 40}
    setup = replace(PLAIN, max_rows=1, buckets=(1,), rounds_in_flight=1, host_link=link)
    with make_engine(setup, preemption=True, grammar_limits=GrammarLimits(row_items=20)) as engine:
        (expected,) = engine.generate([[4]], **ask)
        slow = engine.submit([4], **ask)
        while len(slow.tokens) < len(expected.tokens):
            engine.step()
        urgent = engine.submit([6], max_new_tokens=3, priority=-1)
        finish(engine)
        assert urgent.tokens == alone((6,), 3).tokens and (slow.tokens, slow.num_preemptions) == (expected.tokens, 1)
        for job in (expected, slow, *engine.generate([[4]], resume_from=slow.tokens, **ask)):
            assert job.finish_reason == FinishReason.ERROR and job.error.endswith("(GrammarLimits.row_items)")
        finished = dict(engine.stats().finished)
        assert (finished["error"], finished["refused"]) == (0, 3), "a limit is the fault of the request, whenever it is exceeded"


def test_without_preemption_and_with_draws_that_depend_on_drafts_a_request_keeps_its_row() -> None:
    drafted = {"sampling": replace(SAMPLED, seed=-3), "max_new_tokens": 20}
    for preemption, ask in ((False, {"max_new_tokens": 20}), (True, drafted)):
        with make_engine(replace(DRAFTED, max_rows=1, buckets=(1,)), preemption=preemption) as engine:
            slow: Job = engine.submit([4], **ask)
            while not slow.tokens:
                engine.step()
            urgent = engine.submit([6], max_new_tokens=2, priority=-5)
            finish(engine)
            assert urgent.finished and slow.num_preemptions == 0 and started([slow, urgent]) == [0, 1]


def test_a_preempted_request_can_be_cancelled_and_fails_with_the_engine() -> None:
    for end in ("cancel", "close"):
        with one_row(preemption=True) as engine:
            slow = engine.submit([4], max_new_tokens=60, sampling=SamplingParams(ignore_eos=True))
            while len(slow.tokens) < 3:
                engine.step()
            urgent = engine.submit([6], max_new_tokens=20, priority=-1, sampling=SamplingParams(ignore_eos=True))
            while not urgent.tokens:
                engine.step()
            assert slow.num_preemptions == 1 and not slow.finished
            if end == "cancel":
                assert engine.cancel(slow)
                finish(engine)
                assert urgent.finish_reason == FinishReason.LENGTH
        assert slow.finish_reason == FinishReason.CANCELLED and len(slow.tokens) >= 3


def test_a_planted_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that continues from one token too few."""

    def suspend(self: PreemptingScheduler, request: ActiveRequest, real: Any = PreemptingScheduler.suspend) -> None:
        kept = request.job.tokens.pop()
        real(self, request)
        request.job.tokens.append(kept)

    monkeypatch.setattr(PreemptingScheduler, "suspend", suspend)
    with pytest.raises(AssertionError):  # unequal tokens, or a grammar that does not allow the first one
        test_preempted_requests_have_the_tokens_that_they_have_alone("drafted")


@pytest.mark.parametrize(("name", "value"), [("priority", 1.5), ("priority", True), ("priority", "high"), ("tenant", 3), ("tenant", None)])
def test_wrong_priorities_and_tenants_are_refused(name: str, value: Any) -> None:
    engine = shared_engine(PLAIN)
    with pytest.raises(ValueError, match=rf"{name}: got {value!r}"):
        engine.submit([1], **{name: value})
    assert not engine.has_work


def test_preemption_is_refused_with_recording_and_saved_hidden_states(tmp_path: Path) -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32, preemption=True)
    with pytest.raises(ValueError, match=r"Engine\.record: .* expected None with preemption"):
        Engine(ToyTarget(VOCABULARY.logits_width), vocabulary=VOCABULARY, config=config, record=tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"EngineConfig\.preemption: got True with save_hidden_states"):
        replace(config, save_hidden_states=tmp_path)
    with pytest.raises(ValueError, match=r"EngineConfig\.preemption: got 1, expected True or False"):
        replace(config, preemption=1)  # type: ignore[arg-type]
