"""Keyword arguments under the names of other libraries: the error names the right one."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from stepgraph import AsyncEngine, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.runtime import config, validate
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.sampling import params

VOCABULARY = Vocabulary.printable()
ENGINE = Engine(ToyTarget(VOCABULARY.logits_width), vocabulary=VOCABULARY, config=EngineConfig(max_rows=1, max_length=16, eager=True))
CALLS: list[tuple[Callable[..., Any], str, str]] = [
    (ENGINE.submit, "max_tokens", "max_new_tokens"),
    (ENGINE.generate, "stop", "sampling=SamplingParams(stop=)"),
    (ENGINE.generate, "temperature", "sampling=SamplingParams(temperature=)"),
    (ENGINE.generate, "repeat_penalty", "sampling=SamplingParams(repetition_penalty=)"),
    (ENGINE.generate, "sampling_params", "sampling"),
    (ENGINE.generate, "grammar", "constraint=Constraint.ebnf(...) or Constraint.lark(...)"),
    (ENGINE.generate, "output_scores", "sampling=SamplingParams(logprobs=)"),
    (ENGINE.generate, "do_sample", "sampling=SamplingParams(temperature=)"),
    (ENGINE.generate, "guided_json", "constraint=Constraint.json_schema(...), or a Python type"),
    (ENGINE.generate, "messages", "the prompt as the first argument"),
    (ENGINE.stream_text, "max_tokens", "max_new_tokens"),
    (ENGINE.stream_text, "no_such_name", "one of constraint, sampling, max_new_tokens"),
    (AsyncEngine(ENGINE).generate, "response_format", "constraint=Constraint.response_format(...)"),
    (SamplingParams, "max_tokens", "Engine.submit(max_new_tokens=)"),
    (SamplingParams, "no_such_name", "one of temperature, min_p, top_k"),
    (EngineConfig, "max_num_seqs", "max_rows"),
    (EngineConfig, "n_ctx", "max_length"),
    (Engine, "config_", "config"),
    (Engine, "no_such_name", "one of target, draft, vocabulary"),
    (SamplingParams, "temprature", "temperature"),
    (ENGINE.generate, "json", "constraint=Constraint.json_schema(...), or a Python type"),
    (Engine.from_pretrained, "model_path", "the model as the first argument"),
    (Engine.from_pretrained, "max_model_len", "config=EngineConfig(max_length=)"),
    (Engine.from_pretrained, "type_k", "config=EngineConfig(kv_cache_dtype=)"),
    (Engine.from_pretrained, "lora_path", "Engine.add_lora"),
    (Engine.from_pretrained, "max_rows", "config=EngineConfig(max_rows=)"),
    (ENGINE.generate, "end_id", "sampling=SamplingParams(stop_token_ids=)"),
    (SamplingParams, "beam_width", "nothing: there is no beam search"),
    (SamplingParams, "allowed_token_ids", "Engine.submit(constraint=)"),
    (EngineConfig, "max_num_tokens", "prefill_chunk"),
    (EngineConfig, "dtype", "Engine.from_pretrained(dtype=)"),
    (EngineConfig, "quantization", "Engine.from_pretrained(weights=)"),
    (Engine.from_pretrained, "quantization", "weights"),
    (Engine.from_pretrained, "mem_fraction_static", "config=EngineConfig(num_pages=)"),
    (Engine.from_pretrained, "speculative_draft_model_path", "draft"),
    (EngineConfig, "max_running_requests", "max_rows"),
    (EngineConfig, "disable_cuda_graph", "eager"),
    (EngineConfig, "attention_backend", "attention"),
    (SamplingParams, "json_schema", "Engine.submit(constraint=)"),
    (ENGINE.generate, "ebnf", "constraint=Constraint.ebnf(...)"),
    (ENGINE.generate, "structural_tag", "constraint=Constraint.structural_tag(...)"),
]


@pytest.mark.parametrize(("call", "name", "expected"), CALLS, ids=[f"{call.__qualname__}-{name}" for call, name, _ in CALLS])
def test_unknown_keyword_error_names_the_right_one(call: Callable[..., Any], name: str, expected: str) -> None:
    message = rf"^{re.escape(call.__qualname__)}\(\): got the keyword '{name}', expected {re.escape(expected)}"
    with pytest.raises(TypeError, match=message):
        call(**{name: 1})
    assert not ENGINE.has_work, "a request was submitted"


def test_an_argument_without_a_name_names_the_keywords() -> None:
    calls: list[Callable[..., Any]] = [ENGINE.generate, ENGINE.submit, ENGINE.stream_text, AsyncEngine(ENGINE).generate]
    for call in calls:
        message = rf"^{re.escape(call.__qualname__)}\(\): got SamplingParams\(.* as argument 2, expected a keyword: one of constraint, "
        with pytest.raises(TypeError, match=message):
            call([1], SamplingParams())
    assert ENGINE.generate(prompt=[1], max_new_tokens=2).finished and not ENGINE.has_work


def test_async_submit_refuses_unknown_keywords() -> None:
    async def submit() -> None:
        async with AsyncEngine(ENGINE) as serving:
            await serving.submit([1], stop="a")  # type: ignore[call-overload]

    with pytest.raises(TypeError, match=r"got the keyword 'stop', expected sampling=SamplingParams\(stop=\)"):
        asyncio.run(submit())


def test_names_of_other_libraries_map_to_existing_names() -> None:
    ours = {
        "submit": {"prompt", *validate.RequestOptions.__annotations__},
        "load": {*inspect.signature(Engine.from_pretrained).parameters, *inspect.signature(Engine).parameters},
        "sampling": {field.name for field in fields(SamplingParams)},
        "config": {field.name for field in fields(EngineConfig)},
    }
    tables = {
        "submit": validate.REQUEST_NAMES,
        "load": validate.ENGINE_NAMES,
        "sampling": params.NAMES_ELSEWHERE,
        "config": config.NAMES_ELSEWHERE,
    }
    for kind, table in tables.items():
        foreign = table.keys() - (ours["config"] if kind == "load" else set())  # settings given to the engine instead of its config
        assert not foreign & ours[kind], kind
        for expected in table.values():
            named = re.findall(r"^(\w+)$|(\w+)=", expected)
            assert {one or other for one, other in named} <= set().union(*ours.values()), expected


def test_known_keywords_pass() -> None:
    assert replace(SamplingParams(stop="a"), temperature=0.5).stop == ("a",)
    assert ENGINE.generate([1], max_new_tokens=2, sampling=SamplingParams()).finish_reason is not None
    assert str(inspect.signature(EngineConfig)).startswith("(max_rows: 'int' = 8")


def test_sampling_parameters_have_names() -> None:
    with pytest.raises(TypeError, match=r"^SamplingParams\(\): got 0.7 as argument 1, expected a keyword: one of temperature, min_p"):
        SamplingParams(0.7, 0.9)  # type: ignore[call-arg]
