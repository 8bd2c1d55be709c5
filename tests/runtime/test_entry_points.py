"""Every public entry point refuses values of wrong types and sizes with a ValueError that names the accepted values."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers, capture, make_backend, run_eager
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.text import TextCodec
from stepgraph.runtime.validate import RequestOptions
from stepgraph.sampling.grammar import GrammarCompiler, GrammarLimits
from tests.helpers.c_library import needs_c
from tests.helpers.command_models import model_folder

VOCABULARY = Vocabulary.printable()
TARGET = ToyTarget(VOCABULARY.logits_width)
CONFIG = EngineConfig(
    max_rows=1,
    num_speculative_tokens=1,
    draft_length=1,
    max_length=16,
    page_size=4,
    eager=True,
    max_compiles=1,
    compile_isolation="none",
    backend="tape",
)
BUFFERS = StaticBuffers([BufferSpec("x", (4,), torch.float32)])
CODEC = TextCodec.of_bytes(VOCABULARY)
ENGINE = Engine(TARGET, ToyDraft(TARGET), vocabulary=VOCABULARY, tokenizer=CODEC, config=CONFIG)
LIMITS = CONFIG.limits(TARGET.vocab_size, TARGET.vocab_size, TARGET.feature_size)
TAG = {"triggers": ["<"], "structures": [{"begin": "<a", "schema": {}, "end": ""}]}
HUGE = 10**30


def step(buffers: StaticBuffers) -> None:
    buffers.x.add_(1)


RECORDED = capture(step, BUFFERS, "tape")


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no representation")


WRONG: list[Any] = [
    *(None, True, 0, -1, 3, HUGE, 1.5, float("nan")),
    *("", "x", "\ud800", "x" * 5000, b"x"),
    *([], [None], [5], ["x"], [[]], [{}], [{"role": 5}], (), (-1,), {}, {"type": 5}, {5: None}, {1}),
    *(int, Hostile(), Hostile, ToyTarget, EngineConfig, step, lambda: None),
    *(np.array(5), torch.tensor(1), torch.zeros(1, dtype=torch.int64, device="meta")),
    *(torch.tensor([1.5]), torch.zeros(2, 2), torch.nn.Linear(2, 2), torch.float32, Path("/nowhere"), re.compile("")),
    *(SamplingParams(), Constraint.json_object(), VOCABULARY, BUFFERS, TAG),
]


def valid(function: Callable[..., Any], *arguments: Any, **others: Any) -> Callable[..., Any]:
    """`function` with valid arguments, of which a caller replaces some."""
    bound = inspect.signature(function).bind(*arguments, **others).arguments
    return lambda **changes: function(**bound | changes)


def engine_of(**changes: Any) -> None:
    valid(Engine, TARGET, vocabulary=VOCABULARY, config=CONFIG)(**changes).close()


def load(**changes: Any) -> None:
    valid(Engine.from_pretrained, model_folder(), config=CONFIG)(**changes).close()


def submit(**changes: Any) -> None:
    ENGINE.cancel(valid(ENGINE.submit, [1])(**changes))
    ENGINE.generate([1], max_new_tokens=1)


def wait(**changes: Any) -> None:
    ENGINE.queue.wake.notify()  # so that valid values do not block
    ENGINE.wait(**changes)


def names(function: Any) -> Iterable[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


MAKERS: list[tuple[Any, Any]] = [
    (Constraint.json_schema, {}),
    (Constraint.regex, "a"),
    (Constraint.choice, ["a"]),
    (Constraint.ebnf, 'root ::= "a"'),
    (Constraint.lark, 'start: "a"'),
    (Constraint.structural_tag, TAG),
    (Constraint.response_format, {"type": "json_object"}),
    (Constraint.json_object().after, "a"),
    (Vocabulary.from_tokenizer_json, model_folder()),
    (Vocabulary.from_tiktoken, {b"a": 0, b"b": 1}),
    (AsyncEngine, ENGINE),
    (ENGINE.compile, Constraint.regex("a")),
    (ENGINE.cancel, 1),
    (TextCodec.open, model_folder()),
    (CODEC.encode, "a"),
    (CODEC.chat, [{"role": "user", "content": "a"}]),
    (CODEC.decode, [1]),
    (CODEC.with_text, ["a"]),
    (CODEC.template_mentions, "a"),
    (CODEC.stream().push, [1]),
    (VOCABULARY.decode, [1]),
    (GrammarCompiler, VOCABULARY),
    (StaticBuffers, []),
]
ENTRIES: dict[str, tuple[Callable[..., Any], Iterable[str]]] = {
    "Engine": (engine_of, names(Engine)),
    "from_pretrained": (load, names(Engine.from_pretrained)),
    "submit": (submit, ["prompt", *RequestOptions.__annotations__]),
    "wait": (wait, ["seconds"]),
    "metrics": (ENGINE.metrics, ["labels"]),
    "trace": (ENGINE.trace, ["rounds"]),
    **{kind.__name__: (kind, [field.name for field in fields(kind)]) for kind in (EngineConfig, SamplingParams, GrammarLimits)},
    "Limits": (lambda **changes: replace(LIMITS, **changes), [field.name for field in fields(Limits)]),
    "Vocabulary": (valid(Vocabulary, [b"a", b"b"], [1]), names(Vocabulary)),
    "json_object": (Constraint.json_object, names(Constraint.json_object)),
    "printable": (Vocabulary.printable, names(Vocabulary.printable)),
    "from_gguf": (Vocabulary.from_gguf, ["path"]),
    "from_tokenizer": (Vocabulary.from_tokenizer, ["tokenizer"]),
    "from_table": (Vocabulary.from_table, ["table"]),
    "TextCodec": (valid(TextCodec, VOCABULARY, lambda text, begins: [1]), names(TextCodec)),
    "TextCodec.of_bytes": (TextCodec.of_bytes, ["vocabulary"]),
    "BufferSpec": (lambda **changes: StaticBuffers([valid(BufferSpec, "x", (4,), torch.float32)(**changes)]), names(BufferSpec)),
    "capture": (valid(capture, step, BUFFERS), names(capture)),
    "run_eager": (valid(run_eager, step, BUFFERS), ["step", "buffers"]),
    "make_backend": (make_backend, names(make_backend)),
    "replay": (valid(RECORDED.replay, until=None, limit=None), ["until", "limit"]),
    **{make.__qualname__: (valid(make, argument), names(make)) for make, argument in MAKERS},
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_wrong_value_is_a_value_error(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some values are names of files to write
    call, parameters = ENTRIES[entry]
    messages = list[tuple[str, str]]()
    for name in parameters:
        for wrong in WRONG if name not in ("step", "between") else [value for value in WRONG if not callable(value)]:
            try:
                call(**{name: wrong})
            except ValueError as error:
                messages.append((name, str(error)))
    assert len(messages) >= 10
    for name, message in messages:
        assert re.search(r"(?s): .*(got|expected|has no|not |No such file)", message), (name, message)
        assert len(message) < 1000


@pytest.mark.parametrize(
    "sizes",
    [{name: 10**15} for name in ("max_rows", "num_pages", "prefill_chunk", "rounds_in_flight", "max_stop_ids", "max_bias_ids")]
    + [
        pytest.param({"grammar_arena_bytes": 10**15, "grammar_lane": "device"}, marks=needs_c),
        {"num_pages": 10**9},
        {"max_rows": 10**6, "max_length": 10**5},
    ],
    ids=str,
)
def test_sizes_beyond_the_memory_are_refused_with_both_numbers(sizes: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"EngineConfig: got [\d,]{12,} bytes on cpu, expected at most [\d,]{9,}, the memory available; lower"
    ):
        engine_of(config=replace(CONFIG, buckets=None, **sizes))


LIMITED = """
import resource
from pathlib import Path
from stepgraph import Engine, EngineConfig
from stepgraph.runtime.models.toy import ToyTarget

