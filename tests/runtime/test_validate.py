"""Errors of submit(), EngineConfig, SamplingParams and Engine() for invalid arguments. Nothing changes before they are raised."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
import torch

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.validate import checked_ids
from tests.helpers.oracles import greedy
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, Setup, shared_engine

SETUP = Setup(k=3)
BAD_SUBMITS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, r"prompt: got an empty prompt"),
    ({"prompt": "hello"}, r"Engine.tokenizer: got None, expected a TextCodec for prompts that are text"),
    ({"prompt": 5}, r"prompt: got int, expected a text, a list of chat messages, or a sequence of token ids"),
    ({"prompt": bytearray(b"hi")}, r"prompt: got bytearray, expected a text"),
    ({"prompt": [1, 2, -1]}, r"prompt\[2\]: got -1, expected a token id from 0 to 112"),
    ({"prompt": [1, 113]}, r"prompt\[1\]: got 113"),
    ({"prompt": [1.0]}, r"prompt\[0\]: got 1.0"),
    ({"prompt": [True]}, r"prompt\[0\]: got True"),
    ({"prompt": torch.zeros(2, 2, dtype=torch.int64)}, r"prompt\[0\]: got \[0, 0\]"),
    ({"prompt": [1] * 96}, r"prompt: got 96 tokens, expected fewer than EngineConfig.max_length=96"),
    ({"max_new_tokens": 0}, r"max_new_tokens: got 0, expected a whole number from 1 to 93"),
    ({"max_new_tokens": 94}, r"max_new_tokens: got 94"),
    ({"max_new_tokens": "many"}, r"max_new_tokens: got 'many'"),
    (
        {"num_speculative_tokens": 4},
        r"num_speculative_tokens: got 4, expected a whole number from 0 to 3 \(the engine's num_speculative_tokens or draft_length\)",
    ),
    ({"num_speculative_tokens": -1}, r"num_speculative_tokens: got -1"),
    ({"sampling": {}}, r"sampling: got dict, expected SamplingParams"),
    ({"sampling": {"temperature": 1}}, r"sampling: got dict, expected SamplingParams"),
    ({"sampling": SamplingParams(temperature=0, stop_token_ids=(500,))}, r"sampling.stop_token_ids\[0\]: got 500"),
    (
        {"sampling": SamplingParams(temperature=0, stop_token_ids=tuple(range(8)))},
        r"sampling.stop_token_ids: got 9 including the vocabulary's, expected at most",
    ),
    ({"sampling": SamplingParams(temperature=0.5)}, r"sampling.temperature: got 0.5, expected 0: the engine is greedy_only"),
    (
        {"sampling": SamplingParams(temperature=0, repetition_penalty=1.5)},
        r"sampling.repetition_penalty: got 1.5, expected 1.0: the engine is",
    ),
    (
        {"sampling": SamplingParams(temperature=0, presence_penalty=1)},
        r"sampling.presence_penalty: got 1, expected 0.0: the engine is greedy_only",
    ),
    ({"sampling": SamplingParams(temperature=0, frequency_penalty=-1)}, r"sampling.frequency_penalty: got -1, expected 0.0: the engine is"),
    (
        {"sampling": SamplingParams(temperature=0, logit_bias={1: 2})},
        r"sampling.logit_bias: got \{1: 2\}, expected \{\}: the engine is greedy_only",
    ),
    ({"sampling": SamplingParams(temperature=0, bad_token_ids=(4,))}, r"sampling.bad_token_ids: got \(4,\), expected \(\): the engine is"),
    (
        {"sampling": SamplingParams(temperature=0, min_new_tokens=3)},
        r"sampling.min_new_tokens: got 3, expected 0: the engine is greedy_only",
    ),
    ({"sampling": SamplingParams(temperature=0, logprobs=True)}, r"sampling.logprobs: got True, expected False: the engine is greedy_only"),
    (
        {"sampling": SamplingParams(temperature=0, ignore_eos=True), "constraint": CONSTRAINTS[1]},
        r"sampling.ignore_eos: got True with a constraint, expected False",
    ),
    ({"constraint": "[a-z]+"}, r"constraint: got '\[a-z\]\+', expected a Constraint"),
    ({"constraint": Constraint.regex("(a")}, r"constraint regex"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SUBMITS, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_submit_raises_and_changes_nothing(bad: dict[str, Any], message: str) -> None:
    engine = shared_engine(SETUP)
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"prompt": [1, 2, 3], "max_new_tokens": 4, **bad})
    assert engine.stats() == before
    assert not engine.has_work


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(bad_token_ids=(1, 113)), r"sampling.bad_token_ids\[1\]: got 113, expected a token id from 0 to 112"),
        (SamplingParams(logit_bias={113: 1.0}), r"sampling.logit_bias: got the key 113, expected token ids from 0 to 112"),
        (SamplingParams(min_new_tokens=5), r"sampling.min_new_tokens: got 5, expected at most max_new_tokens=4"),
        (
            SamplingParams(ignore_eos=True),
            r"sampling.ignore_eos: got True with a constraint, expected False: a complete constrained output ends",
        ),
    ],
    ids=str,
)
def test_sampling_that_does_not_fit_the_request_raises(sampling: SamplingParams, message: str) -> None:
    engine = shared_engine(Setup(k=3, greedy_only=False))
    with pytest.raises(ValueError, match=message):
        engine.submit([1, 2], sampling=sampling, constraint=CONSTRAINTS[3], max_new_tokens=4)
    assert not engine.has_work


CHANGES = (
    *(("__setitem__", 5, 2.0), ("__delitem__", 5), ("__ior__", {5: 2.0}), ("clear",), ("pop", 5), ("popitem",), ("setdefault", 7, 1.0)),
    ("update", {5: 2.0}),
)


@pytest.mark.parametrize(
    "made", [lambda params: params, pickle.loads, copy.deepcopy, replace], ids=["made", "unpickled", "deep copy", "replaced"]
)
def test_mappings_of_sampling_params_cannot_be_changed(made: Callable[[Any], SamplingParams]) -> None:
    """Neither in parameters of the caller, nor in those of a request, which may be the default of all."""
    biases, arguments = {5: 1.0}, {"shift": [1.0]}
    given = SamplingParams(logit_bias=biases, logits_processors=arguments)
    params = made(pickle.dumps(given) if made is pickle.loads else given)
    biases[6], arguments["other"] = 1.0, []
    arguments["shift"].append(2.0)
    assert params == given == SamplingParams(logit_bias={5: 1.0}, logits_processors={"shift": (1.0,)}) and hash(params) == hash(given)
    assert json.loads(json.dumps(asdict(params)))["logit_bias"] == {"5": 1.0} and repr(params) == repr(given)
    default = shared_engine(Setup(k=0, greedy_only=False)).generate([1], max_new_tokens=1).sampling
    for mapping in (params.logit_bias, params.logits_processors, default.logit_bias, default.logits_processors):
        before, changeable = dict(mapping), cast("dict[Any, Any]", mapping)
        for name, *values in CHANGES:
            with pytest.raises(TypeError, match=r"cannot be changed; dataclasses\.replace"):
                getattr(changeable, name)(*values)
        assert mapping == before


@pytest.mark.parametrize("given", [lambda sizes: sizes, iter])
def test_buckets_of_a_config_are_a_tuple(given: Callable[[Any], Any]) -> None:
    sizes = [2, 1]
    config = EngineConfig(max_rows=2, buckets=given(sizes))
    sizes.append(9)
    assert config == EngineConfig(max_rows=2, buckets=(1, 2)) and hash(config) == hash(EngineConfig(max_rows=2, buckets=(1, 2)))


def test_more_biases_than_max_bias_ids_raise() -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_bias_ids=3, backend="tape")
    with Engine(TARGET, config=config) as engine:
        for fields, names in (
            ({"bad_token_ids": (1, 2, 3, 4)}, "bad_token_ids"),
            ({"logit_bias": dict.fromkeys(range(4), 1.0)}, "logit_bias"),
            ({"bad_token_ids": (1, 2), "logit_bias": {3: 1.0, 4: 1.0}}, "logit_bias and bad_token_ids"),
        ):
            with pytest.raises(ValueError, match=f"sampling.{names}: got 4 tokens, expected at most EngineConfig.max_bias_ids=3"):
                engine.submit([1], sampling=SamplingParams(**fields))
        engine.submit([1], sampling=SamplingParams(bad_token_ids=(1, 2, 3), logit_bias={1: 1.0}))  # three tokens


def test_unknown_fields_raise() -> None:
    engine = shared_engine(SETUP)
    with pytest.raises(TypeError, match="top_q"):
        engine.submit([1], top_q=0.5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="max_rowz"):
        EngineConfig(max_rowz=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"SamplingParams.stop_token_ids\[1\]: got 'a', expected a token id >= 0"):
        SamplingParams(stop_token_ids=(1, "a"))  # type: ignore[arg-type]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"SamplingParams.temperature: got -0.1, expected a number from 0 to 3.40282e\+38"),
        ({"temperature": 3.5e38}, r"SamplingParams.temperature: got 3.5e\+38, expected a number from 0 to 3.40282e\+38"),
        ({"temperature": 10**400}, r"SamplingParams.temperature: got 1000"),
        ({"temperature": float("nan")}, r"SamplingParams.temperature: got nan"),
        ({"temperature": "hot"}, r"SamplingParams.temperature: got 'hot'"),
        ({"top_p": 0}, r"SamplingParams.top_p: got 0, expected a number above 0 and at most 1"),
        ({"top_p": 1.5}, r"SamplingParams.top_p: got 1.5"),
        ({"min_p": 2}, r"SamplingParams.min_p: got 2, expected a number from 0 to 1"),
        ({"top_k": -2}, r"SamplingParams.top_k: got -2, expected a whole number from -1"),
        ({"top_k": 2.5}, r"SamplingParams.top_k: got 2.5"),
        ({"repetition_penalty": 0}, r"SamplingParams.repetition_penalty: got 0, expected a number from 0.01 to 100"),
        ({"repetition_penalty": -1.0}, r"SamplingParams.repetition_penalty: got -1.0"),
        ({"repetition_penalty": float("inf")}, r"SamplingParams.repetition_penalty: got inf"),
        ({"presence_penalty": 2.1}, r"SamplingParams.presence_penalty: got 2.1, expected a number from -2 to 2"),
        ({"frequency_penalty": -3}, r"SamplingParams.frequency_penalty: got -3, expected a number from -2 to 2"),
        ({"frequency_penalty": True}, r"SamplingParams.frequency_penalty: got True"),
        ({"logit_bias": [(1, 2.0)]}, r"SamplingParams.logit_bias: got list, expected a dict of token id to number"),
        ({"logit_bias": {"5": 1.0}}, r"SamplingParams.logit_bias: got the key '5', expected token ids >= 0"),
        ({"logit_bias": {-5: 1.0}}, r"SamplingParams.logit_bias: got the key -5"),
        ({"logit_bias": {5: 101}}, r"SamplingParams.logit_bias\[5\]: got 101, expected a number from -100 to 100"),
        ({"logit_bias": {5: 10**400}}, r"SamplingParams.logit_bias\[5\]: got 1000"),
        ({"logit_bias": {5: -float("inf")}}, r"SamplingParams.logit_bias\[5\]: got -inf"),
        ({"bad_token_ids": 5}, r"SamplingParams.bad_token_ids: got int, expected a tuple of token ids"),
        ({"bad_token_ids": (1, 2.0)}, r"SamplingParams.bad_token_ids\[1\]: got 2.0, expected a token id >= 0"),
        ({"min_new_tokens": -1}, r"SamplingParams.min_new_tokens: got -1, expected a whole number from 0"),
        ({"ignore_eos": 1}, r"SamplingParams.ignore_eos: got 1, expected True or False"),
        ({"logprobs": 5}, r"SamplingParams.logprobs: got 5, expected True or False"),
        ({"top_logprobs": 101, "logprobs": True}, r"SamplingParams.top_logprobs: got 101, expected a whole number from 0 to 100"),
        ({"top_logprobs": 5}, r"SamplingParams.top_logprobs: got 5 with logprobs=False, expected logprobs=True, or 0"),
        ({"prompt_logprobs": 101}, r"SamplingParams.prompt_logprobs: got 101, expected a whole number from 0 to 100, or None"),
        ({"prompt_logprobs": True}, r"SamplingParams.prompt_logprobs: got True, expected a whole number from 0 to 100, or None"),
        ({"seed": -(2**63) - 1}, r"SamplingParams.seed: got -9223372036854775809, expected a whole number from -9223372036854775808 to"),
        ({"seed": 2**63}, r"SamplingParams.seed: got 9223372036854775808"),
    ],
)
def test_invalid_sampling_params_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_sampling_params_compare_by_value() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(seed=-1) == SamplingParams() and SamplingParams(top_k=-1, seed=-1).plain
    bias = {1: 2.0}
    one, same = SamplingParams(logit_bias=bias, bad_token_ids=[1, 3]), SamplingParams(logit_bias={1: 2}, bad_token_ids=(1, 3))
    bias[1] = 5.0
    assert one == same and hash(one) == hash(same) and one.logit_bias == {1: 2.0}
    assert one.biases == {1: -float("inf"), 3: -float("inf")}, "bad_token_ids override logit_bias"
    assert SamplingParams(temperature=0, stop_token_ids=(1,), ignore_eos=True, top_k=5, seed=3).plain
    assert SamplingParams(temperature=0, logprobs=True).beyond_argmax == "logprobs"
    assert SamplingParams(temperature=0, logit_bias={}).beyond_argmax == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_rows": 0}, r"EngineConfig.max_rows: got 0, expected a whole number >= 1"),
        ({"num_speculative_tokens": 9}, r"EngineConfig.num_speculative_tokens: got 9, expected a whole number from 0 to 8"),
        ({"page_size": 0}, r"EngineConfig.page_size: got 0"),
        ({"max_length": "long"}, r"EngineConfig.max_length: got 'long'"),
        ({"num_pages": 2}, r"EngineConfig.num_pages: got 2, expected >= 64"),
        ({"rounds_in_flight": 0}, r"EngineConfig.rounds_in_flight: got 0"),
        ({"buckets": (1, 2)}, r"^EngineConfig.buckets: got \(1, 2\), expected integers >= 1 of which the largest is max_rows=8"),
        ({"buckets": (0, 8)}, r"buckets: got \(0, 8\)"),
        ({"buckets": ()}, r"buckets: got \(\)"),
        ({"buckets": ("a", 8)}, r"buckets: got \('a', 8\)"),
        ({"max_queued": True}, r"EngineConfig.max_queued: got True"),
        (
            {"host_link": "native", "check_masks": True},
            r"EngineConfig.host_link: got 'native' with check_masks=True, expected 'auto' or 'python': masks are compared in Python",
        ),
        ({"eager": "no"}, r"EngineConfig.eager: got 'no', expected True or False"),
        ({"draft_masks": None}, r"EngineConfig.draft_masks: got None"),
        ({"backend": "vulkan"}, r"EngineConfig.backend: got 'vulkan'"),
        ({"max_queued": 0}, r"EngineConfig.max_queued: got 0"),
        ({"compile_isolation": "thread"}, r"EngineConfig.compile_isolation: got 'thread', expected one of 'process', 'none'"),
        ({"grammar_limits": {}}, r"EngineConfig.grammar_limits: got {}, expected GrammarLimits"),
        ({"grammar_cache_bytes": 0}, r"EngineConfig.grammar_cache_bytes: got 0, expected a whole number >= 1"),
        ({"max_compiles": True}, r"EngineConfig.max_compiles: got True"),
    ],
)
def test_invalid_engine_config_raises(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_invalid_engine_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"Engine\.config: got {}, expected an EngineConfig"):
        Engine(TARGET, config={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Engine.vocabulary: its logits_width is 112, expected the target's vocab_size 132"):
        Engine(TARGET, ToyDraft(TARGET), vocabulary=Vocabulary.printable())
    with pytest.raises(ValueError, match=r"Engine.draft: its vocab_size is 140, expected the target's 132"):
        Engine(TARGET, ToyDraft(ToyTarget(140)))
    for d2t, message in (([0, 1, 1], "got repeated ids"), ([0, 113], "ids beyond the vocabulary, expected distinct ids from 0 to 112")):
        with pytest.raises(ValueError, match=f"Engine.draft.d2t: .*{message}"):
            Engine(TARGET, ToyDraft(TARGET, d2t=d2t), vocabulary=VOCABULARY)
    many_stops = Vocabulary([b"a"] * 132, range(9))
    with pytest.raises(ValueError, match=r"EngineConfig.max_stop_ids: got 8, expected at least 9, the number of the vocabulary's stop ids"):
        Engine(TARGET, ToyDraft(TARGET), vocabulary=many_stops)
    with Engine(TARGET, config=EngineConfig(num_speculative_tokens=0, backend="tape")) as engine:
        engine.capture()
        with pytest.raises(ValueError, match=r"constraint: the engine has no vocabulary"):
            engine.submit([1], constraint=CONSTRAINTS[1])
        assert engine.generate([1], max_new_tokens=3).tokens == greedy(TARGET, [1], 3, ()).tokens


def test_model_on_another_device_raises() -> None:
    target = ToyTarget(8).to("meta")
    with pytest.raises(ValueError, match=r"Engine.target: got tensors on meta, expected cpu, the device of the tape backend"):
        Engine(target, config=EngineConfig(num_speculative_tokens=0))
    with pytest.raises(ValueError, match=r"Engine.draft: got tensors on meta, expected cpu"):
        Engine(ToyTarget(8), ToyDraft(target).to("meta"))


def test_capture_once_and_no_calls_after_close() -> None:
    engine = Engine(TARGET, ToyDraft(TARGET), config=EngineConfig(max_rows=1, num_speculative_tokens=1, draft_length=1, backend="tape"))
    waiting = engine.submit([1, 2], max_new_tokens=2)
    engine.capture()
    with pytest.raises(RuntimeError, match=r"Engine.capture\(\): already captured"):
        engine.capture()
    assert not waiting.finished, "a failed call ends no request"
    engine.close()
    engine.close()
    assert (waiting.finish_reason, waiting.error) == (FinishReason.CANCELLED, "the engine was closed")
    for call in (lambda: engine.submit([1]), engine.step, engine.capture):
        with pytest.raises(RuntimeError, match="the engine was closed"):
            call()
    assert engine.cancel(waiting) is False


def test_ids_of_a_prompt_are_checked_by_few_calls() -> None:
    """A check of each token would keep the GIL from the stepping thread."""
    calls, ids = list[str](), [3] * 1000
    sys.setprofile(lambda frame, event, _: calls.append(event))
    checked = checked_ids("prompt", ids, 113)
    sys.setprofile(None)
    assert checked == tuple(ids) and len(calls) < 20


def test_submit_beyond_max_queued_raises() -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_queued=2, backend="tape")
    with Engine(TARGET, config=config) as engine:
        jobs = [engine.submit([1]) for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"2 requests are waiting already \(EngineConfig.max_queued\)"):
            engine.submit([1])
        assert not any(job.finished for job in jobs)
