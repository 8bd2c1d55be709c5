"""Training a head: unrolled chains equal drafting, training raises acceptance, resume is bit exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stepgraph.runtime.models.files.checkpoint import Checkpoint, open_checkpoint
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig, RopeConfig
from tests.helpers.draft_oracles import CachedDraft
from tests.helpers.families import folder_of
from tools.random_weights import randomised
from tools.train.acceptance import measure
from tools.train.batches import TrainingSet, embed
from tools.train.collect import save_answers, save_states
from tools.train.heads import Head
from tools.train.plan import TrainingPlan
from tools.train.saved_states import SavedStates
from tools.train.texts import Text
from tools.train.trainer import Trainer
from tools.train.unroll import unroll
from tools.train.vocabulary import choose_proposed

STEPS = 6
HEADS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("mtp", {}),
    ("mtp", {"windows": (None, None, 4)}),
    ("mtp", {"head_norms": True}),
    ("eagle3", {"qkv_bias": True, "head_norms": True}),
]
TARGET = LlamaConfig(60, 32, 40, 4, 2, 8, (None, None, None), norm_epsilon=1e-5, rope=RopeConfig(500.0))


def target(**changes: object) -> Llama:
    return randomised(Llama(replace(TARGET, **changes), feature_layers=(0, 1, 3)), 1)  # type: ignore[arg-type]


def random_head(kind: str, its: Llama) -> Head:
    head = Head(kind, its, torch.arange(3, 60, 2), (0, 1, 3), seed=2)
    with torch.no_grad():
        for index, parameter in enumerate(head.parameters.values()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.3)
    return head


@pytest.mark.parametrize(("kind", "changes"), HEADS)
def test_unrolled_chains_equal_drafting(kind: str, changes: dict[str, Any]) -> None:
    """From every position of two texts, the runtime's drafter with its paged cache gives the same logits at drafts 1 to 6."""
    its = target(**changes)
    head = random_head(kind, its)
    made = torch.Generator().manual_seed(3)
    lengths = (13, 9)
    texts = [torch.randint(0, 60, (length + 1 + STEPS,), generator=made) for length in lengths]
    width = 3 * 32 if kind == "eagle3" else 32
    features = [torch.randn(length, width, generator=made) for length in lengths]

    def taken(step: int) -> Tensor:
        return embed(its, torch.cat([text[1 + step : 1 + step + length] for text, length in zip(texts, lengths, strict=True)]))

    with torch.no_grad():
        found = [
            hidden @ head.rows.T for hidden in unroll(head.trainable, torch.cat(features), [taken(step) for step in range(STEPS)], lengths)
        ]
    drafter = head.drafter()
    compared = 0
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        drafting = CachedDraft(drafter, width)
        for pair in range(length):
            drafting.buffers.reset()
            logits, last = drafting.read(text[None, : pair + 2], features[row][None, : pair + 1], 64)
            chain = [logits[:, -1], *drafting.draft(pair + 2, text[None, pair + 2 : pair + 1 + STEPS], last)]
            for ours, theirs in zip(found, chain, strict=True):
                proposed = theirs[0] if drafter.d2t is not None else theirs[0, head.d2t]
                torch.testing.assert_close(ours[sum(lengths[:row]) + pair], proposed, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == sum(lengths) * STEPS


@pytest.mark.parametrize(("kind", "changes"), HEADS)
def test_chains_are_independent_of_each_other(kind: str, changes: dict[str, Any]) -> None:
    """Omitting the first chains of a text does not change the others."""
    its = target(**changes)
    head = random_head(kind, its)
    made = torch.Generator().manual_seed(4)
    lengths, begins = (13, 9, 6), (5, 0, 6)
    features = torch.randn(sum(lengths), 3 * 32 if kind == "eagle3" else 32, generator=made)
    tokens = [embed(its, torch.randint(0, 60, (sum(lengths),), generator=made)) for _ in range(STEPS)]
    grown = torch.tensor([pair >= begin for length, begin in zip(lengths, begins, strict=True) for pair in range(length)])
    with torch.no_grad():
        every = list(unroll(head.trainable, features, tokens, lengths))
        some = list(unroll(head.trainable, features, [tokens[0], *(each[grown] for each in tokens[1:])], lengths, begins))
    for whole, part in zip(every, some, strict=True):
        torch.testing.assert_close(part, whole[grown], rtol=1e-5, atol=1e-5)


def test_interrupted_collection_resumes(tmp_path: Path) -> None:
    its = target()
    made = torch.Generator().manual_seed(5)
    texts = [Text(tuple(torch.randint(0, 60, (length,), generator=made).tolist()), 1) for length in (5, 90, 3, 17)]
    save_states(its, texts[:2], tmp_path / "parts")
    parts, whole = save_states(its, texts, tmp_path / "parts"), save_states(its, texts, tmp_path / "whole")
    assert [tuple(text.token_ids.tolist()) for text in parts] == [text.token_ids for text in texts]
    for one, two in zip(parts, whole, strict=True):
        assert torch.equal(one.features, two.features) and torch.equal(one.hidden, two.hidden) and one.prompt_length == 1


def test_states_of_other_texts_are_refused(case: TrainingCase, tmp_path: Path) -> None:
    save_states(target(), [Text((4, 5, 6), 1)], tmp_path / "states")
    with pytest.raises(ValueError, match="states: belongs to other texts; expected the same --data and --max-length, or a new --out"):
        save_states(target(), [Text((4, 5, 6), 2), Text((7, 8, 9), 1)], tmp_path / "states")
    with pytest.raises(ValueError, match="belongs to other prompts; expected the same --data and --max-length, or a new --out"):
        save_answers(case.checkpoint.load("cpu", (0, 2, 4)), case.checkpoint.vocabulary, {(4, 5): None}, 20, 0.0, case.states.folder)


def test_the_order_of_training_is_not_that_of_the_folder(tmp_path: Path) -> None:
    texts = [Text(tuple(range(first, first + 5)), 1) for first in range(20)]
    plan, orders = TrainingPlan("eagle3", None, 60, 256, 3e-3, 3, "float32", 0, 0.3, 64, None), []
    for name, saved in (("forwards", texts), ("backwards", texts[::-1])):
        states = save_states(target(), saved, tmp_path / name)
        data = TrainingSet(states, target(), plan)
        orders.append([[states.token_ids(index).tolist() for index in part] for part in (data.training, data.held_out)])
    assert orders[0] == orders[1]


class TrainingCase(NamedTuple):
    """Training data: answers of a tiny target whose next token is often the successor of the last."""

    checkpoint: Checkpoint
    states: SavedStates

    def trainer(self, kind: str, **changes: Any) -> Trainer:
        plan = replace(TrainingPlan(kind, None, 60, 256, 3e-3, 3, "float32", 0, 0.15, 64, None), **changes)
        its = self.checkpoint.load("cpu", self.states.layout.feature_layers)
        if kind == "mtp":
            its.feature_layers, its.feature_size = (), its.hidden_size
        data = TrainingSet(self.states, its, plan)
        data.prepare(self.states.folder / "predictions.safetensors", len(self.checkpoint.vocabulary.tokens))
        proposed = choose_proposed(data.frequencies(), self.checkpoint.vocabulary, plan.draft_vocab)
        return Trainer(Head(kind, its, proposed, self.states.layout.feature_layers, plan.seed), data, plan)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TrainingCase:
    checkpoint = open_checkpoint(folder_of("llama-3.1", lean=True))
    folder = tmp_path_factory.mktemp("states")
    made = torch.Generator().manual_seed(0)
    prompts = dict.fromkeys(tuple(torch.randint(4, 100, (6,), generator=made).tolist()) for _ in range(70))
    return TrainingCase(checkpoint, save_answers(checkpoint.load("cpu", (0, 2, 4)), checkpoint.vocabulary, prompts, 20, 0.0, folder))


@pytest.mark.parametrize(
    ("kind", "margin"), [pytest.param("eagle3", 0.25, marks=pytest.mark.slow), pytest.param("mtp", 1.0, marks=pytest.mark.soak)]
)
def test_training_raises_acceptance(case: TrainingCase, tmp_path: Path, kind: str, margin: float) -> None:
    """Measured in the engine on held-out texts; `margin` in tokens per round."""
    trainer = case.trainer(kind)
    target, vocabulary, prompts = trainer.head.target, case.checkpoint.vocabulary, trainer.data.prompts(8, 64)
    before = measure(target, trainer.head.drafter(), vocabulary, prompts, 3, 16)
    assert trainer.train(tmp_path / "checkpoint.safetensors", every=1000)
    after = measure(target, trainer.head.drafter(), vocabulary, prompts, 3, 24)
    for name in ("greedy", "sampled"):
        assert after[name]["tokens_per_round"] > before[name]["tokens_per_round"] + margin / (1 if name == "greedy" else 2), (before, after)
        assert after[name]["held"] == sorted(after[name]["held"], reverse=True) and after[name]["rounds"] > 30
    evaluation = trainer.evaluate()
    assert evaluation["hits"][0] > 0.4 and evaluation["losses"][0] < 3, "over all held-out texts"


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_resume_is_bit_exact(case: TrainingCase, tmp_path: Path, dtype: str) -> None:
    checkpoint = tmp_path / "checkpoint.safetensors"
    options: dict[str, Any] = {"steps": 7, "dtype": dtype, "draft_vocab": 100, "kind": "eagle3"}
    whole = case.trainer(**options)
    assert whole.train(tmp_path / "other.safetensors", every=2)
    for stop in (0, 3, 4, 7):
        part = case.trainer(**options)
        if checkpoint.exists():
            part.resume(checkpoint)
        assert part.train(checkpoint, every=1000, stop=lambda part=part, stop=stop: part.step >= stop) == (stop == 7)  # type: ignore[misc]
    ours, theirs = part.head.parameters, whole.head.parameters
    assert part.step == whole.step == 7
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.items())
    saved, others = load_file(checkpoint), load_file(tmp_path / "other.safetensors")
    assert saved.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in saved.items())
    other = case.trainer(**{**options, "seed": 1})
    with pytest.raises(ValueError, match=r"checkpoint.safetensors: belongs to another plan: seed 0 -> 1; expected the same flags"):
        other.resume(checkpoint)
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        whole.resume(checkpoint)


