"""Bad words of several tokens: every output is that of a plain loop that never completes one, whatever the drafts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams, TextCodec
from stepgraph.graphs import sampled_stages
from stepgraph.sampling.params import GREEDY
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, Setup, finish, make_engine, plain

BASE = Setup(k=3, greedy_only=False, buckets=(4,))
SETUPS = {
    "plain": replace(BASE, k=0),
    "perfect": replace(BASE, drafter="perfect", k=4),
    "unmasked": replace(BASE, drafter="half", draft_masks=False, rounds_in_flight=3),
    "look-up": replace(BASE, drafter="ngram", grammar_backend="xgrammar"),
    "loops": replace(BASE, drafter="perfect", loops=True),
    "eager": replace(BASE, drafter="perfect", eager=True),
}
WORDS, LONGEST = 12, 4
A, B, C = (VOCABULARY.tokens.index(text) for text in (b"a", b"b", b"c"))


@pytest.fixture(params=list(SETUPS.values()), ids=list(SETUPS), scope="module")
def engine(request: pytest.FixtureRequest) -> Any:
    with make_engine(request.param, max_bad_words=WORDS, max_bad_word_tokens=LONGEST) as made:
        yield made


def parts_of(tokens: list[int], sizes: list[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive parts of an output, each of which is then a bad word."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(tuple(tokens[start : start + size]) for start, size in zip(starts, sizes, strict=True) if start < len(tokens))


asks = st.tuples(
    st.lists(st.integers(0, 95), min_size=1, max_size=9),
    st.sampled_from(CONSTRAINTS),
    st.lists(st.integers(1, LONGEST), min_size=1, max_size=5),
    st.sampled_from([GREEDY, SamplingParams(temperature=0, frequency_penalty=0.7, min_new_tokens=4)]),
)


@settings(max_examples=12)
@given(batch=st.lists(asks, min_size=1, max_size=4))
def test_outputs_equal_a_plain_loop(engine: Engine, batch: list[tuple[Any, ...]]) -> None:
    """The words are parts of the output without bad words, then of the output with these, so they occur at all positions."""
    expected = []
    for prompt, constraint, sizes, sampling in batch:
        banning = sampling
        for _ in range(2):
            tokens = plain(prompt, 20, constraint, sampling=banning).tokens
            banning = replace(banning, bad_words=(*banning.bad_words, *parts_of(tokens, sizes)))
        job = engine.submit(prompt, constraint=constraint, sampling=banning, max_new_tokens=20)
        expected.append((job, plain(prompt, 20, constraint, sampling=banning)))
    unbanned = engine.submit([7], max_new_tokens=20)
    finish(engine)
    for job, answer in expected:
        assert (job.tokens, job.finish_reason, job.error) == (*answer, "")
    assert unbanned.tokens == plain([7], 20).tokens


def test_drafts_are_accepted_beside_bad_words_and_a_planted_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: drafts do not count as output before later positions of the same round."""
    text = plain([3], 24, sampling=replace(GREEDY, ignore_eos=True)).tokens
    sampling = replace(GREEDY, ignore_eos=True, bad_words=(tuple(text[9:11]), tuple(text[15:19])))
    expected, honest = plain([3], 24, sampling=sampling).tokens, sampled_stages.ban_words
    assert expected != text
    with make_engine(SETUPS["perfect"], max_bad_words=2) as engine:
        job = engine.generate([3], sampling=sampling, max_new_tokens=24)
        assert job.tokens == expected and job.rounds < 24 and job.num_accepted_drafts > 8

    def forgets_drafts(buffers: Any, batch: Any, *others: Any) -> Any:
        return honest(buffers, batch._replace(drafts=torch.full_like(batch.drafts, -1)), *others)

    monkeypatch.setattr(sampled_stages, "ban_words", forgets_drafts)
    with make_engine(SETUPS["perfect"], max_bad_words=2) as engine:
        assert engine.generate([3], sampling=sampling, max_new_tokens=24).tokens != expected


