"""Models and drafts at the edges: configs that few checkpoints have, packages that are not there, folders that were damaged."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.runtime.extras.states_folder import SavedStates, SavedText, StatesLayout, StatesWriter
from stepgraph.runtime.models.eagle3 import Eagle3, Eagle3Config
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.draft_config import read_eagle3
from stepgraph.runtime.models.files.draft_names import layer_fields, save_eagle3
from stepgraph.runtime.models.llama_config import LlamaConfig, read_config
from stepgraph.runtime.models.rope import RopeConfig
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.runtime.page_cache import PageCache
from tests.helpers.draft_engines import DRAFTERS
from tests.runtime.models.files.test_gguf import write

EAGLE3, _, MANY, _ = DRAFTERS
LAYER = LlamaConfig(64, 32, 40, 4, 2, 8, (None,), rope=RopeConfig(500.0), dtype=torch.float32)
STATES = StatesLayout("model", 100, (0, 2), 6, 3, "float32")


def test_a_draft_may_be_a_gguf_file(tmp_path: Path) -> None:
    """The target's own: every draft is what the target says."""
    path = write(tmp_path / "model.gguf", "qwen2", "qwen2")
    config = EngineConfig(max_rows=1, num_speculative_tokens=2, max_length=24, greedy_only=True, eager=True, prefix_reuse=False)
    with Engine.from_pretrained(path, path, config=config) as engine:
        job = engine.generate([5, 6, 7], max_new_tokens=9)
        stats = engine.stats()
    assert len(job.tokens) == 9 and stats.drafts.accepted >= 5, "rounding may part them"


def test_without_the_gguf_package_the_error_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", "qwen2", "qwen2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for opened in (open_checkpoint, Vocabulary.from_gguf):
        with pytest.raises(ValueError, match=r"model\.gguf: reading GGUF needs the gguf package: pip install 'stepgraph\[gguf\]'"):
            opened(path)


def test_a_config_that_is_written_reads_as_it_was() -> None:
    for config in (LAYER, replace(LAYER, rope=RopeConfig(500.0, 4.0)), replace(LAYER, windows=(8,), qkv_bias=True)):
        assert read_config(layer_fields(config) | {"torch_dtype": "float32"}) == config


def test_layers_that_no_family_has_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got norms of heads with biases of some products only"):
        layer_fields(replace(LAYER, head_norms=True, qkv_bias=True))
    head = Eagle3(Eagle3Config(replace(LAYER, head_norms=True), (0, 1, 2), 32, 64))
    with pytest.raises(ValueError, match=r"Eagle3Config\.layer: got a layer as Qwen3ForCausalLM has it, want one as Llama has it"):
        save_eagle3(tmp_path / "head", head)


def test_which_layers_slide_follows_the_family_where_nothing_lists_them() -> None:
    told = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    fields = layer_fields(LAYER) | {"num_hidden_layers": 3, "layer_types": None}
    assert read_config(fields | told).windows == (None, 8, 8)


def test_a_head_says_which_states_it_takes_of_a_shallow_target() -> None:
    told = json.loads((EAGLE3.folder / "config.json").read_text(encoding="utf-8"))
    target = replace(open_checkpoint(EAGLE3.target).config, windows=(None, None))
    name = "eagle_aux_hidden_state_layer_ids"
    with pytest.raises(ValueError, match=f"config.{name}: got none, want it said for a target of 2 layers"):
        read_eagle3(told | {name: None}, target)
    assert read_eagle3(told | {name: [0, 1, 2]}, target).feature_layers == (0, 1, 2)


def test_mtp_modules_draft_no_more_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.num_speculative_tokens: got 4, want at most 3, one per MTP module"):
        MANY.engine(4)


def test_pages_are_taken_whole_or_not_at_all() -> None:
    pages = PageCache(3, page_size=4)
    assert pages.allocate(4) is None and pages.num_free == 3
    assert sorted(pages.allocate(3) or ()) == [1, 2, 3] and pages.allocate(1) is None


def test_a_recording_of_an_engine_without_texts_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=16, greedy_only=True, eager=True)
    with Engine(ToyTarget(40), config=config, record=path) as engine:
        engine.generate([1, 2], max_new_tokens=2)
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["vocabulary"] == "none"


def test_saved_states_that_are_cut_or_renamed_are_refused_by_name(tmp_path: Path) -> None:
    writer = StatesWriter(tmp_path, STATES, 1 << 20)
    writer.put(SavedText(torch.arange(10), 1, torch.rand(9, 6), torch.rand(9, 3)))
    writer.close()
    file = tmp_path / "states-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b".token_ids", b".token_idz"))
    with pytest.raises(ValueError, match=r"text 0: .*token_ids"):
        SavedStates(tmp_path)
    file.write_bytes(whole[:40])
    with pytest.raises(ValueError, match=r"states-00000\.safetensors: "):
        SavedStates(tmp_path)
