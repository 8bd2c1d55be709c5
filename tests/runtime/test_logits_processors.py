"""Logits processors: device functions of the user, recorded in the round and checked like a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepgraph import Constraint, Engine, EngineConfig, LogitsProcessor, ProcessorInput, SamplingParams
from stepgraph.graphs.errors import CaptureError, StepError
from stepgraph.sampling.params import GREEDY
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, Setup, finish, make_engine, plain

BASE = Setup(k=3, greedy_only=False, buckets=(4,))
SETUPS = {
    "plain": replace(BASE, k=0),
    "perfect": replace(BASE, drafter="perfect"),
    "unmasked": replace(BASE, drafter="half", draft_masks=False),
    "loops": replace(BASE, drafter="perfect", loops=True),
    "eager": replace(BASE, drafter="perfect", eager=True),
}
WIDTH = len(VOCABULARY.tokens)


def add_to_one(logits: Tensor, given: ProcessorInput) -> Tensor:
    """Adds the second argument to the logit of the first."""
    token, bias = given.arguments[:, None, None].unbind(-1)
    return logits + bias * (torch.arange(logits.shape[-1], device=logits.device) == token)


def ban_repeats(logits: Tensor, given: ProcessorInput) -> Tensor:
    """No token twice in a row, drafts included; changes its copy of the logits in place."""
    return logits.scatter_(2, given.tokens.clamp(min=0)[..., None], float("-inf"))


class Parity(nn.Module):
    """Allows tokens whose parity is that of their position in the output."""

    odd: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("odd", torch.arange(WIDTH) % 2)

    def forward(self, logits: Tensor, given: ProcessorInput) -> Tensor:
        position = given.generated[:, None] + torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill(self.odd != position[..., None] % 2, float("-inf"))


PROCESSORS = (
    LogitsProcessor("add_to_one", add_to_one, 2),
    LogitsProcessor("ban_repeats", ban_repeats),
    LogitsProcessor("parity", Parity()),
)


@pytest.fixture(params=list(SETUPS.values()), ids=list(SETUPS), scope="module")
def engine(request: pytest.FixtureRequest) -> Any:
    with make_engine(request.param, logits_processors=PROCESSORS) as made:
        yield made


def run(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    jobs = [engine.submit(prompt, max_new_tokens=20, **options) for prompt in prompts]
    finish(engine)
    assert not any(job.error for job in jobs)
    return [job.tokens for job in jobs]


PROMPTS = [[3], [5, 9], [70, 2, 11], [8, 8, 8]]


@pytest.mark.parametrize("constraint", CONSTRAINTS[:3])
def test_a_processor_equals_the_built_in_setting_that_does_the_same(engine: Engine, constraint: Constraint | None) -> None:
    options: dict[str, Any] = {"constraint": constraint}
    own = SamplingParams(temperature=0, logits_processors={"add_to_one": (70, 6.5)})
    built_in = SamplingParams(temperature=0, logit_bias={70: 6.5})
    jobs = [
        engine.submit(prompt, sampling=sampling, max_new_tokens=20, **options) for prompt in PROMPTS for sampling in (own, built_in, GREEDY)
    ]
    finish(engine)
    for index, prompt in enumerate(PROMPTS):
        first, second, third = jobs[3 * index : 3 * index + 3]
        assert first.tokens == second.tokens == plain(prompt, 20, constraint, sampling=built_in).tokens
        assert third.tokens == plain(prompt, 20, constraint).tokens, "a request without the processor in the same rounds"


def test_processor_input_includes_drafts_before_each_position(engine: Engine) -> None:
    """No token occurs twice in a row, at draft positions too."""
    favoured = SamplingParams(temperature=0, logit_bias={40: 60.0, 41: 40.0}, ignore_eos=True)
    assert run(engine, [[3]], sampling=favoured) == [[40] * 20]
    assert run(engine, [[3]], sampling=replace(favoured, logits_processors={"ban_repeats": ()})) == [[40, 41] * 10]


def test_a_module_processor_reads_its_buffers_and_positions(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, ignore_eos=True, logits_processors={"parity": ()})
    for tokens in run(engine, PROMPTS, sampling=sampling):
        assert [token % 2 for token in tokens] == [0, 1] * 10
    both = replace(sampling, logits_processors={"parity": (), "add_to_one": (40, 50.0), "ban_repeats": ()})
    assert {*run(engine, [[3]], sampling=both)[0][::2]} == {40}, "several are applied one after another"


def branches(logits: Tensor, given: ProcessorInput) -> Tensor:
    return logits * 2 if given.generated[0] > 3 else logits


def synchronises(logits: Tensor, given: ProcessorInput) -> Tensor:
    logits[:, :, 0] = given.arguments[0, 0].item()
    return logits


@pytest.mark.parametrize(("function", "line"), [(branches, "if given.generated[0] > 3"), (synchronises, "given.arguments[0, 0].item()")])
def test_a_function_that_cannot_be_recorded_is_refused_with_rule_file_and_line(function: Any, line: str) -> None:
    with pytest.raises(CaptureError) as refused:
        make_engine(BASE, logits_processors=(LogitsProcessor("wrong", function, 1),))
    error = refused.value
    assert error.rule and error.file == __file__ and line in error.source and f"{__file__}:{error.line}" in str(error)


TABLE = torch.zeros(WIDTH)


def reads_a_global(logits: Tensor, given: ProcessorInput) -> Tensor:
    return logits + TABLE


def test_a_tensor_that_is_not_registered_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"reads_a_global|TABLE") as refused:
        make_engine(BASE, logits_processors=(LogitsProcessor("wrong", reads_a_global),))
    assert refused.value.file == __file__ and "logits + TABLE" in refused.value.source


def test_a_wrong_result_is_refused() -> None:
    for function, got in ((lambda logits, given: logits[:, :1, :5], "torch.float32"), (lambda logits, given: None, "NoneType")):
        with pytest.raises(ValueError, match=rf"LogitsProcessor 'wrong': returned {got}.*, expected torch.float32 \("):
            make_engine(BASE, logits_processors=(LogitsProcessor("wrong", function),))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ProcessorInput._fields)
def test_a_function_that_changes_its_input_is_refused(field: str) -> None:
    """Its changes of `generated` reached the state of all rows of the batch: requests with a grammar failed."""

    def changes(logits: Tensor, given: ProcessorInput) -> Tensor:
        getattr(given, field).add_(1)
        return logits

    with pytest.raises(ValueError, match=f"LogitsProcessor 'wrong': changed given.{field} in place"):
        make_engine(BASE, logits_processors=(LogitsProcessor("wrong", changes, 1),))


def test_a_function_that_fails_without_drafts_is_refused() -> None:
    needs_drafts = LogitsProcessor("wrong", lambda logits, given: logits - given.tokens[:, 1:].amax(1)[:, None, None])
    with pytest.raises(StepError, match=r"LogitsProcessor 'wrong': the step raised IndexError"):
        make_engine(BASE, logits_processors=(needs_drafts,))


def test_a_result_that_is_not_finite_ends_its_own_request_only() -> None:
    broken = LogitsProcessor("broken", lambda logits, given: logits * float("nan"))
    with make_engine(BASE, logits_processors=(broken,)) as engine:
        bad = engine.submit([3], sampling=replace(GREEDY, logits_processors={"broken": ()}), max_new_tokens=9)
        good = engine.submit([3], sampling=replace(GREEDY, logprobs=True), max_new_tokens=9)
        finish(engine)
    assert bad.finish_reason == "error" and "not finite" in bad.error
    assert good.tokens == plain([3], 9).tokens


def test_a_recording_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(logits_processors=PROCESSORS)
    with pytest.raises(ValueError, match=r"Engine.record: got .*, expected None with logits_processors: a recording has no functions"):
        Engine(TARGET, vocabulary=VOCABULARY, config=config, record=tmp_path / "run.jsonl")


def test_wrong_settings_are_refused() -> None:
    with make_engine(BASE, logits_processors=PROCESSORS[:1]) as engine:
        for settings, message in (
            ({"other": ()}, r"sampling.logits_processors: got the name 'other', expected 'add_to_one'"),
            ({"add_to_one": (1,)}, r"sampling.logits_processors\['add_to_one'\]: got 1 numbers, expected 2"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit([1], sampling=SamplingParams(logits_processors=settings))
    wrong: Any
    for wrong, message in (
        ([], r"SamplingParams.logits_processors: got list, expected a dict of names to sequences of numbers"),
        ({"a": 5}, r"SamplingParams.logits_processors\['a'\]: got 5, expected a sequence of numbers"),
        ({"a": (float("nan"),)}, r"SamplingParams.logits_processors\['a'\]\[0\]: got nan, expected a number"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(logits_processors=wrong)
    for fields, message in (
        ({"name": "a b"}, r"LogitsProcessor.name: got 'a b', expected an identifier"),
        ({"function": 5}, r"LogitsProcessor.function: got 5, expected a function"),
        ({"num_arguments": -1}, r"LogitsProcessor.num_arguments: got -1, expected a whole number from 0 to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            LogitsProcessor(**{"name": "a", "function": add_to_one, **fields})  # type: ignore[arg-type]
    twice = (PROCESSORS[0], PROCESSORS[0])
    with pytest.raises(ValueError, match=r"EngineConfig.logits_processors: got .*, expected a tuple of LogitsProcessors with different"):
        EngineConfig(logits_processors=twice)
    with pytest.raises(ValueError, match=r"EngineConfig.logits_processors: got .* with greedy_only=True"):
        EngineConfig(logits_processors=PROCESSORS, greedy_only=True)
