"""Fuzzing of model folders: target and draft configs, safetensors headers, GGUF files. Accepted models must load and compute."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from stepgraph.graphs import StaticBuffers
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.models.files.checkpoint import Checkpoint, open_checkpoint
from stepgraph.runtime.models.files.draft import open_draft
from tests.fuzz.loop import Door
from tests.fuzz.values import Value, blob, bytes_of, written
from tests.helpers.draft_engines import DRAFTERS
from tests.helpers.families import BASE, folder_of, random_model, save_tokenizer

LIMITS = EngineConfig(max_rows=1, max_length=32, num_speculative_tokens=1, draft_length=1)
FAMILIES = ("smollm2", "llama-3.1", "qwen2.5, two layers slide", "qwen3", "mistral")
NAMED = re.compile(r"(/|path: |EngineConfig\.|Limits\.|config\.|draft: |feature_layers|chat_template|messages)[\w.]*")
FIELDS = (
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    " rope_theta rope_scaling rope_parameters rope_type factor low_freq_factor high_freq_factor original_max_position_embeddings type"
    " tie_word_embeddings attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types full_attention dtype"
    " torch_dtype float32 bfloat16 max_position_embeddings num_nextn_predict_layers eos_token_id LlamaForCausalLM Qwen3ForCausalLM"
    " MistralForCausalLM Qwen2ForCausalLM hidden_act silu quantization_config sliding_attention llama3 linear"
).split()
DRAFT_FIELDS = (
    "draft_vocab_size eagle_config transformer_layer_config norm_before_residual eagle_aux_hidden_state_layer_ids target_hidden_size"
    " speculators_model_type eagle3 LlamaForCausalLMEagle3 num_nextn_predict_layers norm_before_fc"
).split()


def temporary() -> Path:
    """A new temporary folder, in memory where /dev/shm is writable."""
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def chosen(given: Value, share: int) -> bool:
    """True for one in `share` inputs, chosen by their hash."""
    return zlib.crc32(written(given).encode()) % share == 0


def put(path: Path, content: Value) -> None:
    """Write bytes, a text unchanged, or any other value as JSON; None removes the file."""
    data = bytes_of(content)
    if content is None:
        path.unlink(missing_ok=True)
    elif data is not None:
        path.write_bytes(data)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8", errors="replace")


class FolderDoor(Door):
    """Files of one folder. One in `share` accepted inputs is loaded too."""

    named = NAMED

    def __init__(self, thorough: bool = False) -> None:
        self.folder = temporary()
        self.share = 1 if thorough else 64

    def prepare(self, given: Value) -> None:
        """Write the files, before the watch begins."""
        raise NotImplementedError

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class ConfigDoor(FolderDoor):
    """config.json and related files, with the weights of a model family."""

    name = "config"
    words: Sequence[str] = FIELDS
    _written = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json")

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        seeds = []
        for family in FAMILIES:
            shutil.copytree(folder_of(family), self.folder / family)
            found = {name: json.loads((self.folder / family / name).read_text()) for name in self._written[:2]}
            seeds.append({"family": family, **found})
        names = "model.norm.weight", "model.embed_tokens.weight"
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
        stops = {"tokenizer_config.json": {"eos_token": {"content": "</s>"}}, "generation_config.json": None}
        computed(open_checkpoint(self.folder / FAMILIES[0]))  # loads its kernels in advance
        self.seeds = [*seeds, seeds[0] | stops, seeds[1] | {"model.safetensors.index.json": index}]

    def prepare(self, given: Value) -> None:
        self._opened = self.folder / self._family(given)
        for name in self._written:
            put(self._opened / name, given.get(name) if isinstance(given, dict) else given)

    def enter(self, given: Value) -> None:
        checkpoint = open_checkpoint(self._opened)
        memory = checkpoint.memory(LIMITS.limits(checkpoint.config.vocab_size, len(checkpoint.vocabulary.tokens), 0))
        assert len(memory) < 500
        if chosen(given, self.share):
            computed(checkpoint)

    def _family(self, given: Value) -> str:
        family = given.get("family") if isinstance(given, dict) else ""
        return family if family in FAMILIES else FAMILIES[0]


@torch.no_grad()
def computed(checkpoint: Checkpoint) -> None:
    """Load an accepted checkpoint and compute logits for a few tokens."""
    model, length = checkpoint.load("cpu"), min(4, checkpoint.config.max_positions)
    limits = LIMITS.limits(model.vocab_size, len(checkpoint.vocabulary.tokens), 0)
    buffers = StaticBuffers(model.cache_specs(replace(limits, max_length=length)))
    positions = torch.arange(length)[None]
    size, tables = limits.page_size, torch.ones(1, 1, dtype=torch.int64)
    output = model(ModelInput(positions, positions, positions + size, tables, size), buffers)
    assert model.logits(output.hidden).shape == (1, length, checkpoint.config.vocab_size)


class DraftDoor(FolderDoor):
    """config.json of drafts of each kind, with their targets."""

    name = "draft"
    words: Sequence[str] = [*FIELDS, *DRAFT_FIELDS]

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        self._targets: dict[str, Checkpoint] = {}
        seeds = []
        for drafter in DRAFTERS:
            if drafter.name != "mtp":
                shutil.copytree(drafter.folder, self.folder / drafter.name)
                self._targets[drafter.name] = open_checkpoint(drafter.target)
                seeds.append({"kind": drafter.name, "config.json": json.loads((drafter.folder / "config.json").read_text())})
        layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
        self.seeds = [*seeds, {"kind": "eagle3", "config.json": {**seeds[0]["config.json"], **layers}}]

    def prepare(self, given: Value) -> None:
        kind = given.get("kind") if isinstance(given, dict) else ""
        self._kind = kind if isinstance(kind, str) and kind in self._targets else "eagle3"
        put(self.folder / self._kind / "config.json", given.get("config.json") if isinstance(given, dict) else given)

    def enter(self, given: Value) -> None:
        target = self._targets[self._kind]
        opened = open_draft(self.folder / self._kind, target)
        limits = LIMITS.limits(target.config.vocab_size, len(target.vocabulary.tokens), 0)
        assert len(opened.memory(limits)) < 500 and opened.max_drafts >= 1
        if chosen(given, self.share):
            opened.load(target.load("cpu", opened.feature_layers), "cpu")


TINY = BASE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@functools.cache
def tiny() -> Any:
    """A model with few weights, so that its file is mostly header."""
    return random_model("Llama", {**TINY, "vocab_size": 112, "tie_word_embeddings": True}, seed=1)


class SafetensorsDoor(FolderDoor):
    """The header of model.safetensors, as JSON or as the first bytes of the file; the weights after it are zeros."""

    name = "safetensors"
    words: Sequence[str] = (
        "dtype shape data_offsets F32 F16 BF16 F64 I8 BOOL __metadata__ format pt model.norm.weight lm_head.weight F8_E4M3".split()
    )

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        tiny().save_pretrained(self.folder)
        save_tokenizer(self.folder, 112)
        computed(open_checkpoint(self.folder))  # loads its kernels in advance
        self._file = self.folder / "model.safetensors"
        whole = self._file.read_bytes()
        end = 8 + struct.unpack("<Q", whole[:8])[0]
        size = len(whole) - end
        document = {"header": json.loads(whole[8:end]), "longer": 0, "numbers": size}
        self.seeds = [document, {"front": blob(whole[:end]), "numbers": size}, document | {"longer": 1}, document | {"numbers": size - 1}]

    def prepare(self, given: Value) -> None:
        document = given if isinstance(given, dict) else {"header": given}
        front = bytes_of(document.get("front"))
        if front is None:
            header = json.dumps(document.get("header")).encode()
            longer = document.get("longer")
            declared = len(header) + (longer if type(longer) is int else 0)
            front = struct.pack("<Q", declared % (1 << 64)) + header
        numbers = document.get("numbers")
        self._file.write_bytes(front + bytes(max(0, min(numbers, 1 << 16)) if type(numbers) is int else 0))

    def enter(self, given: Value) -> None:
        checkpoint = open_checkpoint(self.folder)
        if chosen(given, self.share):
            computed(checkpoint)


class GgufDoor(FolderDoor):
    """The metadata bytes of a GGUF file; the weights after them are zeros."""

    name = "gguf"
    words: Sequence[str] = (
        "GGUF general.architecture llama qwen2 block_count token_embd.weight blk.0.attn_q.weight tokenizer.ggml.tokens gpt2".split()
    )

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        self._file = self.folder / "model.gguf"
        front, size = gguf_front(self._file)
        self._file.write_bytes(front + bytes(size))
        computed(open_checkpoint(self._file))
        self.seeds = [{"front": blob(front), "numbers": size}, {"front": blob(front[: len(front) // 2]), "numbers": 0}]

    def prepare(self, given: Value) -> None:
        document = given if isinstance(given, dict) else {}
        numbers = document.get("numbers")
        self._file.write_bytes(
            (bytes_of(document.get("front")) or b"") + bytes(max(0, min(numbers, 1 << 16)) if type(numbers) is int else 0)
        )

    def enter(self, given: Value) -> None:
        checkpoint = open_checkpoint(self._file)
        if chosen(given, self.share):
            computed(checkpoint)


def gguf_front(path: Path) -> tuple[bytes, int]:
    """The bytes of a small file before its weights, and the number of bytes of the weights."""
    config = tiny().config
    writer = gguf.GGUFWriter(path, "llama")
    sizes: list[tuple[Any, float]] = [
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_rope_freq_base, 1e4),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ]
    for add, value in sizes:
        add(value)
    texts = ["<s>", "</s>", *map(chr, range(0x21, 0x35))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([3, 3, *[1] * (len(texts) - 2)])
    writer.add_token_merges([])
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(texts), 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {"blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8)}
    shapes |= {f"blk.0.ffn_{part}": (config.intermediate_size, 8) for part in ("gate", "up", "down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    front = path.read_bytes()
    # The weights begin at the next multiple of 32.
    return front + bytes(-len(front) % 32), sum(-(-4 * int(np.prod(shape)) // 32) * 32 for shape in shapes.values())
