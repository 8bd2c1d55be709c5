"""Uncommon configs of drafts, and a GGUF file as a draft."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.config_fields import read_config
from stepgraph.runtime.models.files.draft_layouts import read_eagle3
from stepgraph.runtime.models.llama_config import LlamaConfig, RopeConfig
from tests.helpers.draft_engines import DRAFTERS
from tests.runtime.models.files.test_gguf import write
from tools.train.saving import layer_fields

EAGLE3, _, MANY, _ = DRAFTERS
LAYER = LlamaConfig(64, 32, 40, 4, 2, 8, (None,), rope=RopeConfig(500.0), dtype=torch.float32)


def test_a_draft_may_be_a_gguf_file(tmp_path: Path) -> None:
    """The target's own file: almost all drafts are accepted."""
    path = write(tmp_path / "model.gguf", "qwen2", "qwen2")
    config = EngineConfig(
        max_rows=1, num_speculative_tokens=2, draft_length=2, max_length=24, greedy_only=True, eager=True, prefix_reuse=False
    )
    with Engine.from_pretrained(path, path, config=config) as engine:
        job = engine.generate([5, 6, 7], max_new_tokens=9)
        stats = engine.stats()
    assert len(job.tokens) == 9 and stats.drafts.accepted >= 5, "rounding may differ"


def test_a_missing_gguf_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", "qwen2", "qwen2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"model\.gguf: reading GGUF needs the gguf package: pip install 'stepgraph\[gguf\]'"):
        open_checkpoint(path)
    assert Vocabulary.from_gguf(path).stop_token_ids == (2,), "metadata is read without the package"


def test_sliding_layers_default_to_the_rules_of_the_family() -> None:
    stored = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    fields = layer_fields(LAYER) | {"num_hidden_layers": 3, "layer_types": None}
    assert read_config(fields | stored).windows == (None, 8, 8)


def test_the_layer_of_a_head_may_have_a_window() -> None:
    stored, target = json.loads((EAGLE3.folder / "config.json").read_text(encoding="utf-8")), open_checkpoint(EAGLE3.target).config
    head = read_eagle3(stored | {"layer_types": ["sliding_attention"], "sliding_window": 8}, target)
    assert head.layer == replace(read_eagle3(stored, target).layer, windows=(8,))
    with pytest.raises(ValueError, match=r"config\.layer_types: got"):
        read_eagle3(stored | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, target)


def test_a_shallow_target_needs_explicit_feature_layers() -> None:
    stored = json.loads((EAGLE3.folder / "config.json").read_text(encoding="utf-8"))
    target = replace(open_checkpoint(EAGLE3.target).config, windows=(None, None))
    name = "eagle_aux_hidden_state_layer_ids"
    with pytest.raises(ValueError, match=f"config.{name}: got none, expected a list of layers: a target of 2 layers"):
        read_eagle3(stored | {name: None}, target)
    assert read_eagle3(stored | {name: [0, 1, 2]}, target).feature_layers == (0, 1, 2)


def test_more_drafts_than_mtp_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.num_speculative_tokens: got 4, expected at most 3, one per MTP module"):
        MANY.engine(4)
