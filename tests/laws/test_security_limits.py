"""Limits in SECURITY.md: each default equals the table, and an exceeded limit is named. Promises name their tests."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from stepgraph import Constraint, Engine, EngineConfig, QueueFullError, SamplingParams, Vocabulary
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.config_fields import _MAX_PARAMETERS, read_config
from stepgraph.runtime.record import Recording
from stepgraph.runtime.serve.http import Bounds, HttpError, read_body
from stepgraph.sampling.grammar import GrammarCompiler, GrammarLimits, MaskStatus
from stepgraph.sampling.grammar.compile.limits import with_limit_name
from stepgraph.sampling.grammar.constraints.constraint import MAX_JSON_CHARS, MAX_MARKER
from stepgraph.sampling.grammar.schema.grammar import MAX_WHITESPACE
from stepgraph.sampling.grammar.schema.patterns import MAX_COUNT
from stepgraph.sampling.grammar.schema.reader import MAX_DEPTH
from stepgraph.sampling.grammar.tokenizers.gguf import MAX_GGUF_ENTRIES
from stepgraph.sampling.grammar.tokenizers.readers import MAX_JSON_BYTES
from stepgraph.sampling.grammar.tokenizers.table import MAX_IDS
from tests.helpers.c_library import needs_c
from tests.helpers.grammar_bombs import nested
from tests.helpers.grammar_texts import PRINTABLE, accepts, encode, fill_mask, take_claim
from tests.helpers.toy_engines import COMPILER, TARGET, VOCABULARY, finish

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+?) \| (`\w+\.\w+`|\*fixed\*) \| ([^|]+?) \|$", DOCUMENT, re.MULTILINE)
PROMISES = re.findall(r"^\d+\. .*(?:\n   .*)?$", DOCUMENT, re.MULTILINE)
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
FIXED = {
    "JSON text of a schema as given, including whitespace": MAX_JSON_CHARS,
    "levels of a schema": MAX_DEPTH,
    "repetitions in a pattern": MAX_COUNT,
    "characters or ids of a marker": MAX_MARKER,
    "blanks in a row under `any_whitespace`": MAX_WHITESPACE,
    "bytes of a JSON file of a model": MAX_JSON_BYTES,
    "parameters that a config may claim": float(f"{_MAX_PARAMETERS:.1e}"),
    "ids of a tokenizer": MAX_IDS,
    "tensors, fields and values of arrays of a GGUF file": MAX_GGUF_ENTRIES,
}
OWNERS: dict[str, Any] = {"GrammarLimits": GrammarLimits(), "EngineConfig": EngineConfig(), "Recording": Recording("x"), "Bounds": Bounds()}
SMALL: dict[str, Any] = {"max_length": 24, "page_size": 4, "num_pages": 12, "max_stop_ids": 2, "max_bias_ids": 1, "max_queued": 1}


@pytest.mark.parametrize(("what", "name", "default"), ROWS, ids=[row[1] if "." in row[1] else row[0] for row in ROWS])
def test_limit_equals_the_table(what: str, name: str, default: str) -> None:
    number, _, unit = default.replace(",", "").partition(" ")
    owner, _, field = name.strip("`").partition(".")
    found = FIXED[what] if name == "*fixed*" else getattr(OWNERS[owner], field)
    assert found == float(number) * UNITS.get(unit, 1)


def test_table_lists_every_limit() -> None:
    named = {name.strip("`") for _, name, _ in ROWS}
    assert {f"GrammarLimits.{field.name}" for field in fields(GrammarLimits)} <= named
    assert FIXED.keys() == {what for what, name, _ in ROWS if name == "*fixed*"} and len(ROWS) == 36
    assert len(PROMISES) == 10 and all(re.search(r"`[\w/]+/test_\w+\.py`", promise) for promise in PROMISES)


# An exceeded limit is named in the error


def compiled(constraint: Constraint, isolation: Any = "none", **limits: Any) -> None:
    compiler = GrammarCompiler(PRINTABLE, max_threads=1, limits=GrammarLimits(**limits), isolation=isolation, max_compiles=1)
    try:
        matcher = compiler.compile(constraint).matcher()
        for token in encode(b"aaaa"):
            if fill_mask(matcher)[0] == MaskStatus.FAULT or not matcher.accept_token(token):
                raise ValueError(with_limit_name(matcher.fault))
    finally:
        compiler.close()


def nested_text(depth: int) -> None:
    """The target prefers the opening bracket."""
    config = EngineConfig(
        max_rows=1, num_speculative_tokens=0, grammar_backend="automaton", grammar_limits=GrammarLimits(automaton_depth=depth)
    )
    with Engine(TARGET, vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        bracket = VOCABULARY.tokens.index(b"(")
        constraint = Constraint.ebnf('root ::= "(" root ")" | "a"')
        job = engine.submit([1], constraint=constraint, sampling=SamplingParams(logit_bias={bracket: 100.0}), max_new_tokens=20)
        finish(engine)
        assert job.tokens == [bracket] * (depth + 1)
        raise ValueError(job.error)


AUTOMATON_LIMITS = ("automaton_states", "automaton_bytes", "automaton_steps")
LETTERS = Constraint.regex("[a-z]{1,9}", "llguidance")
EXCEEDED: dict[str, Callable[[], object]] = {
    "max_chars": lambda: compiled(Constraint.regex("a" * 11), max_chars=10),
    "max_schema_chars": lambda: compiled(Constraint.json_schema({"type": "integer"}), max_schema_chars=10),
    "max_nesting": lambda: compiled(Constraint.regex("((a))"), max_nesting=1),
    "compile_seconds": lambda: compiled(Constraint.regex("(a{1,90}b){1,90}", "xgrammar"), "process", compile_seconds=1e-4),
    "compile_bytes": lambda: compiled(Constraint.regex("(a{1,90}b){1,90}", "xgrammar"), "process", compile_bytes=1 << 20),
    "result_bytes": lambda: compiled(Constraint.regex("a"), "process", result_bytes=10),
    "least_bytes": lambda: compiled(Constraint.regex("a{300}"), least_bytes=200),
    "step_seconds": lambda: compiled(Constraint.regex("a{9}", "xgrammar"), step_seconds=1e-9),
    **{name: partial(compiled, Constraint.regex("[a-z]{9}", "automaton"), **{name: 1}) for name in AUTOMATON_LIMITS},
    "automaton_depth": lambda: nested_text(1),
    "compile_fuel": lambda: compiled(LETTERS, compile_fuel=1),
    "grammar_symbols": lambda: compiled(LETTERS, grammar_symbols=1),
    "lexer_states": lambda: compiled(LETTERS, lexer_states=1),
    "mask_fuel": lambda: compiled(LETTERS, mask_fuel=1),
    "mask_items": lambda: compiled(Constraint.lark('start: a*\na: "a" | "b" | c\nc: "a" c | "a"'), mask_items=1),
    "row_items": lambda: compiled(Constraint.lark('start: a*\na: "a" | "b" | c\nc: "a" c | "a"'), row_items=1),
}


@pytest.mark.parametrize(
    "field", [pytest.param(each.name, marks=[needs_c] if each.name.startswith("automaton") else []) for each in fields(GrammarLimits)]
)
def test_exceeded_grammar_limit_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"GrammarLimits\.{field}\b") as caught:
        EXCEEDED[field]()
    assert len(str(caught.value)) < 1000


def large(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def full_gguf(path: Path) -> None:
    """The header claims more tensors than allowed."""
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, MAX_GGUF_ENTRIES + 1, 0))
    open_checkpoint(path)


def wide_tokenizer(path: Path) -> None:
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": MAX_IDS}}, "decoder": {"type": "ByteLevel"}}))
    Vocabulary.from_tokenizer_json(path)


HUGE = {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 4096, "num_attention_heads": 128, "vocab_size": 9}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "given": (lambda folder: Constraint.json_schema("{" + " " * MAX_JSON_CHARS + "}"), f"expected at most {MAX_JSON_CHARS}"),
    "levels": (lambda folder: COMPILER.compile(Constraint.json_schema(nested(MAX_DEPTH + 1))), f"more than {MAX_DEPTH} levels"),
    "repetitions": (lambda folder: COMPILER.check(Constraint.regex(f"a{{{MAX_COUNT + 1}}}")), f"at most {MAX_COUNT} repetitions"),
    "marker": (lambda folder: Constraint.json_object().after("x" * (MAX_MARKER + 1)), f"expected at most {MAX_MARKER}"),
    "JSON file": (lambda folder: Vocabulary.from_tokenizer_json(large(folder / "t.json", MAX_JSON_BYTES + 1)), f"at most {MAX_JSON_BYTES}"),
    "parameters": (lambda folder: read_config({"architectures": ["LlamaForCausalLM"], **HUGE}), "parameters, expected at most"),
    "ids": (lambda folder: wide_tokenizer(folder / "t.json"), f"expected one from 0 to {MAX_IDS - 1}"),
    "GGUF": (lambda folder: full_gguf(folder / "model.gguf"), f"expected at most {MAX_GGUF_ENTRIES}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_exceeded_fixed_limit_is_refused(tmp_path: Path, name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_whitespace_runs_are_bounded() -> None:
    constraint = Constraint.json_object(any_whitespace=True)
    for blanks, taken in ((MAX_WHITESPACE, True), (MAX_WHITESPACE + 1, False)):
        assert accepts(constraint, b"{" + b" " * blanks + b"}") == taken


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(TARGET, vocabulary=VOCABULARY, config=EngineConfig(max_rows=2, num_speculative_tokens=0, eager=True, **SMALL)) as created:
        created.capture()
        yield created


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": [1] * 24}, "prompt: got 24 tokens, expected fewer than EngineConfig.max_length=24"),
        ({"prompt": [1], "sampling": SamplingParams(stop_token_ids=(5, 6))}, "stop_token_ids: got 3 .*EngineConfig.max_stop_ids=2"),
        ({"prompt": [1], "sampling": SamplingParams(logit_bias={5: 1, 6: 1})}, "logit_bias: got 2 .*EngineConfig.max_bias_ids=1"),
    ],
)  # fmt: skip
def test_engine_sizes_are_enforced(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"max_new_tokens": 2, **arguments})


def test_rows_and_queue_are_bounded(engine: Engine) -> None:
    request: dict[str, Any] = {"max_new_tokens": 20, "sampling": SamplingParams(temperature=0, ignore_eos=True)}
    jobs = []
    for _ in range(3):
        jobs.append(engine.submit([1], **request))
        engine.step()
        assert engine.stats().running <= 2 and engine.stats().waiting <= 1
    with pytest.raises(QueueFullError, match=r"EngineConfig\.max_queued"):
        engine.submit([1], **request)
    for job in jobs:
        engine.cancel(job)
    engine.step()
    assert not engine.has_work


def test_compilations_and_cache_are_bounded() -> None:
    compiler = GrammarCompiler(PRINTABLE, max_threads=1, max_compiles=1, cache_bytes=1)
    claims = [take_claim(compiler, Constraint.regex(f"[a-z]{{{count}}}")) for count in range(1, 5)]
    while compiler.stats.compiles < len(claims):
        assert compiler.stats.running <= 1 and len(compiler._threads) <= 1
    assert compiler.stats.grammars == 4, "grammars in use are kept beyond the cache limit"
    for claim in claims:
        claim.release()
    assert compiler.stats.grammars <= 1
    compiler.close()


def test_request_body_is_bounded() -> None:
    size = str(Bounds.body_bytes + 1).encode()
    request = Request({"type": "http", "method": "POST", "headers": [(b"content-length", size)]})
    with pytest.raises(HttpError) as caught:
        asyncio.run(read_body(request, Bounds()))
    assert caught.value.detail == f"body: got {Bounds.body_bytes + 1} bytes, expected at most {Bounds.body_bytes}"
