"""Drafts from the text alone: any proposal yields the tokens of plain decoding, and correct drafts are accepted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Engine, SamplingParams
from stepgraph.graphs import GraphKey, Limits, StaticBuffers, TapeBackend
from stepgraph.graphs.batch import read_batch
from stepgraph.graphs.drafting import store_chain
from stepgraph.graphs.proposing import propose, text_specs
from stepgraph.graphs.round_specs import round_specs
from stepgraph.graphs.row_layout import Column
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.sampling.grammar.status import FinishCode
from tests.helpers.proposers import FormulaProposer, noise
from tests.helpers.toy_engines import CONSTRAINTS, CONTROL, Setup, finish, make_engine, plain, shared_engine
from tests.laws.test_greedy_oracle import Ask, answer, asks, run_schedule
from tools.gpu.checks.states import RoundBench

SETUPS = [
    Setup(k=6, drafter="ngram"),
    Setup(k=1, drafter="ngram", max_rows=2),
    Setup(k=2, drafter="parrot", max_rows=2, rounds_in_flight=3),
    Setup(k=3, drafter="noise", max_rows=2, forced_drafts=True),
    Setup(k=4, drafter="control", max_rows=2),
    Setup(k=5, drafter="stops", max_rows=2, rounds_in_flight=1, forced_drafts=True),
    Setup(k=4, drafter="function", max_rows=2, rounds_in_flight=1),
]
MORE_SETUPS = [
    Setup(k=2, drafter="ngram", rounds_in_flight=3),
    Setup(k=6, drafter="outside", asynchronous=False),
    Setup(k=8, drafter="noise", max_rows=3),
]


@st.composite
def asks_with_texts(draw: st.DrawFn) -> Ask:
    """Requests, some with a draft text: the correct one, a damaged one, or the prompt."""
    ask = draw(asks)
    right = answer(replace(ask, draft_ids=None)).tokens
    cut = draw(st.integers(0, 12))
    damaged = [*right[:cut], *draw(st.lists(st.integers(0, CONTROL), max_size=2)), *right[cut + draw(st.integers(0, 2)) :]]
    text = draw(st.sampled_from([None, right, damaged, list(ask.prompt)]))
    return ask if text is None else replace(ask, draft_ids=tuple(text))


batches = st.lists(st.tuples(asks_with_texts(), st.integers(0, 3)), min_size=1, max_size=6)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@settings(max_examples=8)
@given(batch=batches)
def test_every_job_equals_plain_greedy(setup: Setup, batch: list[tuple[Ask, int]]) -> None:
    run_schedule(setup, batch)


@pytest.mark.soak
@pytest.mark.parametrize("setup", [*SETUPS, *MORE_SETUPS], ids=str)
@settings(max_examples=1000, derandomize=False)
@given(batch=batches)
def test_every_job_equals_plain_greedy_long(setup: Setup, batch: list[tuple[Ask, int]]) -> None:
    run_schedule(setup, batch)


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[2], SETUPS[6]], ids=str)
@pytest.mark.parametrize("index", range(4))
def test_correct_draft_text_needs_the_fewest_rounds(setup: Setup, index: int) -> None:
    engine, constraint = shared_engine(setup), CONSTRAINTS[index]
    expected = plain([index, 9], 40, constraint)
    job = engine.generate([index, 9], constraint=constraint, max_new_tokens=40, draft_ids=expected.tokens)
    assert (job.tokens, job.finish_reason) == (expected.tokens, expected.reason)
    assert job.rounds <= len(job.tokens) // (setup.k + 1) + 1, "the first round drafts as well"
    fewer = engine.generate([index, 9], constraint=constraint, max_new_tokens=40, draft_ids=expected.tokens, num_speculative_tokens=1)
    assert fewer.tokens == expected.tokens and len(job.tokens) // 2 <= fewer.rounds <= len(job.tokens) // 2 + 1


def test_look_up_recovers_after_a_difference() -> None:
    engine, expected = shared_engine(SETUPS[0]), plain([2, 9], 60, CONSTRAINTS[2]).tokens
    text = [*expected[:9], 1, 1, *expected[11:20], *expected[26:]]  # two tokens changed, six missing
    job = engine.generate([2, 9], constraint=CONSTRAINTS[2], max_new_tokens=60, draft_ids=text)
    assert job.tokens == expected
    alone = engine.generate([2, 9], constraint=CONSTRAINTS[2], max_new_tokens=60)
    assert job.rounds < 20 < alone.rounds


def test_row_text_equals_prompt_and_output() -> None:
    """Prompts in chunks, a prompt of one token, reused rows, rows that emit at different speeds."""
    with make_engine(Setup(k=3, drafter="ngram", max_rows=2, asynchronous=False)) as engine:
        for seed in range(3):
            jobs = [engine.submit([*range(seed, 14 * seed + 1)], max_new_tokens=12 + 9 * seed) for _ in range(2)]
            while engine.has_work:
                engine.step()
                for job in jobs:
                    if not job.finished and job.tokens:
                        known = [*job.prompt_ids, *job.tokens]
                        assert known in engine.buffers.row_text[:2, : len(known)].tolist()
        assert int(engine.buffers.row_text[:, engine.limits.max_length].max()) == -1


def test_rows_without_drafts_do_not_affect_other_rows() -> None:
    engine = shared_engine(SAMPLED)
    options = [{"num_speculative_tokens": 0} if index % 2 else {} for index in range(6)]
    alone = [ask(engine, index, **options[index]) for index in range(6)]
    jobs = [submit(engine, index, **options[index]) for index in range(6)]
    finish(engine)
    assert [job.tokens for job in jobs] == alone
    assert alone[3] == ask(engine, 3) == plain([3, 7], 30, sampling=jobs[3].sampling).tokens, "greedy rows equal plain decoding"
    assert all(job.num_accepted_drafts == 0 for job in jobs[1::2]) and all(job.num_accepted_drafts for job in jobs[::2])


SAMPLED = Setup(k=3, drafter="ngram", max_rows=2, greedy_only=False)


def submit(engine: Engine, index: int, **options: Any) -> Any:
    """Alternating greedy and sampled requests, some with a grammar; the texts are repetitive."""
    sampling = SamplingParams(temperature=index % 3 * 0.4, seed=index, logit_bias={20: 9.0, 21: 9.0, 22: 9.0})
    return engine.submit([index, 7], sampling=sampling, constraint=CONSTRAINTS[2 * (index == 4)], max_new_tokens=30, **options)


def ask(engine: Engine, index: int, **options: Any) -> list[int]:
    job = submit(engine, index, **options)
    finish(engine)
    return list(job.tokens)


def test_seeded_text_is_the_same_alone_batched_and_eager() -> None:
    engine = shared_engine(SAMPLED)
    alone = [ask(engine, index) for index in range(6)]
    with make_engine(replace(SAMPLED, eager=True)) as eager:
        jobs = [submit(eager, index) for index in reversed(range(6))]
        finish(eager)
        assert [job.tokens for job in reversed(jobs)] == alone
    submit(engine, 1, draft_ids=alone[1] * 2)
    assert ask(engine, 2) == ask(engine, 2, draft_ids=[]) == alone[2], "with earlier and concurrent requests that have draft texts"
    assert ask(engine, 2) == alone[2]
    assert alone[0] == plain([0, 7], 30, sampling=SamplingParams(temperature=0, logit_bias={20: 9.0, 21: 9.0, 22: 9.0})).tokens


@pytest.mark.parametrize(
    ("k", "proposer", "forced"), [(1, NgramLookup(), False), (4, NgramLookup(3, 2), True), (8, noise(CONTROL), False)], ids="148"
)
def test_rounds_replay_as_eager(k: int, proposer: Any, forced: bool) -> None:
    backend = TapeBackend(poison="every")
    bench = RoundBench(backend, k, proposer=proposer, forced_drafts=forced)
    for constrained, sampled in itertools.product((False, True), (False, True)):
        step = bench.round.step(GraphKey(4, constrained, sampled))
        bench.compare(step, 4, (lambda: bench.push_batch(4)) if constrained else lambda: None)
    graph = backend.capture(bench.round.step(GraphKey(4, True)), bench.buffers)
    assert graph.report.host_nodes == (("verify", "follow") if forced else ("verify",))
    assert graph.report.nodes.get("copied", 0) == 0
    backend.close()


def test_proposed_chains_end_at_invalid_ids_and_limits() -> None:
    """Chains end at an invalid id and at the draft limit; finished and padding rows get no drafts."""
    limits = Limits(
        max_rows=7, num_speculative_tokens=3, max_length=16, page_size=8, num_pages=14, vocab_size=12, num_tokens=10, feature_size=0
    )
    buffers = StaticBuffers([spec for spec in (*round_specs(limits), *text_specs(limits)) if not spec.name.endswith("_host")])
    proposed = torch.tensor([[1, 2, 3], [4, -1, 5], [6, 10, 7], [2**40, 1, 1], [1, -(2**40), 1], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    buffers.batch_rows.copy_(torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    buffers.row_state[:7, Column.FINISH] = int(FinishCode.RUNNING)
    buffers.row_state[:7, Column.LENGTH] = 4
    buffers.row_state[:7, Column.DRAFT_LIMIT] = 3
    buffers.row_state[5, Column.DRAFT_LIMIT] = 2
    buffers.row_state[6, Column.FINISH] = int(FinishCode.STOP)
    batch = read_batch(buffers, 7)
    proposer = FormulaProposer(lambda history, index: proposed[:7])
    store_chain(buffers, batch, propose(buffers, batch, proposer, limits, limits.num_speculative_tokens))
    kept = [[1, 2, 3], [4, -1, -1], [6, -1, -1], [-1] * 3, [1, -1, -1], [1, 2, -1], [-1] * 3, [-1] * 3]
    assert buffers.row_drafts.tolist() == kept
    assert buffers.row_state[:, Column.DRAFT_COUNT].tolist() == [sum(token >= 0 for token in chain) for chain in kept]


def test_proposers_store_no_distributions() -> None:
    engine = shared_engine(SAMPLED)
    assert engine.buffers.row_draft_probs.numel() == 0 and bool(engine.buffers.row_certain.all())


@pytest.mark.parametrize(
    ("setup", "options", "message"),
    [
        (
            Setup(k=3, eager=True),
            {},
            r"draft_ids: got 2 tokens, expected None: the engine has no look-up drafter; use Engine\(draft='ngram'\)",
        ),
        (SAMPLED, {"num_speculative_tokens": 0}, "draft_ids: got 2 tokens with num_speculative_tokens=0, expected None"),
        (SAMPLED, {"draft_ids": [1, CONTROL + 1]}, rf"draft_ids\[1\]: got {CONTROL + 1}, expected a token id from 0 to {CONTROL}"),
        (SAMPLED, {"draft_ids": [1] * 97}, "draft_ids: got 97 tokens, expected at most max_length=96"),
        (SAMPLED, {"draft_ids": "text"}, "draft_ids: got str, expected a sequence of token ids"),
    ],
    ids=str,
)
def test_invalid_draft_ids_raise_value_error(setup: Setup, options: dict[str, Any], message: str) -> None:
    engine = shared_engine(setup)
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"prompt": [1], "draft_ids": [1, 2], "max_new_tokens": 4, **options})
    assert not engine.has_work


def test_draft_text_of_max_length() -> None:
    expected = plain([1], 40).tokens
    job = shared_engine(SETUPS[0]).generate([1], max_new_tokens=40, draft_ids=[*expected, *[3] * (96 - len(expected))])
    assert job.tokens == expected
