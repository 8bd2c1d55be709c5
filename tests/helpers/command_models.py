"""A model folder for command tests: a tiny random model with a tokenizer and a chat template."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from stepgraph import Engine, EngineConfig
from stepgraph.runtime.commands.doctor import run_probes
from stepgraph.runtime.demo.variants import toy_pair
from tests.helpers.families import BASE, random_model
from tests.helpers.gguf_files import add_byte_level, write_gguf
from tests.helpers.kept_worker import keep_worker
from tests.helpers.made_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def model_folder() -> Path:
    """Written once per process and named `model`, as in the examples of --help."""
    folder = Path(tempfile.mkdtemp(prefix="command-")) / "model"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    tiny_model().save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tiny_model() -> Any:
    sizes = {"vocab_size": byte_level().get_vocab_size() + 3, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    return random_model("Llama", BASE | sizes | {"max_position_embeddings": 4096}, seed=5)


@functools.cache
def model_gguf() -> Path:
    """The same model in one file."""

    def add_tokens(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
        writer.add_chat_template(TEMPLATE)

    return write_gguf(model_folder().parent / "model.gguf", "llama", add_tokens, tiny_model())


@functools.cache
def recordings() -> Path:
    """A folder with two recordings: `run.jsonl` of the model above, `toy.jsonl` of the toy pair."""
    folder = model_folder().parent
    config, pair = (
        EngineConfig(max_rows=1, num_speculative_tokens=2, draft_length=2, max_length=64, greedy_only=True, eager=True),
        toy_pair(),
    )
    for engine in (
        Engine.from_pretrained(model_folder(), "ngram", config=config, record=folder / "run.jsonl"),
        Engine(pair.target, pair.draft, vocabulary=pair.vocabulary, config=config, record=folder / "toy.jsonl"),
    ):
        with engine:
            engine.generate([1, 2, 3], max_new_tokens=12)
            engine.generate([4, 2, 3], max_new_tokens=12)
    return folder


@functools.cache
def doctor_answers() -> dict[str, Any]:
    """The probes of `stepgraph doctor`, which take seconds, run once per process."""
    return run_probes()


def compile_without_new_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compile in this process, and all checks of constraints in one worker: starting one per command is slow."""
    make_compiler = EngineConfig.grammar_compiler
    monkeypatch.setattr(
        EngineConfig, "grammar_compiler", lambda config, vocabulary: make_compiler(replace(config, compile_isolation="none"), vocabulary)
    )
    keep_worker(monkeypatch)
