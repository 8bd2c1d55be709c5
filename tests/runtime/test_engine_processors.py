"""Penalties, biases, bad tokens, min_new_tokens, ignore_eos and logprobs in an engine, compared with plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Constraint, EngineConfig, Job, SamplingParams
from stepgraph.sampling.params import GREEDY
from tests.helpers.oracles import accepts, filtered, prefix_logits, processed
from tests.helpers.toy_engines import CONSTRAINTS, STOP, TARGET, VOCABULARY, Setup, compiled, finish, make_engine, plain, shared_engine

WIDTH = len(VOCABULARY.tokens)
SETUPS = [
    Setup(k=0, greedy_only=False),
    Setup(k=1, greedy_only=False, drafter="adversarial"),
    Setup(k=2, greedy_only=False, drafter="fair", draft_masks=False),
    Setup(k=3, greedy_only=False, drafter="half"),
    Setup(k=4, greedy_only=False, drafter="stopper"),
    Setup(k=4, greedy_only=False, drafter="perfect"),
    Setup(k=4, greedy_only=False, drafter="adversarial", draft_masks=False, rounds_in_flight=3),
]
tokens = st.integers(0, WIDTH - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    stop_token_ids=st.lists(st.integers(0, 95), max_size=2).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7, 5.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, 2.0, -1.1]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 1.7, 5.0]), max_size=5),
    bad_token_ids=st.lists(tokens, max_size=20).map(tuple),
    min_new_tokens=st.integers(0, 12),
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
)
asks = st.tuples(st.lists(tokens, min_size=1, max_size=13), st.sampled_from(CONSTRAINTS), st.integers(12, 30), samplings)


def logprobs_are_correct(job: Job, constraint: Constraint | None) -> bool:
    """Whether log-probabilities, also those of top_logprobs, equal float64 values: of raw logits, and of the processed distribution."""
    grammar = compiled(constraint)
    matcher, masks = grammar.matcher() if grammar else None, torch.zeros(1, VOCABULARY.mask_words, dtype=torch.int32)
    sampling = job.sampling
    for index, (token, (raw, masked, *most_probable)) in enumerate(zip(job.tokens, job.logprobs, strict=True)):
        logits = prefix_logits(TARGET, [*job.prompt_ids, *job.tokens[:index]])[:WIDTH]
        own = torch.tensor(logits, dtype=torch.float64).log_softmax(0).tolist()
        left = processed(logits, sampling, job.prompt_ids, job.tokens[:index], job.stop_ids)
        if matcher:
            matcher.fill_next_token_bitmask(masks, 0)
            words = masks[0].tolist()
            left = [value if words[i // 32] >> (i % 32) & 1 else -math.inf for i, value in enumerate(left)]
            assert matcher.accept_token(token)
        drawn = filtered(left, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        logs = [math.log(share) if share else -math.inf for share in drawn]
        if abs(raw - own[token]) > 1e-4 or abs(masked - logs[token]) > 1e-4:
            return False
        for found, every, value in zip(most_probable, (own, logs), (raw, masked), strict=True):
            if dict(found).get(token, value) != value:
                return False
            expected = sorted(filter(math.isfinite, every), reverse=True)[: sampling.top_logprobs]
            values = [value for _, value in found]
            if len({other for other, _ in found}) != len(expected) or not all(abs(every[other] - value) < 1e-4 for other, value in found):
                return False
            if not all(abs(value - best) < 1e-4 for value, best in zip(values, expected, strict=True)):
                return False
    return True


batches = st.lists(asks, min_size=1, max_size=5)


def run_batch(setup: Setup, batch: list[tuple[Any, ...]]) -> list[Job]:
    engine, jobs = shared_engine(setup), []
    for prompt, constraint, most, sampling in batch:
        sampling = replace(sampling, ignore_eos=sampling.ignore_eos and constraint is None)
        job = engine.submit(prompt, constraint=constraint, sampling=sampling, max_new_tokens=most)
        jobs.append((constraint, most, job))
    events: dict[int, list[Any]] = {job.id: [] for *_, job in jobs}
    for event in engine.stream():
        events[event.job_id] += event.logprobs
    for constraint, most, job in jobs:
        expected = plain(job.prompt_ids, most, constraint, sampling=job.sampling)
        assert (job.tokens, job.finish_reason, job.error) == (expected.tokens, expected.reason, "")
        assert events[job.id] == job.logprobs
        assert len(job.logprobs) == (len(job.tokens) if job.sampling.logprobs else 0)
        assert all(pair.masked == 0 for pair in job.logprobs), "a greedy choice is certain"
        if job.logprobs:
            assert logprobs_are_correct(job, constraint)
        grammar = compiled(constraint)
        if grammar:
            assert accepts(grammar, job.tokens, finished=job.finish_reason == "constraint_complete")
    return [job for *_, job in jobs]


@pytest.mark.parametrize("setup", [*SETUPS[::3], *(replace(setup, buckets=(4,)) for setup in (*SETUPS[1::3], *SETUPS[2::3]))], ids=str)
@settings(max_examples=15)
@given(batch=batches)
def test_greedy_requests_equal_a_plain_loop(setup: Setup, batch: list[tuple[Any, ...]]) -> None:
    run_batch(setup, batch)


@pytest.mark.soak
@pytest.mark.parametrize("setup", SETUPS, ids=str)
@settings(max_examples=300, derandomize=False)
@given(batch=batches)
def test_greedy_requests_equal_a_plain_loop_at_length(setup: Setup, batch: list[tuple[Any, ...]]) -> None:
    run_batch(setup, batch)


@pytest.mark.parametrize("constraint", CONSTRAINTS[:4])
def test_logprobs_of_sampled_requests_equal_float64(constraint: Constraint | None) -> None:
    engine = shared_engine(Setup(k=3, greedy_only=False, drafter="fair", max_top_logprobs=5))
    requested = SamplingParams(
        temperature=1.3, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={70: 2.0}, logprobs=True
    )
    requested = replace(requested, top_logprobs=5)
    silent = engine.submit([4, 2], constraint=constraint, sampling=SamplingParams(seed=1), max_new_tokens=30)
    jobs = [engine.submit([9, seed], constraint=constraint, sampling=replace(requested, seed=seed), max_new_tokens=30) for seed in range(6)]
    finish(engine)
    assert silent.logprobs == []
    assert any(job.num_accepted_drafts for job in jobs)
    for job in jobs:
        assert len(job.logprobs) == len(job.tokens)
        assert all(len(each.top_raw) == 5 for each in job.logprobs)
        assert logprobs_are_correct(job, constraint)
    (token, value), *others = jobs[0].logprobs[0].top_raw
    wrong = jobs[0].logprobs[0]._replace(top_raw=((token + 1, value), *others))
    assert not logprobs_are_correct(replace(jobs[0], logprobs=[wrong, *jobs[0].logprobs[1:]]), constraint)


def test_min_new_tokens_holds_at_every_draft_position() -> None:
    """With a drafter and a target that prefer to stop, output ends exactly at min_new_tokens."""
    engine = shared_engine(Setup(k=4, greedy_only=False, drafter="stopper"))
    eager = {STOP: 100.0}
    jobs = [
        engine.submit([n], sampling=replace(GREEDY, logit_bias=eager, min_new_tokens=n), max_new_tokens=20, num_speculative_tokens=drafts)
        for n in range(12)
        for drafts in (0, 2, 4)
    ]
    finish(engine)
    assert [len(job.tokens) for job in jobs] == [n + 1 for n in range(12) for _ in range(3)]
    assert all(job.finish_reason == "stop" and job.tokens[-1] == STOP for job in jobs)


def test_complete_output_ends_before_min_new_tokens_and_no_legal_token_is_a_dead_end() -> None:
    engine = shared_engine(Setup(k=3, greedy_only=False))
    a = VOCABULARY.tokens.index(b"a")
    early = engine.generate([1], constraint=Constraint.regex("ab"), sampling=replace(GREEDY, min_new_tokens=9), max_new_tokens=20)
    assert (len(early.tokens), early.finish_reason) == (2, "constraint_complete")
    longer = engine.generate([1], constraint=Constraint.regex("a{1,5}"), sampling=replace(GREEDY, min_new_tokens=4), max_new_tokens=20)
    assert longer.tokens[:4] == [a] * 4 and len(longer.tokens) == 5
    for sampling in (replace(GREEDY, bad_token_ids=(a,)), SamplingParams(temperature=1, bad_token_ids=(a,))):
        barred = engine.generate([1], constraint=Constraint.regex("[bc]{3}a"), sampling=sampling, max_new_tokens=20)
        assert (len(barred.tokens), barred.finish_reason, barred.error) == (3, "dead_end", "")


def test_ignore_eos_continues_after_eos_but_stops_at_stop_token_ids() -> None:
    engine = shared_engine(Setup(k=3, greedy_only=True))
    plain_text = next(job for job in (engine.generate([seed], max_new_tokens=40) for seed in range(50)) if job.finish_reason == "stop")
    on = engine.generate(plain_text.prompt_ids, max_new_tokens=40, sampling=replace(GREEDY, ignore_eos=True))
    assert on.tokens[: len(plain_text.tokens)] == plain_text.tokens and len(on.tokens) == 40
    own = engine.generate(plain_text.prompt_ids, max_new_tokens=40, sampling=replace(GREEDY, ignore_eos=True, stop_token_ids=(STOP,)))
    assert (own.tokens, own.finish_reason) == (plain_text.tokens, "stop")
    assert (own.stop_reason, plain_text.stop_reason) == (STOP, None)


def test_bias_lists_are_limited() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.max_bias_ids: got 0, expected a whole number >= 1"):
        EngineConfig(max_bias_ids=0)
    engine = shared_engine(Setup(k=0, greedy_only=False))
    most = engine.limits.max_bias_ids
    assert most >= WIDTH
    everything = replace(GREEDY, bad_token_ids=tuple(range(WIDTH - 1)), logit_bias={5: 1.0})
    assert engine.generate([3], sampling=everything, max_new_tokens=3).tokens == [WIDTH - 1] * 3


def test_row_state_is_reset_for_the_next_request() -> None:
    """One row, whose previous requests had counts, prompts and biases."""
    sampling = replace(GREEDY, frequency_penalty=2.0, repetition_penalty=1.5)
    expected = plain([7, 8], 25, sampling=sampling).tokens  # the previous requests have these tokens in prompts and outputs
    before = replace(sampling, logit_bias=dict.fromkeys(expected, 9.0))
    with make_engine(Setup(k=2, greedy_only=False, max_rows=1)) as engine:
        jobs = [engine.submit([*expected, seed], sampling=before, max_new_tokens=25) for seed in range(4)]
        last = engine.submit([7, 8], sampling=sampling, max_new_tokens=25)
        engine.step()
        engine.cancel(jobs[1])
        finish(engine)
    assert last.tokens == expected
