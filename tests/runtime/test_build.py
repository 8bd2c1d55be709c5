"""Drafters of an engine: names, proposers, functions, and errors for invalid ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.model import History
from stepgraph.runtime.models.files.checkpoint import Checkpoint
from stepgraph.runtime.models.toy import ToyTarget
from tests.helpers.draft_engines import DRAFTERS as FOLDERS
from tests.helpers.families import folder_of
from tests.helpers.proposers import FormulaProposer
from tests.helpers.toy_engines import TARGET, VOCABULARY, finish, plain

CONFIG = EngineConfig(max_rows=1, num_speculative_tokens=2, draft_length=2, max_length=32, page_size=8, greedy_only=True, backend="tape")


def wrong_shape(history: History, index: Tensor) -> Tensor:
    return index.expand(len(history.length), -1)[:, 1:]


def wrong_type(history: History, index: Tensor) -> Tensor:
    return index.expand(len(history.length), -1).to(torch.int32)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (wrong_shape, r"drafts of the proposer: got Tensor of shape \(1, 1\), expected \(1, 2\)"),
        (wrong_type, "drafts of the proposer: got torch.int32, expected torch.int64"),
    ],
)
def test_proposer_with_wrong_output_raises_at_capture(formula: Any, message: str) -> None:
    with Engine(TARGET, FormulaProposer(formula), config=CONFIG) as engine, pytest.raises(ValueError, match=message):
        engine.capture()


def test_drafter_names() -> None:
    for word, reason in (("ngram", "draft: n-gram look-up, 1 to 8 tokens"), ("auto", "draft: n-gram look-up, 1 to 8 tokens (auto)")):
        with Engine(TARGET, word, config=replace(CONFIG, eager=True)) as engine:
            assert reason in engine.capture().notes
    with Engine(TARGET, "none", config=replace(CONFIG, eager=True)) as engine:
        assert (engine.limits.num_speculative_tokens, engine.config.num_speculative_tokens) == (0, 0)
        engine.capture()
        assert engine.generate([3, 4], max_new_tokens=8, sampling=SamplingParams(temperature=0)).tokens
        with pytest.raises(ValueError, match="draft_ids: got 1 tokens, expected None"):
            engine.submit([1], max_new_tokens=8, draft_ids=[1])
    with pytest.raises(
        ValueError,
        match=r"Engine.draft: got 'ngrams', expected a draft model, a proposer, a function, or one of 'auto', 'forced', 'ngram', 'none'",
    ):
        Engine(TARGET, "ngrams", config=CONFIG)


class Counting:
    """Has its own state per row: the number of calls, which determines the drafts."""

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return (BufferSpec("calls", (limits.rows,), torch.int64),)

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        rows = buffers.batch_rows[: len(history.length)]
        buffers.calls.index_add_(0, rows, torch.ones_like(rows))
        return buffers.calls[rows, None] + torch.arange(history.num_drafts, device=rows.device)


def test_proposer_with_device_state() -> None:
    config = replace(CONFIG, max_rows=2)
    with Engine(TARGET, Counting(), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        jobs = [engine.submit([index], max_new_tokens=20) for index in range(2)]
        finish(engine)
        assert [job.tokens for job in jobs] == [plain([index], 20).tokens for index in range(2)]
        assert all(calls >= job.rounds for calls, job in zip(engine.buffers.calls.tolist(), jobs, strict=False)) and jobs[0].rounds > 5


def test_auto_uses_the_mtp_modules_of_the_target_folder() -> None:
    (folder,) = (each.target for each in FOLDERS if each.name == "mtp")
    with Engine.from_pretrained(folder, "auto", config=EngineConfig(max_rows=1, max_length=48, eager=True)) as engine:
        (reason,) = (note for note in engine.capture().notes if note.startswith("draft: "))
        assert "MTP" in reason


@pytest.mark.parametrize(
    ("word", "drafts", "notes"),
    [
        ("ngram", 4, ["draft: n-gram look-up, 1 to 8 tokens"]),
        ("auto", 4, ["draft: n-gram look-up, 1 to 8 tokens (auto: {name} has no MTP modules)"]),
        ("none", 0, []),
    ],
)
def test_drafter_names_for_a_folder(word: str, drafts: int, notes: list[str]) -> None:
    folder = folder_of("llama-2")
    with Engine.from_pretrained(folder, word, config=EngineConfig(max_rows=1, max_length=64, eager=True)) as engine:
        assert engine.limits.num_speculative_tokens == drafts
        found = [note for note in engine.capture().notes if note.startswith("draft: ")]
        assert found == [note.format(name=folder.name) for note in notes]
        job = engine.generate([5, 6, 7], max_new_tokens=20)
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=64, eager=True)
    with Engine.from_pretrained(folder, config=config) as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=20).tokens == job.tokens


def test_function_drafts_end_at_an_invalid_id() -> None:
    expected = plain([1, 2], 20).tokens

    def parts(job: Job) -> Any:
        right = expected[len(job.tokens) :]
        return torch.tensor([*right[:1], len(VOCABULARY.tokens), *right[1:]]) if len(job.tokens) % 2 else [-1, *right]

    with Engine(
        TARGET, parts, vocabulary=VOCABULARY, config=replace(CONFIG, rounds_in_flight=1, num_speculative_tokens=3, draft_length=3)
    ) as engine:
        engine.capture()
        job, accepted = engine.submit([1, 2], max_new_tokens=20), []
        for event in engine.stream():
            accepted.append(event.num_accepted_drafts)
    assert job.tokens == expected
    assert set(accepted) == {0, 1}, "drafts after an invalid id are dropped"


def test_function_needs_one_round_in_flight_and_its_error_ends_its_job() -> None:
    def broken(job: Job) -> list[int]:
        raise KeyError("no such text")

    with pytest.raises(ValueError, match=r"Engine.draft: got a function with rounds_in_flight=2, expected rounds_in_flight=1"):
        Engine(TARGET, broken, config=CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_: pytest.fail("weights were loaded before the refusal"))
        with pytest.raises(ValueError, match=r"Engine.draft: got a function with rounds_in_flight=2"):
            Engine.from_pretrained(folder_of("llama-2"), broken, config=EngineConfig(max_rows=1, max_length=64))
    without_state: Any = SimpleNamespace(propose=lambda history, buffers: history.tokens)
    with pytest.raises(ValueError, match=r"^Engine.draft: got namespace.* without cache_specs, expected an object with"):
        Engine(TARGET, without_state, config=CONFIG)
    with pytest.raises(ValueError, match=r"Engine.draft: got list, expected a draft model, a proposer, a function or a name"):
        Engine(TARGET, [1, 2], config=CONFIG)  # type: ignore[arg-type]

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise IndexError

    def unprintable(job: Job) -> list[int]:
        raise Unprintable

    alone = replace(CONFIG, rounds_in_flight=1, eager=True)
    cases: list[tuple[Any, str]] = [
        (broken, "KeyError: 'no such text'"),
        (unprintable, "Unprintable: str() of it raised IndexError"),
        (
            lambda job: [0.5],
            "ValueError: drafts of the function: got 0.5, expected token ids from 0 to 131; another number ends",
        ),
        (lambda job: ["a"], "ValueError: drafts of the function: got 'a', expected token ids from 0 to"),
        (lambda job: None, "ValueError: drafts of the function: got NoneType, expected a sequence of token ids"),
    ]
    for function, message in cases:
        with Engine(TARGET, function, config=alone) as engine:
            engine.capture()
            job, other = engine.submit([1], max_new_tokens=4), engine.submit([2], max_new_tokens=4, num_speculative_tokens=0)
            finish(engine)
            assert job.finish_reason == "error" and job.error.startswith(f"the draft function failed: {message}")
            assert (len(other.tokens), other.error) == (4, "")


def test_a_model_may_have_ranks_of_its_own() -> None:
    class Target(ToyTarget):
        ranks = (8, 16)  # of its adapters, for example

    with Engine(Target(VOCABULARY.logits_width, seed=3), config=EngineConfig(max_rows=1, max_length=32, backend="tape")) as engine:
        assert len(engine.generate([1, 2], max_new_tokens=4).tokens) == 4
    with pytest.raises(ValueError, match=r"EngineConfig.num_pages: got 0.5 on cpu, expected a whole number, or None"):
        Engine(Target(VOCABULARY.logits_width), config=EngineConfig(max_rows=1, max_length=32, backend="tape", num_pages=0.5))