def test_loss_counts_answer_tokens_only(case: TrainingCase) -> None:
    """Every position of a batch against the texts: input token, predicted state, and whether it belongs to an answer."""
    trainer = case.trainer("eagle3")
    indices = trainer.data.training[:5]
    batch = trainer.data.batch(indices)
    start = first = grown = 0
    for number, index in enumerate(indices):
        text = case.states[index]
        ids = text.token_ids.tolist()
        begin = batch.chain_starts[number]
        for pair in range(len(ids) - 2):
            assert torch.equal(batch.features[start + pair], text.features[pair])
            assert int(batch.tokens[0][start + pair]) == ids[pair + 1], "pairs that do not count in the loss also have their tokens"
            for step in range(3):
                foreseen = pair + 1 + step
                expected = foreseen < len(ids) - 1 and foreseen + 1 >= text.prompt_length
                chain = grown + pair - begin
                assert expected == (pair >= begin and bool(batch.loss_masks[step][chain])), "no pair that counts is left out"
                if expected:
                    assert int(batch.tokens[step][chain if step else start + pair]) == ids[pair + 1 + step]
                    assert torch.equal(batch.hidden[batch.label_indices[step][chain]], text.hidden[foreseen])
        start, first, grown = start + len(ids) - 2, first + len(ids) - 1, grown + len(ids) - 2 - begin
    assert batch.lengths == tuple(case.states.lengths[index] - 2 for index in indices) and len(batch.hidden) == first
    assert len(batch.loss_masks[0]) == len(batch.label_indices[2]) == len(batch.tokens[1]) == grown < start
    assert not set(trainer.data.training) & set(trainer.data.held_out)


