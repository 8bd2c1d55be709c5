"""Fields that few folders have, compared with `transformers`: the same logits, or an error that names the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.config_fields import read_config
from tests.helpers.families import BASE, CachedModel, random_model, save

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
GEMMA = {"sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "pad_token_id": 0, "sliding_window": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3's scaling without an original length": ("Llama", {"rope_scaling": LLAMA3, "max_position_embeddings": 224}),
    "YaRN without an original length": ("Llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 224}),
    "YaRN in Gemma 3 without an original length": (
        "Gemma3",
        GEMMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 224},
    ),
    "original length beside rope_scaling": ("Llama", {"rope_scaling": YARN, "original_max_position_embeddings": 60}),
    "original length beside the default scaling": ("GptOss", GPT_OSS | {"original_max_position_embeddings": 100}),
    "YaRN in all layers of Gemma 3": ("Gemma3", GEMMA | {"rope_scaling": YARN}),
    "YaRN in Gemma 3's layers with a window": (
        "Gemma3",
        GEMMA | {"rope_parameters": {"sliding_attention": YARN, "full_attention": {"rope_type": "linear", "factor": 2.0}}},
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """config.json holds the fields as they are stated here, not as transformers saves them."""
    kind, fields = EQUAL[case]
    folder = save(random_model(kind, json.loads(json.dumps(BASE | fields)), 1), tmp_path)
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stated = {name: stored[name] for name in ("architectures", "model_type", "dtype")} | BASE | fields
    (folder / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    tokens = torch.arange(140)[None] % 150
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    logits, _ = CachedModel(open_checkpoint(folder).load("cpu")).run(tokens, 0, 140)
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4


ALTERNATING = ["sliding_attention", "full_attention"] * 2
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a model without a causal mask": ("Llama", {"is_causal": False}, "is_causal: got False, expected True"),
    "windows in some layers of a Mistral": (
        "Mistral",
        {"sliding_window": 16, "layer_types": ALTERNATING},
        r"layer_types: got \['sliding.*, expected 'sliding_attention' for all layers of this MistralForCausalLM",
    ),
    "windows in a Llama": ("Llama", {"sliding_window": 16, "layer_types": ALTERNATING}, "layer_types: .* expected 'full_att"),
    "windows that are off": (
        "Qwen3",
        {"sliding_window": 16, "use_sliding_window": False, "layer_types": ALTERNATING},
        "layer_types: .* expected 'full_attention' for all",
    ),
    "one object for all layers of Gemma 3": ("Gemma3", {"rope_parameters": YARN}, r"rope_parameters: got .*, expected an object for each"),
    "the old name of a type in Gemma 3": (
        "Gemma3",
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        r"rope_scaling: got \{'type': 'linear', .*, expected an object with rope_type",
    ),
    "YaRN without rounding in Gemma 3": (
        "Gemma3",
        {"rope_scaling": YARN | {"truncate": False}},
        "rope_scaling.truncate: got False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_transformers_reads_in_another_way_are_refused(case: str) -> None:
    kind, fields, message = REFUSED[case]
    with pytest.raises(ValueError, match=rf"config\.{message}"):
        read_config({**BASE, "architectures": [f"{kind}ForCausalLM"], **fields})
    read_config({**BASE, "architectures": [f"{kind}ForCausalLM"], "sliding_window": 16})


LENGTH = "original_max_position_embeddings"
PHI = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ROPE_ERRORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a factor": ("Llama", {"rope_scaling": {"type": "linear", "factor": "8"}}, "rope_scaling.factor: got '8'"),
    "no factor": ("Llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: got None"),
    "in rope_parameters": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor: got 0"),
    "a type": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type: got 'dynamic'"),
    "frequencies": ("Llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "rope_scaling.high_freq_factor: got 4.0"),
    "a flag": ("Llama", {"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate: got 1"),
    "a theta within": ("Llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta: got 0"),
    "a theta outside": ("Llama", {"rope_theta": 0, "rope_scaling": YARN}, "rope_theta: got 0"),
    "a length within": ("Llama", {"rope_scaling": YARN | {LENGTH: 0}}, f"rope_scaling.{LENGTH}: got 0"),
    "a length outside": ("Llama", {"rope_scaling": YARN, LENGTH: 0}, f"{LENGTH}: got 0"),
    "a length of longrope": ("Phi3", {"rope_scaling": PHI | {LENGTH: 64}}, f"{LENGTH}: got None"),
    "a factor of longrope": ("Phi3", {"rope_scaling": PHI | {"factor": 0}, LENGTH: 64}, "rope_scaling.factor: got 0"),
    "a share": ("Phi3", {"partial_rotary_factor": 2}, "partial_rotary_factor: got 2"),
    "layers with windows": (
        "Gemma3",
        GEMMA | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
        "rope_parameters.sliding_attention.factor: got None",
    ),
    "layers without windows": ("Gemma3", GEMMA | {"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate: got False"),
    "no object": ("Llama", {"rope_scaling": 7}, "rope_scaling: got 7"),
}


@pytest.mark.parametrize("case", ROPE_ERRORS)
def test_errors_of_rope_fields_name_the_object_that_has_them(case: str) -> None:
    kind, fields, message = ROPE_ERRORS[case]
    with pytest.raises(ValueError, match=f"^{re.escape(f'config.{message}')}"):
        read_config({**BASE, "architectures": [f"{kind}ForCausalLM"], "sliding_window": 16, **fields})


def test_the_factor_of_yarn_in_public_folders_multiplies_the_default() -> None:
    """DeepSeek-R1-0528-Qwen3-8B was published with a factor that cancels the growth of the scores; transformers ignores it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.8782488562869419}
    rope = read_config({**BASE, "architectures": ["Qwen3ForCausalLM"], "rope_scaling": scaling}).rope
    assert rope.magnitude == pytest.approx(1.0) and max(rope.divisors) == 4.0
