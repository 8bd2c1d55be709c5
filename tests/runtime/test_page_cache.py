"""Requests that begin alike share pages: the same tokens as without, fewer of them computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph import Engine, SamplingParams
from stepgraph.graphs import StaticBuffers, TapeBackend
from stepgraph.graphs.model import ModelInput, ModelOutput
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.page_cache import PageCache
from tests.helpers.prefix_engines import CONFIG, DRAFTS, SYSTEM, K, ask, finish, make_engine, rounds_of, small_llama
from tests.helpers.toy_engines import STOP, TARGET, VOCABULARY, plain


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_second_request_computes_what_the_first_did_not(draft: str) -> None:
    with make_engine(draft) as engine:
        drafts, cached = engine.limits.num_speculative_tokens, []
        for length in (17, 17, 18, 16, 13, 12, 14):
            job = ask(engine, SYSTEM[:length] if length < 18 else [*SYSTEM, 7])
            finish(engine)
            assert job.tokens == plain(job.prompt_ids, 9).tokens
            assert job.rounds == rounds_of(job, drafts), "the draft never erred: its entries are right"
            cached.append(job.num_cached_tokens)
        # Of 17 and more tokens four pages lie in front of the last one; a draft at its token wants one more position behind them,
        # one that looks ahead is not served by a page that was made for other tokens behind.
        wanted = {
            "none": [0, 16, 16, 12, 12, 8, 12],
            "at its token": [0, 12, 16, 12, 8, 8, 12],
            "one ahead": [0, 16, 16, 12, 12, 8, 12],
            "two ahead": [0, 12, 12, 12, 8, 8, 12],
        }
        assert cached == wanted[draft]
        assert engine.stats().reused_tokens == sum(cached)


class Vouched(ToyTarget):
    """Attention sees nothing where every position of a call is inert."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert not inputs.shared or bool((inputs.slots[:, -1] >= inputs.page_size).all()), "nobody vouches for what is not written"
        return super().forward(inputs, buffers)


def test_a_prompt_of_whole_pages_and_a_chunk_of_one_token() -> None:
    """Behind shared pages a draft's first chunk takes two positions at least, whatever the chunk: the first of them is not written."""
    target = Vouched(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0})  # otherwise TARGET
    config = replace(CONFIG, greedy_only=True, prefill_chunk=1)
    with Engine(target, ToyDraft(target), vocabulary=VOCABULARY, config=config, backend=TapeBackend()) as engine:
        engine.capture()
        for length in (9, 9, 10, 12):
            job = ask(engine, SYSTEM[:length])
            finish(engine)
            assert (job.tokens, job.rounds) == (plain(SYSTEM[:length], 9).tokens, rounds_of(job, K))
        assert job.num_cached_tokens == 8


def test_a_page_serves_only_its_own_text_and_salt() -> None:
    with make_engine("at its token") as engine:
        first = ask(engine, SYSTEM)
        finish(engine)
        others = [[8, *SYSTEM[1:]], [*SYSTEM[:4], 8, *SYSTEM[5:]], SYSTEM[4:]]  # what differs is in front, or in the second page
        jobs = [ask(engine, prompt) for prompt in others] + [ask(engine, SYSTEM, cache_salt="tenant") for _ in range(2)]
        finish(engine)
        assert [job.num_cached_tokens for job in jobs] == [0, 4, 0, 0, 12]
        assert jobs[-1].tokens == jobs[-2].tokens == first.tokens == plain(SYSTEM, 9).tokens


def test_who_begins_alike_at_the_same_time_computes_it_once() -> None:
    """The second is seated before anything of the first is computed, and looks again when its turn has come."""
    with make_engine("at its token") as engine:
        jobs = [ask(engine, [*SYSTEM, place]) for place in range(3)]
        finish(engine)
        assert [job.num_cached_tokens for job in jobs] == [0, 16, 16]
        assert all(job.tokens == plain(job.prompt_ids, 9).tokens and job.rounds == rounds_of(job, K) for job in jobs)


def test_the_next_turn_of_a_conversation_finds_what_was_said() -> None:
    with make_engine("one ahead") as engine:
        text, cached = list(SYSTEM[:5]), []
        for turn in range(4):
            job = ask(engine, [*text, turn + 1, turn + 2], 7, sampling=SamplingParams(temperature=0, ignore_eos=True))
            finish(engine)
            text = [*job.prompt_ids, *job.tokens]
            cached.append(job.num_cached_tokens)
            assert job.rounds == rounds_of(job, K)
        assert cached == [0, 12, 20, 28], "all full pages of 14, 23 and 32 tokens but what the last page lacks of tokens behind it"