def test_the_loss_is_cross_entropy_against_the_targets_distribution(case: TrainingCase) -> None:
    """Reference in float64, position by position, over the whole vocabulary."""
    trainer = case.trainer("eagle3", draft_vocab=100)
    head, batch = trainer.head, trainer.data.batch(trainer.data.training[:3])
    proposed = head.d2t.tolist()
    with torch.no_grad():
        found = trainer.compute_loss(batch)
        embedded = [embed(head.target, tokens) for tokens in batch.tokens]
        outputs = [hidden @ head.rows.T for hidden in unroll(head.trainable, batch.features, embedded, batch.lengths, batch.chain_starts)]
        targets = head.target.logits(batch.hidden)[:, : len(case.checkpoint.vocabulary.tokens)].double().softmax(-1)
    for step in range(3):
        lost, hits, positions = 0.0, 0, batch.loss_masks[step].nonzero().flatten().tolist()
        for index in positions:
            target, output = targets[batch.label_indices[step][index]], outputs[step][index].double().log_softmax(-1)
            lost -= sum(float(target[token] * output[index]) for index, token in enumerate(proposed))
            hits += proposed[int(output.argmax())] == int(target.argmax())
        assert float(found.losses[step]) == pytest.approx(lost / len(positions), rel=1e-4)
        assert float(found.hits[step]) == pytest.approx(hits / len(positions))
    assert float(found.loss) == pytest.approx(sum(0.8**step * float(found.losses[step]) for step in range(3)) / (1 + 0.8 + 0.64))