Engine(ToyTarget(100), config=EngineConfig(max_rows=1, max_length=16)).close()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
Engine(ToyTarget(100), config=EngineConfig(max_rows=1, max_length=16, num_pages=1 << 22))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_sizes_beyond_a_limit_of_the_process_are_refused() -> None:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # a heap per thread takes 64 MiB of the address space
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, env=environment)
    message = r"ValueError: EngineConfig: got 5\d\d,\d{3},\d{3} bytes on cpu, expected at most 2\d\d,\d{3},\d{3}, the memory available"
    assert re.search(message, done.stderr), done.stderr


MANY_ROWS: dict[str, Any] = {"max_rows": 2**20, "max_length": 4000}


@pytest.mark.parametrize(
    ("changes", "settings"),
    [({"num_pages": 10**10}, "num_pages=10000000000 and page_size=4"), (MANY_ROWS, "max_rows=1048576 and max_length=4000")],
)
def test_cache_beyond_the_memory_is_refused_before_the_model_is_loaded(changes: dict[str, Any], settings: str) -> None:
    cache = r"a cache of [\d,]{10,} tokens with [\d,]{12,} bytes on cpu"
    with pytest.raises(ValueError, match=rf"EngineConfig: got {settings}, {cache}, expected at most [\d,]{{6,}} tokens: [\d,]{{9,}} bytes"):
        load(config=replace(CONFIG, **changes))


def test_model_beyond_the_memory_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("stepgraph.graphs.memory", "stepgraph.runtime.models.files.loading"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"path: got [\d,]+ bytes on cpu, expected at most 1,000, the memory available; load a smaller"):
        load()


def test_static_buffers_beyond_the_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"StaticBuffers\.specs: got 4,000,000,000,000,000 bytes on cpu, expected at most"):
        StaticBuffers([BufferSpec("x", (10**15,), torch.float32)])


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize(
    "value", [ENGINE, AsyncEngine(ENGINE), CODEC, BUFFERS, ENGINE.compile(Constraint.regex("a"))], ids=lambda value: type(value).__name__
)
def test_objects_of_one_process_cannot_be_copied_or_pickled(value: object, copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=rf"{type(value).__name__}: cannot be copied or pickled; create one in each process"):
        copied(value)
