"""Every kind of draft from a folder, in the engine: drafts equal a reference implementation, texts equal those without drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from stepgraph import Constraint, Engine, Job, SamplingParams
from stepgraph.graphs import StaticBuffers, TapeBackend
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import Llama
from tests.helpers.draft_engines import CONFIG, DRAFTERS, DraftCase
from tests.helpers.family_texts import plain
from tools.random_weights import randomised

PROMPTS = [[7, 30, 5, 12, 12, 3, 90, 33, 100, 8, 4], [9]]
# They share two pages, or one and a half, with the first prompt. A head's entries of a page depend on the next token as well.
ALIKE = [[*PROMPTS[0][:8], 44, 45, 46], [*PROMPTS[0][:6], 44, 45, 46]]
REUSED = {"eagle3": 4 + 4, "mtp": 4 + 4, "mtp, one per draft": 4, "model": 8 + 4}
CONSTRAINTS = (None, Constraint.regex("[a-f]{3,9}[0-9]+[A-Z]?"), Constraint.choice(["yes", "no", "never"]))
TOKENS = 11
each_length = pytest.mark.parametrize(
    ("drafter", "lengths"),
    [
        pytest.param(each, lengths, id=f"{each.name}-{len(lengths)}", marks=[pytest.mark.soak] * (len(lengths) > 4))
        for each in DRAFTERS
        for lengths in ((1, 2, 3, 6), tuple(range(1, 7)))[: 1 + (each.max_drafts > 3)]
    ],
)
three_drafters = pytest.mark.parametrize(  # the other in the soak
    "drafter", [pytest.param(each, id=each.name, marks=[pytest.mark.soak] * (each.name == "mtp")) for each in DRAFTERS]
)


@each_length
def test_drafts_equal_the_reference_after_any_number_accepted(drafter: DraftCase, lengths: tuple[int, ...]) -> None:
    """Acceptance is random, so that every number of drafts is accepted; each round drafts as if it had processed the whole text."""
    for k in (k for k in lengths if k <= drafter.max_drafts):
        held = set[int]()
        with drafter.engine(k, forced_acceptance=(0.75,) * k) as engine:
            for prompts in (PROMPTS, ALIKE[:1], ALIKE[1:]) if k == 3 else (PROMPTS,):
                jobs = [engine.submit(prompt, max_new_tokens=TOKENS) for prompt in prompts]
                while engine.has_work:
                    held.update(event.num_accepted_drafts for event in engine.step())
                    for row, job in enumerate(jobs):
                        if job.tokens and not job.finished:
                            check_drafts(drafter, job, engine.buffers.row_drafts[row].tolist())
            assert k != 3 or engine.stats().reused_tokens == REUSED[drafter.name]
        assert held >= {0, 1, min(k, 2)}, (k, held)


def check_drafts(drafter: DraftCase, job: Job, drafts: list[int]) -> None:
    useful = drafts[: TOKENS - len(job.tokens)]  # drafts beyond the maximum length are never used
    assert min(useful) >= 0
    expected = drafter.reference_logits([*job.prompt_ids, *job.tokens], useful[:-1])
    for draft, logits in zip(useful, expected, strict=True):
        known = logits[:110][logits[:110].isfinite()]
        assert logits[draft] > known.max() - 1e-4 * known.abs().max(), (job.tokens, drafts)


def decode(engine: Engine, constraints: tuple[Constraint | None, ...], sampling: SamplingParams) -> list[Job]:
    for constraint in filter(None, constraints):
        engine.compile(constraint)  # so that no request waits for its grammar: rows are assigned in order
    requests = [(prompt, constraint) for constraint in constraints for prompt in PROMPTS]
    jobs = [engine.submit(prompt, constraint=constraint, sampling=sampling, max_new_tokens=TOKENS) for prompt, constraint in requests]
    for _ in engine.stream():
        pass
    return jobs


@each_length
def test_texts_equal_plain_greedy_decoding(drafter: DraftCase, lengths: tuple[int, ...]) -> None:
    """With grammars, with and without masked drafts. Under a grammar few tokens are legal, so an untrained draft is often right."""
    accepted = 0
    for k in (k for k in lengths if k <= drafter.max_drafts):
        with drafter.engine(k, draft_masks=k % 2 == 1, max_rows=4, buckets=(4,)) as engine:
            for job in decode(engine, (None, CONSTRAINTS[1 + k // 2 % 2]), SamplingParams(temperature=0)):
                expected = plain(drafter.family, job.prompt_ids, job.constraint, TOKENS, tuple(job.tokens))
                assert (job.tokens, str(job.finish_reason)) == expected, (k, job.constraint)
                accepted += job.num_accepted_drafts
    assert accepted > 2


@three_drafters
def test_bfloat16_texts_do_not_depend_on_the_draft(drafter: DraftCase) -> None:
    config = replace(CONFIG, num_speculative_tokens=2, draft_length=2, max_rows=4, buckets=(4,))
    texts = []
    for draft in (drafter.draft, "none"):
        with Engine.from_pretrained(drafter.target, draft, config=config, dtype=torch.bfloat16) as engine:
            engine.ensure_captured()
            texts.append([job.tokens for job in decode(engine, (None, CONSTRAINTS[1]), SamplingParams(temperature=0))])
    assert texts[0] == texts[1]


@three_drafters
def test_replays_equal_eager_rounds(drafter: DraftCase) -> None:
    """Equal bits: tokens, caches, results and distributions, sampled and greedy, with and without grammars."""
    left = []
    for eager in (False, True):
        with drafter.engine(2, eager=eager, greedy_only=False) as engine:
            settings = (SamplingParams(temperature=0.9, top_p=0.9, seed=5), SamplingParams(temperature=0))
            jobs = [job for sampling in settings for constraint in CONSTRAINTS[:2] for job in decode(engine, (constraint,), sampling)]
            engine.backend.synchronize()
            names = [name for name in engine.buffers if name.startswith(("draft_", "target_", "row_draft")) or name == "results"]
            results = [(job.tokens, job.num_accepted_drafts, job.rounds) for job in jobs]
            left.append((results, {name: engine.buffers[name].clone() for name in names}))
    (results, buffers), (eager_results, eager_buffers) = left
    assert results == eager_results and float(buffers["draft_keys"].abs().max()) > 0
    assert buffers.keys() == eager_buffers.keys() >= {"draft_keys", "draft_values", "row_draft_probs", "results"}
    assert [name for name in buffers if not torch.equal(buffers[name], eager_buffers[name])] == []


@pytest.mark.parametrize("drafter", DRAFTERS[:3], ids=lambda drafter: drafter.name)
def test_prompt_embeddings_replace_those_of_the_draft(drafter: DraftCase) -> None:
    """Given the embeddings of its tokens, a prompt of placeholders has the same drafts; a span ends after the first chunk's last token."""
    target, draft, vocabulary, _ = drafter.loaded
    assert isinstance(target, Llama) and CONFIG.prefill_chunk == 5
    if isinstance(draft, Eagle3):  # a head as wide as its target, and with the target's embeddings
        layer = replace(draft.config.layer, hidden_size=target.config.hidden_size)
        draft = randomised(Eagle3(replace(draft.config, layer=layer), d2t=draft.d2t), 3)
        draft.embedding = target.embedding
    assert getattr(draft, "shares_embeddings", False)
    prompt, count = PROMPTS[0], 6
    spans = {0: target.embedding[prompt[:count]].detach()}
    config = replace(CONFIG, num_speculative_tokens=3, draft_length=3, prefix_reuse=False)
    with Engine(target, draft, vocabulary=vocabulary, config=config, backend=TapeBackend()) as engine:
        engine.ensure_captured()

        def drafts(prompt: list[int], spans: dict[int, Tensor] | None) -> list[list[int]]:
            job, found = engine.submit(prompt, prompt_embeddings=spans, max_new_tokens=TOKENS), list[list[int]]()
            while not job.finished:
                engine.step()
                found.append(engine.buffers.row_drafts[0].tolist())
            return found

        blank = [0] * count + prompt[count:]
        expected = drafts(prompt, None)
        assert drafts(blank, spans) == expected != drafts(blank, None) and max(map(max, expected)) > 0


