"""Prefix sharing in an engine: the same output with fewer computed prompt tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph import Engine, SamplingParams
from stepgraph.graphs import StaticBuffers, TapeBackend
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.page_cache import PageCache
from tests.helpers.prefix_engines import CONFIG, DRAFTS, PAGE, SYSTEM, K, ask, finish, make_engine, rounds_of, small_llama
from tests.helpers.toy_engines import STOP, TARGET, VOCABULARY, plain
from tools.random_weights import randomised


@pytest.mark.parametrize("draft", DRAFTS)
def test_second_request_reuses_the_prefix(draft: str) -> None:
    with make_engine(draft) as engine:
        drafts, cached = engine.limits.num_speculative_tokens, []
        for length in (17, 17, 18, 16, 13, 12, 14):
            job = ask(engine, SYSTEM[:length] if length < 18 else [*SYSTEM, 7])
            finish(engine)
            assert job.tokens == plain(job.prompt_ids, 9).tokens
            assert job.rounds == rounds_of(job, drafts), "no draft was rejected: the draft's entries are correct"
            cached.append(job.num_cached_tokens)
        # Of 17 or more tokens four pages precede the last token; a draft at its token needs one more position after them,
        # one that looks ahead cannot use a page that was computed for other next tokens.
        expected = {
            "none": [0, 16, 16, 12, 12, 8, 12],
            "at its token": [0, 12, 16, 12, 8, 8, 12],
            "one ahead": [0, 16, 16, 12, 12, 8, 12],
            "two ahead": [0, 12, 12, 12, 8, 8, 12],
        }
        assert cached == expected[draft]
        assert engine.stats().reused_tokens == sum(cached)


class WritingTarget(ToyTarget):
    """Attention has no keys if all positions of a call are inert."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert not inputs.shared or bool((inputs.slots[:, -1] >= inputs.page_size).all()), "a call writes at least one entry"
        return super().forward(inputs, buffers)


def test_prefill_past_a_shared_prefix_with_chunks_of_one_token() -> None:
    """After shared pages, a draft's first chunk has at least two positions, since the first is not written."""
    target = WritingTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0})  # otherwise as TARGET
    config = replace(CONFIG, greedy_only=True, prefill_chunk=1)
    with Engine(target, ToyDraft(target), vocabulary=VOCABULARY, config=config, backend=TapeBackend()) as engine:
        engine.capture()
        for length in (9, 9, 10, 12):
            job = ask(engine, SYSTEM[:length])
            finish(engine)
            assert (job.tokens, job.rounds) == (plain(SYSTEM[:length], 9).tokens, rounds_of(job, K))
        assert job.num_cached_tokens == 8


def test_pages_are_shared_only_for_equal_tokens_and_salt() -> None:
    with make_engine("at its token") as engine:
        first = ask(engine, SYSTEM)
        finish(engine)
        others = [[8, *SYSTEM[1:]], [*SYSTEM[:4], 8, *SYSTEM[5:]], SYSTEM[4:]]  # differ in the first or the second page
        jobs = [ask(engine, prompt) for prompt in others] + [ask(engine, SYSTEM, cache_salt="tenant") for _ in range(2)]
        finish(engine)
        assert [job.num_cached_tokens for job in jobs] == [0, 4, 0, 0, 12]
        assert jobs[-1].tokens == jobs[-2].tokens == first.tokens == plain(SYSTEM, 9).tokens


def test_requests_submitted_together_compute_their_prefix_once() -> None:
    """The second is admitted before the first is computed, and looks up its prefix again before its prefill."""
    with make_engine("at its token") as engine:
        jobs = [ask(engine, [*SYSTEM, index]) for index in range(3)]
        finish(engine)
        assert [job.num_cached_tokens for job in jobs] == [0, 16, 16]
        assert all(job.tokens == plain(job.prompt_ids, 9).tokens and job.rounds == rounds_of(job, K) for job in jobs)


