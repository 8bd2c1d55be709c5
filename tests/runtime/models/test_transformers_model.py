"""Models of `transformers` in the engine: layers, nodes and refusals. test_transformers_families.py compares their texts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph import Engine, EngineConfig
from stepgraph.runtime.models.files.transformers_folder import open_target
from tests.helpers.draft_engines import DRAFTERS, EAGLE_LAYERS
from tests.helpers.families import CachedModel, folder_of, hf_model
from tests.helpers.family_texts import CONFIG, CONSTRAINTS, PROMPTS, decode


def pretrained(path: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(path, config=CONFIG, implementation="transformers", **options)


def test_a_head_reads_the_same_layers_with_both_implementations() -> None:
    eagle3 = DRAFTERS[0]
    opened = [open_target(eagle3.target, implementation=implementation) for implementation in ("native", "transformers")]
    tokens = torch.tensor([PROMPTS[2], PROMPTS[2][::-1]])
    native, other = (CachedModel(each.load("cpu", EAGLE_LAYERS)).run(tokens, 0, tokens.shape[1])[1] for each in opened)
    torch.testing.assert_close(other, native, rtol=1e-4, atol=1e-4)
    config, found = EngineConfig(**{**vars(CONFIG), "num_speculative_tokens": 3, "draft_length": 3}), []
    for implementation in ("native", "transformers"):
        with Engine.from_pretrained(eagle3.target, eagle3.folder, config=config, implementation=implementation) as engine:
            found.append([(job.tokens, job.num_accepted_drafts) for job in decode(engine, PROMPTS, CONSTRAINTS[1])])
    assert found[0] == found[1] and any(accepted for _, accepted in found[0])


def changed(tmp_path: Path, family: str = "llama-2", **fields: Any) -> Path:
    """A copy of a folder with other fields in its config.json."""
    folder = Path(shutil.copytree(folder_of(family), tmp_path / "model"))
    file = folder / "config.json"
    kept = {**json.loads(file.read_text(encoding="utf-8")), **fields}
    file.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": None}, r"config\.json: architectures: got None, expected one causal language model of transformers"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures: got \['LlamaForSequenceClassification'\], expected one causal",
        ),
        ({"architectures": ["MistralForCausalLM"]}, r"model_type: got 'llama', expected 'mistral' for MistralForCausalLM"),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
            r"auto_map: got .*, expected a class of transformers, since code in a model",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: got .*, expected weights that are not quantised"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type: got 'dynamic', expected frequencies that do not depend"),
        ({"num_hidden_layers": 5}, r"model\.layers\.4\.\S+ is missing"),
        ({"num_hidden_layers": 3}, r"got 9 tensors that the config does not account for, such as model\.layers\.3\."),
        ({"pad_token_id": 255}, "LlamaForCausalLM: Padding_idx must be within num_embeddings"),
        ({"intermediate_size": 80}, r"model\.layers\.0\.mlp\.\S+: got shape \(.*\), expected \(.*\) by the config"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder, before = changed(tmp_path, **fields), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        pretrained(folder)
    assert torch.equal(torch.get_rng_state(), before), "transformers drew random numbers for missing tensors"


def test_missing_tensors_that_transformers_cannot_initialise_are_refused(tmp_path: Path) -> None:
    """Found by fuzzing. Other config classes refuse a negative initializer_range."""
    folder = changed(tmp_path, "qwen2", num_hidden_layers=5, layer_types=["full_attention"] * 5, initializer_range=-0.5)
    with pytest.raises(ValueError, match=r"model: Qwen2ForCausalLM: normal expects std >= 0\.0, but found std -0\.5"):
        pretrained(folder)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"implementation: got 'torch', expected one of 'auto', 'native', 'transformers'"):
        Engine.from_pretrained(folder_of("llama-2"), implementation="torch")  # type: ignore[arg-type]
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"path: got '.*model\.gguf', expected a local folder .* for implementation='transformers'"):
        pretrained(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"weights: got 'quantised' with implementation='transformers', expected 'dequantised'"):
        pretrained(folder_of("llama-2"), weights="quantised")


def test_a_model_of_transformers_in_memory_is_refused() -> None:
    expected = r"got a LlamaForCausalLM of transformers, expected Engine\.from_pretrained\(folder\) after model\.save_pretrained\(folder\)"
    with pytest.raises(ValueError, match=expected):
        Engine(hf_model("llama-2"))


def test_auto_selects_native_if_it_supports_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_target(folder_of("llama-2"))).__name__ == "Checkpoint"
    folder = changed(tmp_path, mlp_bias=True)
    assert type(open_target(folder)).__name__ == "TransformersCheckpoint"
    with pytest.raises(ValueError, match="mlp_bias: got True, expected False"):
        open_target(folder, implementation="native")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"mlp_bias: got True.* pip install 'stepgraph\[transformers\]'"):
        open_target(folder)
    with pytest.raises(
        ValueError, match=r"implementation: got 'transformers', expected 'native': .* pip install 'stepgraph\[transformers\]'"
    ):
        open_target(folder, implementation="transformers")


def test_a_layer_of_a_llama_has_one_node_more_than_the_native_class() -> None:
    """A native layer has 9 nodes; here the second residual connection and the norm after it are two nodes."""
    nodes = []
    for implementation in ("native", "transformers"):
        with Engine.from_pretrained(folder_of("llama-3.1"), "none", config=CONFIG, implementation=implementation) as engine:
            nodes.append(sum(engine.capture().keys[0][1].nodes.values()))
    assert nodes[1] - nodes[0] <= 4 and nodes[1] <= 1.25 * nodes[0]
