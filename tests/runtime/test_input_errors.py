"""Errors of bad input that no other test covers: each names the field, the value and the accepted values, before anything is created."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph.runtime
from stepgraph import Constraint, Engine, EngineClosedError, EngineConfig, Job, Vocabulary
from stepgraph.graphs import BufferSpec, StaticBuffers, TapeBackend, make_backend
from stepgraph.graphs.attention.choose import choose_attention
from stepgraph.graphs.model import AttentionShape
from stepgraph.runtime.models.files.config_fields import read_config
from stepgraph.runtime.models.files.tokenizer import ChatTemplate
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.replay import read_recording
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar import GrammarCompiler, GrammarLimits
from stepgraph.sampling.kernels.filters import choose_filters
from tests.helpers.grammar_texts import PRINTABLE

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
TARGET = ToyTarget(PRINTABLE.logits_width)
CPU = torch.device("cpu")
ADDING = ChatTemplate("{% for each in messages %}{{ each['role'] + each['content'] }}{% endfor %}")


def mapped(d2t: Any) -> Engine:
    draft = ToyDraft(TARGET, d2t=range(5))
    del draft.d2t  # a registered buffer, which refuses other objects
    draft.d2t = d2t
    return Engine(
        TARGET, draft, vocabulary=PRINTABLE, config=EngineConfig(max_rows=1, num_speculative_tokens=1, draft_length=1, max_length=16)
    )


def changed(name: str, value: object) -> Engine:
    """An engine for a target with another attribute."""
    target = ToyTarget(PRINTABLE.logits_width)
    setattr(target, name, value)
    return Engine(target, config=EngineConfig(max_rows=1, max_length=16))


def with_tokenizer(make: Any) -> object:
    return Engine(TARGET, vocabulary=PRINTABLE, tokenizer=make, config=EngineConfig(max_rows=1, max_length=16)).submit("a")


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: make_backend("gpu"), r"backend: got 'gpu', expected 'auto', 'tape' or 'cuda'"),  # type: ignore[arg-type]
    (lambda: choose_filters("cpu", "fast"), r"filters: got 'fast', expected one of 'auto', 'triton', 'flashinfer', 'torch'"),
    (
        lambda: choose_attention(CPU, "fast", (AttentionShape(torch.float32, 2, 1, 8),), 16),
        r"attention: got 'fast', expected one of 'auto', .*'reference'",
    ),
    (lambda: GrammarLimits(compile_seconds=4000), r"GrammarLimits\.compile_seconds: got 4000, expected a number above 0 and at most 3600"),
    (lambda: ToyDraft(TARGET, agreement=1.5), r"ToyDraft\.agreement: got 1\.5, expected a number from 0 to 1"),
    (lambda: Llama(read_config(CONFIG), feature_layers=(3,)), r"Llama\.feature_layers: got 3, expected a whole number from 0 to 2"),
    (
        lambda: read_config(CONFIG | {"num_attention_heads": 5}),
        r"config\.num_attention_heads: got 5, expected a divisor of hidden_size=24, or a head_dim",
    ),
    (
        lambda: read_config(CONFIG | {"rope_scaling": LLAMA3}),
        r"config\.rope_scaling\.high_freq_factor: got 4\.0, expected more than low_freq_factor=4\.0",
    ),
    (lambda: mapped(torch.arange(4)), r"Engine\.draft\.d2t: got 4 entries of torch\.int64, expected 5 of torch\.int64"),
    (lambda: mapped(torch.arange(5).int()), r"Engine\.draft\.d2t: got 5 entries of torch\.int32, expected 5 of torch\.int64"),
    (lambda: mapped([0, 1, 2, 3, 4]), r"Engine\.draft\.d2t: got \[0, 1, 2, 3, 4\], expected a tensor \[vocab_size\] of torch\.int64"),
    (lambda: changed("cache_specs", lambda limits: "keys"), r"Engine\.target\.cache_specs: got 'keys', expected a sequence of BufferSpecs"),
    (lambda: changed("cache_specs", lambda limits: [5]), r"Engine\.target\.cache_specs: got \[5\], expected a sequence of BufferSpecs"),
    (lambda: changed("feature_dtype", "float32"), r"Engine\.target\.feature_dtype: got 'float32', expected a torch\.dtype"),
    (lambda: changed("more", nn.LazyLinear(3)), r"Engine\.target\.more\.weight: got an uninitialised tensor of a lazy module, expected"),
    (lambda: changed("vocab_size", 0), r"Engine\.target\.vocab_size: got 0, expected a whole number >= 1"),
    (lambda: changed("feature_size", -1), r"Engine\.target\.feature_size: got -1, expected a whole number >= 0"),
    (lambda: changed("notes", 5), r"Engine\.target\.notes: got 5, expected a tuple of sentences"),
    (lambda: changed("attends", "x"), r"Engine\.target\.attends: got 'x', expected a tuple of AttentionShapes"),
    (lambda: changed("embedding_size", "x"), r"Engine\.target\.embedding_size: got 'x', expected a whole number >= 0"),
    (lambda: changed("lora_weights", "x"), r"Engine\.target\.lora_weights: got 'x', expected a mapping of names to LoraWeights"),
    (lambda: changed("shares_prefix", "no"), r"Engine\.target\.shares_prefix: got 'no', expected True or False"),
    (lambda: changed("shard", 5), r"Engine\.target\.shard: got 5, expected a VocabularyShard"),
    (lambda: with_tokenizer(lambda: 5), r"Engine\.tokenizer\(\): got 5, expected a TextCodec from the function"),
    (lambda: TextCodec(PRINTABLE, lambda text, begins: None).encode("a"), r"TextCodec\.encode\(\): got None, expected a sequence of"),  # type: ignore[arg-type,return-value]
    (lambda: Engine(TARGET, NgramLookup), r"Engine\.draft: got the class NgramLookup, expected an object with cache_specs, propose"),  # type: ignore[arg-type]
    (
        lambda: Engine(TARGET, config=EngineConfig(forced_acceptance=(0.5,), num_speculative_tokens=1, draft_length=1)),
        r"EngineConfig\.forced_acceptance: got \(0\.5,\) without a draft, expected None",
    ),
    (lambda: TextCodec.of_bytes(PRINTABLE).encode(5), r"text: got 5, expected a string"),  # type: ignore[arg-type]
    (lambda: Constraint.json_schema('{"minimum": NaN}'), r"a schema that is not JSON \(NaN is not a JSON value\), expected a JSON object"),
    (lambda: Constraint.regex(5), r"Constraint\.regex\.pattern: got 5, expected a string"),  # type: ignore[arg-type]
    (lambda: Engine("demo"), r"Engine\.target: got 'demo', expected a model; Engine\.from_pretrained loads"),  # type: ignore[arg-type]
    (lambda: ADDING.render([{"role": "user"}], None, True), r"messages\[0\] has no content, the model's chat template fails: .* 'content'"),
    (
        lambda: Vocabulary.from_tiktoken({b"a": 0, b"b": 1}, special_tokens={"\ud800": 2}),
        r"got the special token '\\ud800', expected text without surrogates",
    ),
    (
        lambda: Vocabulary.from_tiktoken({b"a": 0}, special_tokens={"<|im_end|>": 1}, logits_width=0),
        r"logits_width: got 0, expected a whole number from 1 to 2097152, or None",
    ),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED, ids=[reason.split(":")[0].split(" ")[-1] for _, reason in REFUSED])
def test_error_names_field_value_and_accepted_values(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise IndexError


@pytest.mark.parametrize(
    ("raised", "reason"), [(KeyboardInterrupt, "in a step, which closed the engine"), (Unprintable, r"str\(\) of it raised IndexError")]
)
def test_a_call_after_an_interrupted_step_reports_the_interruption(raised: type[BaseException], reason: str) -> None:
    def interrupted(job: Job) -> list[int]:
        raise raised

    engine = Engine(TARGET, interrupted, config=EngineConfig(max_rows=1, max_length=16, num_speculative_tokens=1, rounds_in_flight=1))
    with pytest.raises(raised):
        engine.generate([1])
    with pytest.raises(EngineClosedError, match=rf"^Engine\.submit\(\): {raised.__name__}: {reason}$"):
        engine.generate([1])


def test_public_calls_take_no_untyped_options() -> None:
    found = set[str]()
    for kind in {getattr(module, name) for module in (stepgraph, stepgraph.graphs) for name in module.__all__}:
        for member in vars(kind).values() if inspect.isclass(kind) else [kind]:
            function = inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function) and function.__module__.startswith("stepgraph"):
                parameters = inspect.signature(function).parameters.values()
                found |= {str(parameter.annotation) for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD}
    assert found == {"Unpack[RequestOptions]", "Unpack[BatchOptions]"}


def test_lazy_public_names_are_listed() -> None:
    assert set(stepgraph.__all__) <= set(dir(stepgraph))


def test_tape_refuses_buffers_of_another_device() -> None:
    buffers = StaticBuffers([BufferSpec("x", (2,), torch.float32)], device="meta")
    with pytest.raises(ValueError, match=r"TapeBackend\.capture: got buffers on meta, expected cpu"):
        TapeBackend().capture(lambda b: None, buffers)


def test_invalid_constraint_payloads_are_refused() -> None:
    compiler = GrammarCompiler(PRINTABLE, 1)
    with pytest.raises(ValueError, match=r"got '\{3,2\}' at position 1, expected bounds that ascend"):
        compiler.compile(Constraint.regex("a{3,2}"))
    with pytest.raises(ValueError, match=r"Constraint\.payload of ebnf: got '\[1\]', expected a payload that Constraint\.ebnf creates"):
        compiler.compile(replace(Constraint.ebnf('root ::= "a"'), payload="[1]"))


def test_token_files_with_empty_lines_and_invalid_unicode(tmp_path: Path) -> None:
    ranks = b"\n".join(base64.b64encode(bytes([byte])) + b" %d" % byte + b"\n" for byte in range(4))
    (tmp_path / "some.tiktoken").write_bytes(ranks)
    assert len(Vocabulary.from_tiktoken(tmp_path / "some.tiktoken", special_tokens={"<|im_end|>": 4}).tokens) == 5, "between empty lines"
    (tmp_path / "tokenizer.json").write_text('{"model": "\\ud800"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not JSON: half of a surrogate pair in a string"):
        Vocabulary.from_tokenizer_json(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"kind": "submit"}, r"run\.jsonl:1: got .*expected the first line of a file written by Engine\(record=\.\.\.\)"),
        ({"kind": "engine", "format": 1, "versions": 5}, r"run\.jsonl:1: versions: got int, expected an object"),
    ],
)
def test_recording_without_a_valid_header_is_refused(tmp_path: Path, header: dict[str, Any], reason: str) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps(header) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        read_recording(tmp_path / "run.jsonl")