def test_several_answers_to_a_prompt_share_its_pages() -> None:
    """n answers: the same prompt with n seeds. Each is the answer that it is without sharing; the prompt's pages exist once."""
    seeds, most = (3, 4, 5), 12
    samplings = [SamplingParams(temperature=1.3, seed=seed, ignore_eos=True) for seed in seeds]
    with make_engine("none", greedy_only=False, prefix_reuse=False) as engine:
        alone = [engine.generate(SYSTEM, sampling=sampling, max_new_tokens=most).tokens for sampling in samplings]
    assert len({tuple(tokens) for tokens in alone}) == len(seeds)
    with make_engine("none", greedy_only=False) as engine:
        jobs = [ask(engine, SYSTEM, most, sampling=sampling) for sampling in samplings]
        taken = 0
        while engine.has_work:
            engine.step()
            if all(job.tokens and not job.finished for job in jobs):
                taken = max(taken, engine.limits.num_pages - engine.stats().free_pages)
        shared, whole = (len(SYSTEM) - 1) // PAGE, -(-(len(SYSTEM) + most) // PAGE)
        assert [job.tokens for job in jobs] == alone and [job.num_cached_tokens for job in jobs] == [0, 16, 16]
        assert taken == shared + len(seeds) * (whole - shared)


def test_output_pages_are_reused_by_the_next_turn_of_a_conversation() -> None:
    with make_engine("one ahead") as engine:
        text, cached = list(SYSTEM[:5]), []
        for turn in range(4):
            job = ask(engine, [*text, turn + 1, turn + 2], 7, sampling=SamplingParams(temperature=0, ignore_eos=True))
            finish(engine)
            text = [*job.prompt_ids, *job.tokens]
            cached.append(job.num_cached_tokens)
            assert job.rounds == rounds_of(job, K)
        assert cached == [0, 12, 20, 28], "all full pages of 14, 23 and 32 tokens whose lookahead tokens are known"


def test_penalties_count_reused_prompt_tokens() -> None:
    sampling = SamplingParams(temperature=0, repetition_penalty=5.0, frequency_penalty=0.3, ignore_eos=True)
    with make_engine("at its token", greedy_only=False) as engine:
        for _ in range(2):
            job = ask(engine, SYSTEM, 16, sampling=sampling)
            finish(engine)
            assert job.tokens == plain(SYSTEM, 16, sampling=sampling).tokens
        assert job.num_cached_tokens == 12
        other = ask(engine, SYSTEM[:3], 16, sampling=sampling)
        finish(engine)
        assert other.tokens == plain(SYSTEM[:3], 16, sampling=sampling).tokens, "no state of the previous request in this row"
        assert job.tokens != plain(SYSTEM, 16, sampling=SamplingParams(temperature=0, ignore_eos=True)).tokens


def test_sampled_output_is_independent_of_reuse() -> None:
    sampling = SamplingParams(temperature=1.1, top_p=0.9, seed=4)
    with make_engine("at its token", greedy_only=False) as engine:
        jobs = []
        for _ in range(2):
            jobs.append(ask(engine, SYSTEM, 16, sampling=sampling))
            finish(engine)
        assert jobs[0].tokens == jobs[1].tokens and [job.num_cached_tokens for job in jobs] == [0, 12]


def test_idle_pages_are_evicted_least_recently_used_first() -> None:
    """The last page of a text is evicted first, and a held page never."""
    endless, texts = SamplingParams(temperature=0, ignore_eos=True), []
    with make_engine("none") as engine:
        for first in range(5):
            job = ask(engine, [first] * 16, 8, sampling=endless)
            finish(engine)
            texts.append([*job.prompt_ids, *job.tokens])
        assert engine.stats().cached_pages == 5 * 5 and engine.stats().evicted_pages == 0, "of 23 entries five pages are full"
        held = ask(engine, [1] * 16, 24, sampling=endless)
        engine.step()
        assert (held.num_cached_tokens, engine.stats().evicted_pages) == (12, 2), "seven pages allocated, five free"
        assert [len(engine._scheduler.rows.page_cache.find(("", 0), text, 23)) for text in texts] == [3, 5, 5, 5, 5]
        more = ask(engine, [0] * 16, 20, sampling=endless)  # nine pages, of which it finds three
        engine.step()
        assert (more.num_cached_tokens, engine.stats().evicted_pages) == (12, 8)
        assert [len(engine._scheduler.rows.page_cache.find(("", 0), text, 23)) for text in texts] == [3, 3, 1, 5, 5], "held pages stay"
        finish(engine)


