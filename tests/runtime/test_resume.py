"""submit(resume_from=...): a request that was ended continues, on the same engine or another, with the tokens it would have had."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, FinishReason, Job, SamplingParams
from stepgraph.runtime.replay import read_recording, replay
from stepgraph.runtime.text import TextStream
from tests.helpers.toy_engines import CONSTRAINTS, DRAFTERS, STOP, TARGET, VOCABULARY, Setup, finish, shared_engine
from tests.runtime.models.test_llama_engine import make_engine as llama_engine

PROMPT, TOKENS = [49, 65, 16, 66, 71, 26, 54, 7, 61, 46, 72], 20
PLAIN, DRAFTED = (Setup(k=k, greedy_only=False, buckets=(4,)) for k in (0, 3))
ENGINES = {
    "plain": PLAIN,
    "drafted": DRAFTED,
    "unmasked": replace(DRAFTED, drafter="half", draft_masks=False, rounds_in_flight=3),
    "look-up": replace(DRAFTED, drafter="ngram", grammar_backend="xgrammar"),
    "loops": replace(DRAFTED, forced_drafts=True, loops=True),
    "python link": replace(DRAFTED, host_link="python"),
}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.9, "logprobs": True}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "penalties": SamplingParams(temperature=0, min_new_tokens=9, logit_bias={STOP: 2.0}, **PENALTIES),
    "sampled": SamplingParams(temperature=1.3, top_p=0.95, seed=11, min_new_tokens=5, **PENALTIES),
}


def later(job: Job, count: int) -> tuple[Any, ...]:
    """What a job has after its first `count` tokens."""
    return job.tokens[count:], job.finish_reason, job.text, [(each.raw, each.masked) for each in job.logprobs[count:]]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("setup", ENGINES.values(), ids=ENGINES)
def test_a_resumed_request_has_the_tokens_that_would_have_followed(setup: Setup, sampling: SamplingParams) -> None:
    """Even or odd cuts of each text, in batches; each engine has both. The whole texts are from an engine without drafts."""
    engine, count, first = shared_engine(setup), 0, (setup.k + [*SAMPLINGS.values()].index(sampling)) % 2
    for constraint in (None, *CONSTRAINTS[1::2]):
        options: dict[str, Any] = {"constraint": constraint, "sampling": sampling, "max_new_tokens": TOKENS, "num_speculative_tokens": 0}
        whole = shared_engine(PLAIN).generate(PROMPT, **options)
        if sampling.greedy:
            del options["num_speculative_tokens"]
        ended = whole.tokens[-1:] == [STOP] or len(whole.tokens) == TOKENS
        cuts = range(first, len(whole.tokens) + (not ended), 2)
        jobs = [engine.submit(PROMPT, resume_from=whole.tokens[:cut], **options) for cut in cuts]
        finish(engine)
        for cut, job in zip(cuts, jobs, strict=True):
            assert (*later(job, 0), job.error) == (*later(whole, cut), ""), (constraint, cut)
            assert len(job.origins) == len(job.tokens) and (cut == 0 or job.grammar_lane != "device")
        count += len(jobs)
    assert count > 15


def test_repeatedly_cancelled_and_resumed_requests_have_the_same_tokens() -> None:
    """Two rows, five requests: a request is cancelled after three tokens and the next one gets its row, until all have ended."""
    engine = shared_engine(replace(DRAFTED, max_rows=2, buckets=(2,)))
    prompts = [[index + 1, *PROMPT] for index in range(5)]
    sampled = {"sampling": SAMPLINGS["sampled"], "num_speculative_tokens": 0}
    asks: list[dict[str, Any]] = [sampled if index == 2 else {"constraint": CONSTRAINTS[index]} for index in range(5)]
    expected = [engine.generate(prompt, max_new_tokens=25, **ask).tokens for prompt, ask in zip(prompts, asks, strict=True)]
    tokens: list[list[int]] = [[] for _ in prompts]
    waiting, running, preempted = [*range(5)], dict[int, tuple[int, Job]](), 0
    while waiting or running:
        while waiting and len(running) < 2:
            index = waiting.pop(0)
            job = engine.submit(prompts[index], max_new_tokens=25, resume_from=tokens[index], **asks[index])
            running[job.id] = index, job
        engine.step()
        for index, job in list(running.values()):
            if not job.finished and len(job.tokens) >= 3:
                engine.cancel(job)
            if job.finished:
                tokens[index] += job.tokens
                del running[job.id]
                if job.finish_reason == FinishReason.CANCELLED:
                    waiting.append(index)
                    preempted += 1
    assert tokens == expected and preempted > 8


def test_text_and_stop_strings_across_the_point_of_resumption() -> None:
    engine = shared_engine(DRAFTED)
    free = engine.generate(PROMPT, sampling=SamplingParams(ignore_eos=True), max_new_tokens=TOKENS)
    stop = free.text[6:10]
    options: dict[str, Any] = {"sampling": SamplingParams(stop=stop, ignore_eos=True), "max_new_tokens": TOKENS}
    whole = engine.generate(PROMPT, **options)
    assert whole.finish_reason == FinishReason.STOP and whole.text == free.text[:6]

    async def streamed(resume_from: list[int]) -> str:
        async with AsyncEngine(engine) as serving:
            return "".join([piece async for piece in serving.generate(PROMPT, resume_from=resume_from, **options).text()])

    for cut in range(len(whole.tokens)):
        given = whole.tokens[:cut]
        job = engine.generate(PROMPT, resume_from=given, **options)
        assert later(job, 0) == later(whole, cut) and job.stop_reason == stop
        pieces = "".join(engine.stream_text(PROMPT, resume_from=given, **options))
        assert TextStream(VOCABULARY, (stop,)).push(given) + pieces == whole.text
        assert asyncio.run(streamed(given)) == pieces
    with pytest.raises(ValueError, match=r"resume_from: got a text with one of \('.*',\), expected an output that has not ended"):
        engine.submit(PROMPT, resume_from=free.tokens, **options | {"max_new_tokens": 40})


def test_a_model_with_a_key_value_cache_continues_its_text_and_log_probabilities() -> None:
    with llama_engine("smollm2", 2, noise=0.02) as engine:
        options: dict[str, Any] = {"sampling": SamplingParams(temperature=0, logprobs=True), "max_new_tokens": 14}
        whole = engine.generate(PROMPT, **options)
        for cut in range(len(whole.tokens)):
            assert later(engine.generate(PROMPT, resume_from=whole.tokens[:cut], **options), 0) == later(whole, cut)


def test_a_value_is_parsed_from_the_whole_text() -> None:
    engine = shared_engine(DRAFTED)
    whole = engine.generate(PROMPT, constraint=CONSTRAINTS[1], max_new_tokens=60)
    job = engine.generate(PROMPT, constraint=CONSTRAINTS[1], max_new_tokens=60, resume_from=whole.tokens[:7])
    assert job.parsed == whole.parsed and job.grammar_lane.startswith("host: ")


def test_a_marker_within_the_resumed_tokens_starts_the_grammar() -> None:
    engine, constraint = shared_engine(DRAFTED), Constraint.choice(["left", "right"]).after("=")
    sampling = SamplingParams(logit_bias={VOCABULARY.tokens.index(b"="): 100})
    whole = engine.generate(PROMPT, constraint=constraint, sampling=sampling, max_new_tokens=12)
    for cut in range(len(whole.tokens)):
        job = engine.generate(PROMPT, constraint=constraint, sampling=sampling, max_new_tokens=12, resume_from=whole.tokens[:cut])
        assert job.tokens == whole.tokens[cut:]


def test_tokens_that_the_constraint_refuses_fail_their_request_only() -> None:
    engine = shared_engine(DRAFTED)
    wrong = engine.submit(PROMPT, constraint=CONSTRAINTS[4], max_new_tokens=9, resume_from=[17, 17, 17, 17])
    other = engine.submit(PROMPT, constraint=CONSTRAINTS[4], max_new_tokens=9)
    finish(engine)
    assert (wrong.tokens, wrong.finish_reason) == ([], FinishReason.ERROR)
    assert wrong.error == "resume_from[3]: got 17, expected a token that the constraint allows there"
    assert other.finish_reason == FinishReason.CONSTRAINT_COMPLETE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume_from": [5] * 9}, r"resume_from: got 9 tokens, expected fewer than max_new_tokens=9, which counts them"),
        ({"resume_from": [5, STOP, 6]}, rf"resume_from\[1\]: got the stop token {STOP}, expected an output that has not ended"),
        ({"resume_from": [500]}, r"resume_from\[0\]: got 500, expected a token id from 0 to 112"),
        ({"resume_from": "abc"}, r"resume_from: got str, expected a sequence of token ids"),
        (
            {"resume_from": [5], "sampling": SamplingParams(temperature=0.5, seed=-3)},
            r"num_speculative_tokens: got 3 with resume_from and sampling.seed=-3, expected 0 for both requests: draws of",
        ),
        (
            {"resume_from": [5], "sampling": SamplingParams(temperature=0.5), "num_speculative_tokens": 0},
            r"sampling.seed: got None with resume_from and sampling.temperature=0.5, expected Job.seed of the request",
        ),
    ],
)
def test_requests_that_cannot_be_continued_are_refused(options: dict[str, Any], message: str) -> None:
    engine = shared_engine(DRAFTED)
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, max_new_tokens=9, **options)
    assert not engine.has_work


def test_resumed_requests_are_recorded_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = EngineConfig(max_rows=1, num_speculative_tokens=2, max_length=64, backend="tape")
    with Engine(TARGET, DRAFTERS["fair"](), vocabulary=VOCABULARY, config=config, record=path) as engine:
        whole = engine.generate(PROMPT, max_new_tokens=TOKENS)
        engine.generate(PROMPT, max_new_tokens=TOKENS, resume_from=whole.tokens[:9])
    report = replay(read_recording(path), TARGET, DRAFTERS["fair"](), VOCABULARY)
    assert report.equal and report.requests == 2 and report.tokens == 2 * len(whole.tokens) - 9
