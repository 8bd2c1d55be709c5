"""Log-probabilities of prompt tokens: those of a computation of the whole prompt at once, for any chunks, neighbours and settings."""

from __future__ import annotations

import asyncio
import functools
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph import AsyncEngine, Engine, Job, SamplingParams
from stepgraph.graphs import TapeBackend, prefill
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.toy import ToyTarget
from tests.helpers.families import folder_of, hf_model
from tests.helpers.oracles import prefix_logits
from tests.helpers.toy_engines import TARGET, VOCABULARY, Setup, finish, make_engine, shared_engine
from tests.runtime.models.test_custom_gru import models as recurrent_models
from tests.runtime.models.test_llama_engine import make_engine as family_engine

PROMPT = [(index * 7 + index // 5 + 11) % 90 + 4 for index in range(33)]
ASKED = SamplingParams(temperature=0, prompt_logprobs=3)
TOY = Setup(k=0, max_top_logprobs=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafted": {"k": 3},
    "look-up": {"k": 2, "drafter": "ngram"},
    "sampled rounds": {"k": 2, "greedy_only": False},
    "eager": {"eager": True},
    "loops": {"loops": True},
    "one step at a time": {"asynchronous": False, "rounds_in_flight": 1},
    "chunks of one token": {"prefill_chunk": 1},
}


def check(job: Job, logits: Tensor, tolerance: float = 1e-5) -> None:
    """logits: [len(prompt_ids) - 1, num_tokens] of the positions before the tokens. Near ties may have another order."""
    first, *found = job.prompt_logprobs
    expected, count = logits.double().log_softmax(-1), job.sampling.prompt_logprobs or 0
    assert first is None and len(found) == len(job.prompt_ids) - 1 == len(expected)
    for entry, token, row in zip(found, job.prompt_ids[1:], expected, strict=True):
        assert entry is not None and entry.masked == entry.raw == pytest.approx(float(row[token]), abs=tolerance)
        ids, values = zip(*entry.top_raw, strict=True) if count else ((), ())
        assert [*values] == pytest.approx(row.topk(count).values.tolist(), abs=tolerance) == row[[*ids]].tolist()
        assert len({*ids}) == count and entry.top_masked == ()
        assert token not in ids or values[ids.index(token)] == entry.raw, "clients compare the two for equality"


@functools.cache
@torch.no_grad()
def reference(family: str) -> Tensor:
    tokens = len(open_checkpoint(folder_of(family)).vocabulary.tokens)
    found: Tensor = hf_model(family)(torch.tensor([PROMPT])).logits[0, :-1, :tokens]
    return found


@functools.cache
def toy_reference(prompt: tuple[int, ...]) -> Tensor:
    rows = [prefix_logits(TARGET, prompt[:length])[: len(VOCABULARY.tokens)] for length in range(1, len(prompt))]
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("family", "k"),
    [
        *(("smollm2", 0), ("gpt-oss", 2)),
        *(pytest.param(family, 2, marks=pytest.mark.slow) for family in ("mistral", "qwen3-moe", "deepseek-v3", "gemma-3")),
    ],
)
def test_they_equal_those_of_transformers_in_any_chunks_beside_rows_that_decode(
    family: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same in all chunks, and with the head applied to five positions at once."""
    found = []
    for chunk, most in ((64, 1 << 23), (5, 1 << 23), (64, 5 * 160), (7, 1)):
        monkeypatch.setattr(prefill, "MAX_LOGITS", most)
        with family_engine(family, k, max_top_logprobs=3, prefill_chunk=chunk, greedy_only=True) as engine:
            alone = engine.generate(PROMPT, sampling=ASKED, max_new_tokens=5)
            check(alone, reference(family), 2e-5)
            neighbours = [engine.submit([9, 8, 7], max_new_tokens=30), engine.submit(PROMPT[:20], sampling=ASKED, max_new_tokens=9)]
            while not neighbours[0].tokens:
                engine.step()
            job = engine.submit(PROMPT, sampling=ASKED, max_new_tokens=5)
            finish(engine)
            assert neighbours[0].prompt_logprobs == [] and len(neighbours[0].tokens) > 9
            assert (job.tokens, job.prompt_logprobs) == (alone.tokens, alone.prompt_logprobs)
            assert neighbours[1].prompt_logprobs == job.prompt_logprobs[:20]
            found.append(job.prompt_logprobs)
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_engines_of_every_kind_report_them(changes: dict[str, Any]) -> None:
    """Of short and long prompts, in every batch; tokens are those of requests that do not ask."""
    draw, engine = Random(3), shared_engine(replace(TOY, **changes))
    prompts = [tuple(draw.randrange(90) for _ in range(length)) for length in (1, 2, 9, 33, 40)]
    plain = [engine.generate(prompt, max_new_tokens=7).tokens for prompt in prompts]
    jobs = [engine.submit(prompt, max_new_tokens=7, sampling=replace(ASKED, prompt_logprobs=index)) for index, prompt in enumerate(prompts)]
    finish(engine)
    assert [job.tokens for job in jobs] == plain and jobs[0].prompt_logprobs == [None]
    for job, prompt in zip(jobs[1:], prompts[1:], strict=True):
        check(job, toy_reference(prompt))


def test_recorded_chunks_serve_only_requests_that_do_not_ask() -> None:
    with make_engine(TOY, TapeBackend(poison="every"), prompt_graphs=True, prefill_chunk=64) as engine:
        replayed = list[int]()
        graph = engine._graphs.prompt_graph
        engine._graphs.prompt_graph = lambda count: replayed.append(count) or graph(count)  # type: ignore[method-assign,func-returns-value]
        jobs = [engine.submit(PROMPT, sampling=sampling, max_new_tokens=3, cache_salt="own") for sampling in (ASKED, None)]
        finish(engine)
        check(jobs[0], toy_reference(tuple(PROMPT)))
        assert jobs[0].tokens == jobs[1].tokens and sum(replayed) == len(PROMPT) - 1 - jobs[1].num_cached_tokens


class CountingTarget(ToyTarget):
    """Counts the positions whose logits are computed."""

    positions = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.positions += hidden.shape[:-1].numel()
        return super().logits(hidden)


def test_logits_of_a_prompt_are_computed_for_requests_that_ask() -> None:
    target, counts = CountingTarget(VOCABULARY.logits_width, seed=3), list[int]()
    config = replace(shared_engine(replace(TOY, eager=True)).config, max_rows=1, buckets=(1,), rounds_in_flight=1)
    with Engine(target, "none", vocabulary=VOCABULARY, config=config) as engine:
        for sampling in (None, ASKED):
            before = target.positions
            engine.generate(PROMPT, sampling=sampling, max_new_tokens=2)
            counts.append(target.positions - before)
    assert counts[1] == counts[0] + len(PROMPT) - 1


def test_cached_prefixes_are_not_reused_but_published() -> None:
    """Cache entries have no log-probabilities."""
    with make_engine(TOY) as engine:
        jobs = [engine.generate(PROMPT, sampling=sampling, max_new_tokens=3) for sampling in (ASKED, None, ASKED)]
    assert [job.num_cached_tokens for job in jobs] == [0, 32, 0] and jobs[0].prompt_logprobs == jobs[2].prompt_logprobs
    check(jobs[2], toy_reference(tuple(PROMPT)))


@pytest.mark.parametrize("changes", [{}, {"k": 3}], ids=["plain", "drafted"])
def test_preempted_requests_have_theirs(changes: dict[str, Any]) -> None:
    """Preempted within the prompt, where it is computed again, and after it, where cached pages are reused."""
    setup, preempted = replace(TOY, max_rows=1, buckets=(1,), **changes), [0, 0]
    for steps in range(2, 13, 2):
        with make_engine(setup, preemption=True) as engine:
            job = engine.submit(PROMPT, sampling=replace(ASKED, ignore_eos=True), max_new_tokens=30, priority=1)
            for _ in range(steps):
                engine.step()
            known = job.prompt_logprobs
            assert bool(known) == bool(job.tokens)
            other = engine.submit([5, 6], sampling=ASKED, max_new_tokens=2)
            finish(engine)
            assert job.prompt_logprobs == (known or job.prompt_logprobs) and len(job.tokens) == 30
            check(job, toy_reference(tuple(PROMPT)))
            check(other, toy_reference((5, 6)))
            assert bool(engine.stats().reused_tokens) == bool(known and job.num_preemptions)
            preempted[bool(known)] += job.num_preemptions
    assert min(preempted) >= 2


def test_a_resumed_request_has_those_of_its_prompt() -> None:
    engine = shared_engine(TOY)
    whole = engine.generate(PROMPT, sampling=replace(ASKED, ignore_eos=True), max_new_tokens=20)
    rest = engine.generate(PROMPT, sampling=whole.sampling, max_new_tokens=20, resume_from=whole.tokens[:11])
    assert rest.tokens == whole.tokens[11:] and rest.prompt_logprobs == whole.prompt_logprobs


def test_a_request_that_is_cancelled_in_its_prompt_has_none() -> None:
    engine = shared_engine(TOY)
    job = engine.submit(PROMPT, sampling=ASKED, max_new_tokens=3)
    for _ in range(2):
        engine.step()
    engine.cancel(job)
    finish(engine)
    assert job.finish_reason == "cancelled" and job.prompt_logprobs == []
    check(engine.generate(PROMPT, sampling=ASKED, max_new_tokens=3), toy_reference(tuple(PROMPT)))


def test_they_are_known_with_the_first_event_of_a_stream() -> None:
    async def lengths(engine: Engine) -> set[int]:
        async with AsyncEngine(engine) as serving:
            stream = serving.generate(PROMPT, sampling=ASKED, max_new_tokens=9)
            return {len(stream.job.prompt_logprobs) async for _ in stream}

    with make_engine(TOY) as engine:
        assert asyncio.run(lengths(engine)) == {len(PROMPT)}


def test_a_token_that_the_target_excludes_has_minus_infinity() -> None:
    """And is not among the most probable ones."""
    target = ToyTarget(VOCABULARY.logits_width, biases=dict.fromkeys(range(2, VOCABULARY.logits_width), -math.inf))
    with Engine(target, "none", vocabulary=VOCABULARY, config=shared_engine(TOY).config) as engine:
        _, *found = engine.generate([1, 5, 0], sampling=ASKED, max_new_tokens=1).prompt_logprobs
    assert [entry and math.isinf(entry.raw) for entry in found] == [True, False]
    assert all(entry and {token for token, _ in entry.top_raw} == {0, 1} for entry in found)


@torch.no_grad()
def test_own_models_report_them() -> None:
    """The recurrent model of docs/own-model.md."""
    target, draft = recurrent_models(0.02)
    whole = torch.nn.GRU(target.feature_size, target.feature_size, batch_first=True).double()
    whole.load_state_dict({f"{name}_l0": value.double() for name, value in target.cell.state_dict().items()})
    states = whole(target.embedding(torch.tensor([PROMPT])).double())[0][0, :-1]
    logits = states @ target.head.weight.double().T + target.head.bias.double()
    config = replace(shared_engine(TOY).config, num_speculative_tokens=2, draft_length=2)
    with Engine(target, draft, config=config) as engine:
        check(engine.generate(PROMPT, sampling=ASKED, max_new_tokens=4), logits, 1e-4)


ABOVE = r"sampling.prompt_logprobs: got 5, expected at most EngineConfig.max_top_logprobs=4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": SamplingParams(prompt_logprobs=5)}, ABOVE),
        ({"logprob_start_len": 0}, r"keyword 'logprob_start_len', expected sampling=SamplingParams\(prompt_logprobs=\)"),
        ({"return_logprob": True}, r"keyword 'return_logprob', expected sampling=SamplingParams\(logprobs=\)"),
    ],
)
def test_wrong_requests_are_refused(options: dict[str, Any], message: str) -> None:
    engine = shared_engine(TOY)
    with pytest.raises((ValueError, TypeError), match=message):
        engine.submit(PROMPT, **options)
    assert not engine.has_work


def test_embeddings_have_none() -> None:
    with family_engine("smollm2", 0, max_top_logprobs=3) as engine:
        spans = {2: torch.zeros(3, 48)}
        message = r"prompt_embeddings: got 1 spans with sampling.prompt_logprobs=3, expected None: embeddings have no log-probabilities"
        with pytest.raises(ValueError, match=message):
            engine.submit(PROMPT, sampling=ASKED, prompt_embeddings=spans)
        assert not engine.has_work and engine.submit(PROMPT, sampling=ASKED, prompt_embeddings={})