@pytest.mark.parametrize("kept", [0, 2])
def test_prefix_cache_pages_limits_idle_pages(kept: int) -> None:
    with make_engine("at its token", prefix_cache_pages=kept) as engine:
        jobs = [ask(engine, SYSTEM), ask(engine, SYSTEM)]
        finish(engine)
        assert engine.stats().cached_pages == kept and jobs[1].num_cached_tokens == 12, "concurrent requests share in any case"
        later = ask(engine, SYSTEM)
        finish(engine)
        assert later.num_cached_tokens == 4 * kept and later.tokens == plain(SYSTEM, 9).tokens


class Recurrent(ToyDraft):
    shares_prefix = False


def test_sharing_is_off_by_config_or_by_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTS, "recurrent", lambda: Recurrent(TARGET))
    for draft, reuse, note in (
        ("recurrent", True, "prefixes: not shared, the draft has shares_prefix = False"),
        ("at its token", False, "prefixes: not shared, EngineConfig.prefix_reuse is False"),
    ):
        config = replace(CONFIG, greedy_only=True, prefix_reuse=reuse)
        with Engine(TARGET, DRAFTS[draft](), vocabulary=VOCABULARY, config=config) as engine:
            assert note in engine.capture().notes
            jobs = [ask(engine, SYSTEM), ask(engine, SYSTEM)]
            finish(engine)
            assert [job.num_cached_tokens for job in jobs] == [0, 0] and engine.stats().cached_pages == 0
            assert jobs[0].tokens == jobs[1].tokens == plain(SYSTEM, 9).tokens
    bad: list[dict[str, Any]] = [{"prefix_cache_pages": -1}, {"prefix_cache_pages": True}, {"prefix_reuse": 1}]
    for field in bad:
        with pytest.raises(ValueError, match=rf"EngineConfig.{next(iter(field))}: got {next(iter(field.values()))}, expected"):
            replace(CONFIG, **field)
    with make_engine("none") as engine, pytest.raises(ValueError, match="cache_salt: got 1, expected a string"):
        ask(engine, SYSTEM, cache_salt=1)


def test_requests_without_free_pages_wait_in_order() -> None:
    """Thirty pages for requests of up to twelve, some with a common prefix."""
    with make_engine("at its token") as engine:
        jobs = [ask(engine, [*SYSTEM[: index % 3 * 6], index + 1, 2], 25 + index) for index in range(9)]
        begun: list[int] = []
        while engine.has_work:
            engine.step()
            assert engine.stats().free_pages >= 0
            begun += [job.id for job in jobs if job.tokens and job.id not in begun]
        assert begun == sorted(begun), "served in order of arrival"
        for index, job in enumerate(jobs):
            assert (job.tokens, job.error) == (plain(job.prompt_ids, 25 + index).tokens, "")
        assert engine.stats().reused_tokens > 0 and engine.stats().evicted_pages > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_bit_equal_with_reuse(dtype: torch.dtype) -> None:
    target = randomised(Llama(replace(small_llama().config, dtype=dtype)), 3)
    config = replace(CONFIG, num_speculative_tokens=0, draft_length=0)
    with Engine(target, config=config, backend=TapeBackend()) as engine:
        engine.ensure_captured()
        jobs = []
        for _ in range(2):
            jobs.append(ask(engine, [token % 7 for token in SYSTEM], 16, sampling=SamplingParams(temperature=0, logprobs=True)))
            finish(engine)
        assert (jobs[0].tokens, jobs[0].logprobs) == (jobs[1].tokens, jobs[1].logprobs) and jobs[1].num_cached_tokens == 16


def test_page_cache_allocates_each_page_once() -> None:
    pages = PageCache(3, page_size=4)
    assert sorted([*pages.allocate(1), *pages.allocate(2)]) == [1, 2, 3] and pages.num_free == 0
