"""Look-up beside a draft model: found tokens are drafted first, and the output and its distribution do not change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams
from stepgraph.graphs import GraphKey, TapeBackend, drafting, proposing
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.round_specs import look_up_specs
from stepgraph.graphs.row_layout import Column
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tests.graphs.test_proposing import ask, asks_with_texts, submit
from tests.helpers.draft_engines import DRAFTERS as FOLDERS
from tests.helpers.law import TOKENS, Setting, forget_certain_drafts
from tests.helpers.oracles import greedy
from tests.helpers.proposers import FormulaProposer, draft_ids_then_noise, noise
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, Setup, finish, make_engine, plain, shared_engine
from tests.laws.test_greedy_oracle import run_schedule
from tests.laws.test_sampling_law_forced import RARE, ROUNDS, SETTINGS, ForcedLaw
from tools.gpu.checks.states import RoundBench

SETUPS = [
    Setup(k=1, drafter="random", look_up=1, max_rows=2, eager=True),
    Setup(k=2, drafter="half", look_up=2, max_rows=2),
    Setup(k=4, drafter="adversarial", look_up=1, draft_masks=False, max_rows=2, eager=True),
    Setup(k=6, drafter="half", look_up=1, forced_drafts=True, max_rows=2, eager=True),
]
MORE_SETUPS = [
    Setup(k=3, drafter="fair", look_up=3, max_rows=2, forced_drafts=True, rounds_in_flight=3),
    Setup(k=5, drafter="illegal", look_up=2, max_rows=2, rounds_in_flight=1),
    Setup(k=8, drafter="perfect", look_up=8),
]
batches = st.lists(st.tuples(asks_with_texts(), st.integers(0, 3)), min_size=1, max_size=6)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@settings(max_examples=3)
@given(batch=batches)
def test_every_job_equals_plain_greedy(setup: Setup, batch: list[tuple[Any, int]]) -> None:
    run_schedule(setup, batch)


@pytest.mark.soak
@pytest.mark.parametrize("setup", [*(replace(setup, eager=False) for setup in SETUPS), *MORE_SETUPS], ids=str)
@settings(max_examples=1000, derandomize=False)
@given(batch=batches)
def test_every_job_equals_plain_greedy_long(setup: Setup, batch: list[tuple[Any, int]]) -> None:
    run_schedule(setup, batch)


RESTLESS = ToyTarget(VOCABULARY.logits_width, seed=3, biases={VOCABULARY.stop_token_ids[0]: -9.0})


def rounds(draft: Any, prompt: Sequence[int], draft_ids: Sequence[int], expected: list[int], **options: Any) -> tuple[int, Engine]:
    """Number of rounds of a text, which must equal the oracle's."""
    config = EngineConfig(
        max_rows=1, num_speculative_tokens=4, draft_length=4, max_length=96, greedy_only=True, backend="tape", eager=True, **options
    )
    given_ids = draft_ids if isinstance(draft, str) or config.look_up else None
    with Engine(RESTLESS, draft, vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        job = engine.generate(prompt, max_new_tokens=len(expected), draft_ids=given_ids)
        assert job.tokens == expected
        return job.rounds, engine


def test_look_up_and_model_together_need_fewest_rounds() -> None:
    """The text differs from the given one in some passages: the model drafts those, the look-up the rest."""
    prompt = [*range(40, 49)]
    expected = greedy(RESTLESS, prompt, 80, (), None, len(VOCABULARY.tokens)).tokens
    given_ids = [*expected[:30], *[7] * 20, *expected[50:]]
    draft = ToyDraft(RESTLESS, 0.6)
    (both, engine), (model, _) = rounds(draft, prompt, given_ids, expected, look_up=3), rounds(draft, prompt, given_ids, expected)
    copied, _ = rounds("ngram", prompt, given_ids, expected)
    assert both < 0.8 * min(model, copied), (both, model, copied)
    stats = engine.stats()
    assert 30 < stats.drafts.accepted_looked_up < stats.drafts.accepted, "both drafters contribute"
    assert stats.drafts.accepted_looked_up <= stats.drafts.looked_up


@pytest.mark.soak
def test_llama_draft_with_look_up_in_the_history() -> None:
    """Without a given text: the look-up finds repetitions in the output. The draft has its own vocabulary."""
    (folder,) = (each for each in FOLDERS if each.name == "model")
    found = []
    for look_up in (0, 3):
        with folder.engine(4, look_up=look_up) as engine:
            jobs = [engine.generate([5, 6, index], max_new_tokens=36) for index in range(3)]
        found.append(([job.tokens for job in jobs], sum(job.rounds for job in jobs)))
    assert found[0][0] == found[1][0]
    assert found[1][1] < 0.9 * found[0][1], found


class LookUpLaw(ForcedLaw):
    """Rows with a look-up chain of arbitrary tokens beside a draft model; at some positions a grammar forces another token."""

    def __init__(self, k: int, d2t: bool, settings: Sequence[Setting]) -> None:
        super().__init__(k, d2t, settings)
        made = torch.Generator().manual_seed(5)
        self.chains = torch.randint(-1, TOKENS, (self.limits.rows, k), generator=made)
        self.forced = torch.where(torch.rand(self.forced.shape, generator=made) < 0.3, self.forced, -1)

    def _specs(self) -> Iterable[BufferSpec]:
        return [*super()._specs(), *proposing.text_specs(self.limits), *look_up_specs(self.limits)]

    def _chain(self, batch: Batch) -> Tensor:
        chains = self.chains[batch.rows]
        proposer = FormulaProposer(lambda history, index: chains)
        return proposing.propose(self.buffers, batch, proposer, self.limits, self.limits.num_speculative_tokens)


@pytest.mark.parametrize(("k", "d2t"), [(2, True), *(pytest.param(k, d2t, marks=pytest.mark.soak) for k in (1, 3, 4) for d2t in (0, 1))])
def test_looked_up_drafts_preserve_the_distribution(k: int, d2t: bool) -> None:
    law = LookUpLaw(k, d2t, SETTINGS)
    assert float(law.p_value_bounds(law.count_tokens(ROUNDS)).min()) > RARE
    looked_up = law.buffers.row_looked_up[law.buffers.batch_rows]
    assert all(int(looked_up[law.kind == kind].sum(0).min()) > 20 for kind in range(len(SETTINGS))), (
        "at every draft position of every setting"
    )


def test_treating_looked_up_drafts_as_drawn_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_certain_drafts(monkeypatch)
    law = LookUpLaw(2, False, SETTINGS)
    assert (law.p_value_bounds(law.count_tokens(ROUNDS)).amin(0) < RARE).tolist() == [True] * 4


class Positions:
    """One position of every row of a small batch: the model chooses `own`, and the mask allows `allowed`."""

    def __init__(self, forced: int = -1) -> None:
        self.law = LookUpLaw(2, False, SETTINGS[:1])
        self.law.forced.fill_(forced)
        self.batch = read_batch(self.law.buffers, self.law.limits.max_rows)

    def choose(self, chain: Sequence[int], own: int, allowed: Sequence[int], wrong_tag: int | None = None, sampled: bool = True) -> Tensor:
        law, buffers = self.law, self.law.buffers
        law._fill_masks(self.batch, 0, self.batch.column(Column.LAST_TOKEN), self.batch.live)
        buffers.row_masks[self.batch.rows, 0] = sum(1 << token for token in allowed)
        if wrong_tag is not None:
            buffers.row_tags[self.batch.rows[::2], 0, wrong_tag] += 1
        logits = torch.zeros(len(self.batch.rows), law.limits.num_tokens)
        logits[:, own] = 99.0
        chains = torch.tensor(chain).repeat(len(logits), 1)
        alive = self.batch.live
        mask = drafting.grammar_mask_of(buffers, self.batch, 1)
        tokens = drafting.choose_draft(buffers, self.batch, 1, logits, alive, mask, sampled, None, chains)
        return torch.stack([tokens, buffers.row_looked_up[self.batch.rows, 0], chains[:, 1]], 1)


@pytest.mark.parametrize(
    ("forced", "chain", "allowed", "chosen", "looked_up", "next_of_chain"),
    [
        (-1, (3, 4), (1, 3), 3, 1, 4),
        (-1, (2, 4), (1, 3), 1, 0, -1),  # illegal under its mask: the draft model drafts, and the chain ends
        (-1, (-1, -1), (1, 3), 1, 0, -1),  # nothing was found
        (-1, (1, 4), (1, 3), 1, 1, 4),  # the draft model chooses the same token
        (6, (3, 4), (1, 3, 6), 6, 1, -1),  # the forced token has priority over the chain, which ends
        (6, (6, 4), (1, 6), 6, 1, 4),
    ],
)
def test_order_of_forced_looked_up_and_model_drafts(
    forced: int, chain: Sequence[int], allowed: Sequence[int], chosen: int, looked_up: int, next_of_chain: int
) -> None:
    positions = Positions(forced)
    for sampled in (True, False):
        found = positions.choose(chain, 1, allowed, sampled=sampled)
        assert found.unique(dim=0).tolist() == [[chosen, looked_up, next_of_chain]]


def test_looked_up_token_is_not_drafted_under_a_stale_mask() -> None:
    positions = Positions()
    for column in range(4):
        found = positions.choose((3, 4), 1, (1, 3), wrong_tag=column)
        assert found[::2].unique(dim=0).tolist() == [[-1, 0, -1]] and found[1::2].unique(dim=0).tolist() == [[3, 1, 4]]


@pytest.mark.parametrize(
    ("k", "draft_masks", "forced"),
    [
        pytest.param(1, True, False, id="1"),
        pytest.param(2, True, True, id="2 forced"),
        pytest.param(2, False, False, id="2 free"),
        pytest.param(4, True, True, id="4 forced", marks=pytest.mark.soak),
        pytest.param(3, False, False, id="3 free", marks=pytest.mark.soak),
    ],
)
def test_rounds_replay_as_eager(k: int, draft_masks: bool, forced: bool) -> None:
    backend = TapeBackend(poison="every")
    bench = RoundBench(backend, k, draft_masks, forced_drafts=forced, look_up=NgramLookup(min_ngram=2))
    for constrained, sampled in itertools.product((False, True), (False, True)):
        step = bench.round.step(GraphKey(4, constrained, sampled))
        bench.compare(step, 4, (lambda: bench.push_batch(4)) if constrained else lambda: None)
    is_constrained = backend.capture(bench.round.step(GraphKey(4, True)), bench.buffers).report
    assert len(is_constrained.host_nodes) == (k + 1 if draft_masks else 1) and is_constrained.nodes.get("copied", 0) == 0
    assert any(run.name == "look_up" for run in is_constrained.stages)
    backend.close()


def test_no_buffers_or_nodes_without_look_up() -> None:
    with make_engine(Setup(k=2, max_rows=1, eager=True)) as engine:
        assert not [name for name in engine.buffers if "text" in name or "looked_up" in name]
    with make_engine(Setup(k=2, max_rows=1, eager=True, look_up=3)) as engine:
        assert [name for name in engine.buffers if "text" in name or "looked_up" in name] == ["row_text", "text_ring_host", "row_looked_up"]


SAMPLED = Setup(k=2, drafter="fair", look_up=2, max_rows=2, greedy_only=False, eager=True)


def test_seeded_text_is_independent_of_batch_composition() -> None:
    engine = shared_engine(SAMPLED)
    alone = [ask(engine, index) for index in range(5)]
    assert engine.stats().drafts.accepted_looked_up > 5
    expecting = [1, *[20, 21, 22] * 7]
    with make_engine(SAMPLED) as another:
        fresh = ask(another, 2, draft_ids=expecting)
        assert ask(engine, 2, draft_ids=expecting) == fresh, "in a row where other requests had sampled drafts"
        jobs = [submit(another, index) for index in reversed(range(5))]
        finish(another)
        assert [job.tokens for job in reversed(jobs)] == alone
    assert alone[0] == plain([0, 7], 30, sampling=SamplingParams(temperature=0, logit_bias={20: 9.0, 21: 9.0, 22: 9.0})).tokens


@pytest.mark.parametrize("constraint", [None, CONSTRAINTS[1]], ids=["free", "schema"])
def test_correct_draft_text_needs_few_rounds(constraint: Constraint | None) -> None:
    """With a draft model of random output; with a grammar, drafts start after the first round's masks."""
    engine = shared_engine(SETUPS[2] if constraint is None else SETUPS[0])
    prompt, k = [*range(30, 38)], engine.limits.num_speculative_tokens
    expected = plain(prompt, 40, constraint)
    job = engine.generate(prompt, constraint=constraint, max_new_tokens=40, draft_ids=expected.tokens)
    assert (job.tokens, job.finish_reason) == (expected.tokens, expected.reason)
    assert job.rounds <= len(job.tokens) // (k + 1) + (1 if constraint is None else 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"look_up": 9}, r"EngineConfig\.look_up: got 9, expected a whole number from 0 to 8"),
        ({"look_up": True}, r"EngineConfig\.look_up: got True, expected a whole number from 0 to 8"),
        ({"look_up": -1}, r"EngineConfig\.look_up: got -1, expected"),
        ({"look_up": None}, r"EngineConfig\.look_up: got None, expected"),
        ({"look_up": 3, "num_speculative_tokens": 0}, r"EngineConfig\.look_up: got 3 with num_speculative_tokens=0, expected 0"),
        ({"look_up": 3, "draft_length": 0}, r"EngineConfig\.look_up: got 3 with draft_length=0, expected 0"),
    ],
    ids=str,
)
def test_invalid_look_up_raises_value_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_look_up_requires_a_draft_model_and_is_in_the_report() -> None:
    config = EngineConfig(max_rows=1, look_up=3, max_length=32, backend="tape", eager=True, rounds_in_flight=1)
    drafters: list[tuple[Any, str]] = [("ngram", "NgramLookup"), ("auto", "NgramLookup"), ("forced", "ForcedDrafts")]
    for draft, name in (*drafters, (noise(9), "FormulaProposer"), (draft_ids_then_noise, "FunctionProposer")):
        with pytest.raises(ValueError, match=rf"EngineConfig\.look_up: got 3 with the drafter {name}, expected 0: .*draft='ngram'"):
            Engine(TARGET, draft, vocabulary=VOCABULARY, config=config)
    with pytest.raises(ValueError, match=r"EngineConfig\.look_up: got 3 without a draft, expected 0"):
        Engine(TARGET, "none", vocabulary=VOCABULARY, config=config)
    with Engine(TARGET, ToyDraft(TARGET), vocabulary=VOCABULARY, config=config) as engine:
        assert "draft: n-gram look-up, 3 to 8 tokens (beside the draft model)" in engine.capture().notes