class Counted(Eagle3):
    """Has random weights, and records the step of each call."""

    steps: ClassVar[list[int]] = []

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        self.steps.append(inputs.step)
        return super().forward(inputs, buffers)


@pytest.mark.parametrize("k", [1, 3])
def test_a_round_runs_the_draft_once_per_draft(k: int) -> None:
    target, head, vocabulary, _ = DRAFTERS[0].loaded
    assert isinstance(head, Eagle3)
    draft = Counted(head.config, d2t=head.d2t)
    with Engine(target, draft, vocabulary=vocabulary, config=replace(CONFIG, num_speculative_tokens=k, draft_length=k)) as engine:
        engine.capture()
        engine.submit([5], max_new_tokens=8)
        engine.step()
        draft.steps.clear()  # of the prompt and the first round
        engine.step()
        assert draft.steps == [*range(1, k + 1)]


def test_capture_report_describes_the_draft() -> None:
    notes = []
    for drafter in DRAFTERS:
        with Engine.from_pretrained(
            drafter.target, drafter.draft, config=replace(CONFIG, num_speculative_tokens=1, draft_length=1)
        ) as engine:
            notes += [note for note in engine.capture().notes if note.startswith("draft")]
    assert notes == [
        "draft: EAGLE-3 over the inputs of layers 3, 0, 2; proposes 54 of 160 tokens",
        "draft: MTP, one module for every draft",
        "draft: MTP, 3 modules, one per draft",
        "draft: a model of 2 layers with 110 tokens with the bytes of a target token",
    ]