def test_penalties_see_the_part_of_a_prompt_that_was_not_computed() -> None:
    sampling = SamplingParams(temperature=0, repetition_penalty=5.0, frequency_penalty=0.3, ignore_eos=True)
    with make_engine("at its token", greedy_only=False) as engine:
        for _ in range(2):
            job = ask(engine, SYSTEM, 16, sampling=sampling)
            finish(engine)
            assert job.tokens == plain(SYSTEM, 16, sampling=sampling).tokens
        assert job.num_cached_tokens == 12
        other = ask(engine, SYSTEM[:3], 16, sampling=sampling)
        finish(engine)
        assert other.tokens == plain(SYSTEM[:3], 16, sampling=sampling).tokens, "nothing is left of the row's former owner"
        assert job.tokens != plain(SYSTEM, 16, sampling=SamplingParams(temperature=0, ignore_eos=True)).tokens


def test_draws_do_not_depend_on_what_was_found() -> None:
    sampling = SamplingParams(temperature=1.1, top_p=0.9, seed=4)
    with make_engine("at its token", greedy_only=False) as engine:
        jobs = []
        for _ in range(2):
            jobs.append(ask(engine, SYSTEM, 16, sampling=sampling))
            finish(engine)
        assert jobs[0].tokens == jobs[1].tokens and [job.num_cached_tokens for job in jobs] == [0, 12]


def test_pages_are_kept_while_nobody_wants_them() -> None:
    """Least recently used first, of one text its end first, and never what somebody holds."""
    endless, texts = SamplingParams(temperature=0, ignore_eos=True), []
    with make_engine("none") as engine:
        for first in range(5):
            job = ask(engine, [first] * 16, 8, sampling=endless)
            finish(engine)
            texts.append([*job.prompt_ids, *job.tokens])
        assert engine.stats().cached_pages == 5 * 5 and engine.stats().evicted_pages == 0, "of 23 entries five pages are full"
        held = ask(engine, [1] * 16, 24, sampling=endless)
        engine.step()
        assert (held.num_cached_tokens, engine.stats().evicted_pages) == (12, 2), "seven more were wanted, and five free"
        assert [len(engine._scheduler.rows._pages.find("", text, 23)) for text in texts] == [3, 5, 5, 5, 5]
        more = ask(engine, [0] * 16, 20, sampling=endless)  # nine pages, of which it finds three
        engine.step()
        assert (more.num_cached_tokens, engine.stats().evicted_pages) == (12, 8)
        assert [len(engine._scheduler.rows._pages.find("", text, 23)) for text in texts] == [3, 3, 1, 5, 5], "what is held stays"
        finish(engine)


@pytest.mark.parametrize("kept", [0, 2])
def test_no_more_pages_are_kept_than_asked_for(kept: int) -> None:
    with make_engine("at its token", prefix_cache_pages=kept) as engine:
        jobs = [ask(engine, SYSTEM), ask(engine, SYSTEM)]
        finish(engine)
        assert engine.stats().cached_pages == kept and jobs[1].num_cached_tokens == 12, "neighbours share in any case"
        later = ask(engine, SYSTEM)
        finish(engine)
        assert later.num_cached_tokens == 4 * kept and later.tokens == plain(SYSTEM, 9).tokens


class Recurrent(ToyDraft):
    shares_prefix = False


def test_it_can_be_switched_off_and_models_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with make_engine("none") as engine, pytest.raises(ValueError, match="cache_salt: got int, expected a string"):
        ask(engine, SYSTEM, cache_salt=1)


def test_running_out_of_pages_queues_in_order_and_fails_nobody() -> None:
    """Thirty pages for requests of up to twelve, in a stream that shares some of its beginnings."""
    with make_engine("at its token") as engine:
        jobs = [ask(engine, [*SYSTEM[: place % 3 * 6], place + 1, 2], 25 + place) for place in range(9)]
        begun: list[int] = []
        while engine.has_work:
            engine.step()
            assert engine.stats().free_pages >= 0
            begun += [job.id for job in jobs if job.tokens and job.id not in begun]
        assert begun == sorted(begun), "served in order of arrival"
        for place, job in enumerate(jobs):
            assert (job.tokens, job.error) == (plain(job.prompt_ids, 25 + place).tokens, "")
        assert engine.stats().reused_tokens > 0 and engine.stats().evicted_pages > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_the_same_bits(dtype: torch.dtype) -> None:
    target = Llama(replace(small_llama().config, dtype=dtype)).randomise(3)
    config = replace(CONFIG, num_speculative_tokens=0)
    with Engine(target, config=config, backend=TapeBackend()) as engine:
        engine.capture()
        jobs = []
        for _ in range(2):
            jobs.append(ask(engine, [token % 7 for token in SYSTEM], 16, sampling=SamplingParams(temperature=0, logprobs=True)))
            finish(engine)
        assert (jobs[0].tokens, jobs[0].logprobs) == (jobs[1].tokens, jobs[1].logprobs) and jobs[1].num_cached_tokens == 16


def test_page_cache_allocates_all_requested_pages_or_none() -> None:
    pages = PageCache(3, page_size=4)
    assert pages.allocate(4) is None and pages.num_free == 3
    assert sorted(pages.allocate(3) or ()) == [1, 2, 3] and pages.allocate(1) is None