def test_sampled_outputs_never_contain_a_bad_word() -> None:
    words = tuple((token, other) for token in range(40, 44) for other in range(40, 43))
    favoured = {token: 9.0 for token in range(40, 44)}
    with make_engine(replace(BASE, drafter="fair"), max_bad_words=len(words)) as engine:
        free = engine.generate([3], sampling=SamplingParams(temperature=1, seed=0, logit_bias=favoured), max_new_tokens=40)
        assert any(pair in words for pair in itertools.pairwise(free.tokens))
        for seed in range(8):
            sampling = SamplingParams(temperature=1, seed=seed, logit_bias=favoured, bad_words=words, ignore_eos=True)
            tokens = engine.generate([3], sampling=sampling, max_new_tokens=40).tokens
            assert len(tokens) == 40 and not any(pair in words for pair in itertools.pairwise(tokens))


def test_a_word_that_leaves_no_legal_token_is_a_dead_end() -> None:
    with make_engine(BASE, max_bad_words=3) as engine:
        sampling = replace(GREEDY, bad_words=((A, B, C),))
        job = engine.generate([1], constraint=Constraint.regex("abc"), sampling=sampling, max_new_tokens=9)
        assert (job.tokens, job.finish_reason, job.error) == ([A, B], "dead_end", "")
        whole = engine.generate([1], constraint=Constraint.regex("abc"), sampling=replace(GREEDY, bad_words=((B, C, A),)), max_new_tokens=9)
        assert whole.tokens == [A, B, C], "the row keeps no word of the request before"


def test_a_resumed_output_ends_with_the_beginning_of_a_word(engine: Engine) -> None:
    text = plain([5], 16, sampling=replace(GREEDY, ignore_eos=True)).tokens
    sampling = replace(GREEDY, ignore_eos=True, bad_words=(tuple(text[6:9]),))
    expected = plain([5], 16, sampling=sampling).tokens
    jobs = [engine.submit([5], sampling=sampling, max_new_tokens=16, resume_from=expected[:cut]) for cut in range(16)]
    finish(engine)
    assert [[*job.resume_from, *job.tokens] for job in jobs] == [expected] * 16


def test_texts_are_encoded_alone_and_after_a_blank() -> None:
    config = EngineConfig(max_rows=1, max_length=64, max_bad_words=2, draft_length=0, num_speculative_tokens=0, backend="tape")
    with Engine(TARGET, vocabulary=VOCABULARY, tokenizer=TextCodec.of_bytes(VOCABULARY), config=config) as engine:
        job = engine.generate([1], constraint=Constraint.regex("a[bc]"), sampling=SamplingParams(bad_words=("ab",)), max_new_tokens=9)
        assert job.text == "ac" and len(job.sampling.bad_words) == 2 and job.sampling.bad_words[0] == (A, B)
        with pytest.raises(ValueError, match=r"sampling.bad_words: got 4 sequences of tokens, expected at most .*=2; a text is two"):
            engine.submit([1], sampling=SamplingParams(bad_words=("ab", "bc")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ab", r"SamplingParams.bad_words: got str, expected a tuple of texts or sequences of token ids"),
        (
            ((),),
            r"SamplingParams.bad_words\[0\]: got \(\), expected a text of 1 to 1000 characters, or a sequence of at least one token id",
        ),
        (((1,), (2, -1)), r"SamplingParams.bad_words\[1\]\[1\]: got -1, expected a token id >= 0"),
        (("",), r"SamplingParams.bad_words\[0\]: got '', expected a text of 1 to 1000 characters"),
    ],
)
def test_wrong_words_are_refused(words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(bad_words=words)


def test_words_beyond_the_sizes_of_the_engine_are_refused() -> None:
    with make_engine(BASE, max_bad_words=1, max_bad_word_tokens=3) as engine:
        for words, message in (
            (((1,), (2,)), r"sampling.bad_words: got 2 sequences of tokens, expected at most EngineConfig.max_bad_words=1"),
            (((1, 2, 3, 4),), r"sampling.bad_words: got a word of 4 tokens, expected at most EngineConfig.max_bad_word_tokens=3"),
            (((1, 500),), r"sampling.bad_words\[0\]\[1\]: got 500, expected a token id from 0 to"),
            (("ab",), r"sampling.bad_words\[0\]: got 'ab', expected token ids: the engine has no tokenizer"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit([1], sampling=SamplingParams(bad_words=words))
    with pytest.raises(ValueError, match=r"EngineConfig.max_bad_words: got 4 with greedy_only=True"):
        EngineConfig(max_bad_words=4, greedy_only=True)
