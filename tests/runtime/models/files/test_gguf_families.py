"""GGUF files of Gemma 3, Phi 3 and 4, and GPT-OSS: other names, layouts and settings than those of Llama's files."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from stepgraph.graphs.layers.quantised import unpack
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from tests.helpers.c_library import needs_c
from tests.helpers.families import BASE, FAMILIES, CachedModel, count_refused_damaged, random_model, save
from tests.runtime.models.files.test_gguf import TOKENS, as_often_mixed, logits_of, write

GEMMA = {"num_hidden_layers": 7, "sliding_window": 16, "head_dim": 24, "query_pre_attn_scalar": 24}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
WIDE = {"num_hidden_layers": 62, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "query_pre_attn_scalar": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("gemma3", "Gemma3", GEMMA),
    "gemma, scaled": ("gemma3", "Gemma3", GEMMA | LINEAR | {"rope_local_base_freq": 5000.0}),
    "gemma, 62 layers": ("gemma3", "Gemma3", GEMMA | WIDE),
    "phi-3, with a window": ("phi3", *FAMILIES["phi-3, with a window"]),
    "phi-4": ("phi3", "Phi3", {"sliding_window": None, "pad_token_id": 0}),
    "phi-4-mini": ("phi3", *FAMILIES["phi-4-mini"]),
    "gpt-oss": ("gpt-oss", *FAMILIES["gpt-oss"]),
}
BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}  # whole blocks of every type


@functools.cache
def model_of(name: str) -> Any:
    _, family, fields = MODELS[name]
    return random_model(family, BASE | fields, seed=len(name))


def file_of(path: Path, name: str, **options: Any) -> Path:
    return write(path / "model.gguf", "", MODELS[name][0], model=model_of(name), **options)


def relative_error(found: Tensor, answer: Tensor) -> float:
    return float((found - answer).abs().max() / answer.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_config_of_the_folder(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, name)
    found, expected = (open_checkpoint(each).config for each in (path, save(model_of(name), tmp_path / "folder")))
    assert found.norm_epsilon == pytest.approx(expected.norm_epsilon) and found.rope.magnitude == pytest.approx(expected.rope.magnitude)
    assert found.rope.divisors == pytest.approx(expected.rope.divisors)
    rope = replace(found.rope, magnitude=expected.rope.magnitude, divisors=expected.rope.divisors)  # float32 in the file
    assert replace(found, norm_epsilon=expected.norm_epsilon, rope=rope, dtype=expected.dtype) == expected


@pytest.mark.parametrize("name", [name for name in MODELS if "62" not in name])  # so many random layers enlarge differences of rounding
def test_a_file_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    with torch.no_grad():
        answer = model_of(name)(TOKENS).logits
    assert relative_error(logits_of(file_of(tmp_path, name)), answer) < 1e-4


def test_gemma_without_a_window_has_one_rope_for_all_layers(tmp_path: Path) -> None:
    path = file_of(tmp_path, "gemma")
    path.write_bytes(path.read_bytes().replace(b"gemma3.attention.sliding_window", b"gemma3.attention.sliding_windxw"))
    assert open_checkpoint(path).config.windows == (None,) * 7


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K, as_often_mixed])
@pytest.mark.parametrize(("family", "architecture"), [("Gemma3", "gemma3"), ("Phi3", "phi3")])
@needs_c
def test_quantised_weights_are_kept_with_the_bits_of_dequantised_ones(tmp_path: Path, family: str, architecture: str, kind: Any) -> None:
    model = random_model(family, BASE | BLOCKS | {"sliding_window": 16, "pad_token_id": 0}, seed=1)
    path = write(tmp_path / "model.gguf", "", architecture, kind, model)
    kept, plain = (open_checkpoint(path, torch.float32, weights).load("cpu") for weights in ("quantised", "dequantised"))
    matrices = [name for name, parameter in plain.named_parameters() if parameter.dim() == 2]
    assert len(matrices) == (5 if architecture == "gemma3" else 6)
    for name in matrices:
        assert kept.get_parameter(name).dtype is torch.uint8
        assert torch.equal(unpack(kept.get_parameter(name)), plain.get_parameter(name)), name
    assert relative_error(*(CachedModel(each).run(TOKENS, 0, 40)[0] for each in (kept, plain))) < 1e-4


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q8_0])
@needs_c
def test_experts_of_gpt_oss_are_dequantised(tmp_path: Path, kind: Kind) -> None:
    """The reference is `transformers` with the values of `gguf.quants`; the other matrices are not quantised in the files of llama.cpp."""
    model = random_model("GptOss", BASE | FAMILIES["gpt-oss"][1], seed=1)
    path = write(tmp_path / "model.gguf", "", "gpt-oss", lambda name: kind if ".experts." in name else Kind.F32, model)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(layer.mlp.experts, name)
                values = gguf.quants.quantize(np.ascontiguousarray(weight.mT.numpy()), kind)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(values, kind)).mT)
        answer = model(TOKENS).logits
    assert relative_error(logits_of(path), answer) < 1e-4
    message = rf"layers.0.mlp.experts.\w+: got type {kind.name} and shape \(5, .*, in two dimensions, .*, or weights='dequantised'"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path, torch.float32, "quantised")


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("gemma", {"final_logit_softcapping": 30.0}, "config.final_logit_softcapping: got 30.0, expected False"),
        ("gemma", {"attention.sliding_window_pattern": 3}, "gemma3.attention.sliding_window_pattern: got 3, expected one of None, 6"),
        ("gpt-oss", {"attention.sliding_window_pattern": 3}, "gpt-oss.attention.sliding_window_pattern: got 3, expected one of None, 2"),
        ("phi-4", {"rope.scaling.factor": 4.0}, "rope_scaling.rope_type: got 'linear', expected 'default' or 'longrope'"),
        ("phi-4", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope_type: got 'yarn', expected 'default' or 'longrope'"),
        ("phi-4-mini", {"rope.scaling.factor": 4.0}, "phi3.rope.scaling.factor: got 4.0, expected one of None, 0.0, 1.0"),
        ("phi-4-mini", {"rope.scaling.type": "yarn"}, "phi3.rope.scaling.type: got 'yarn', expected one of 'none', 'linear', 'longrope'"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(tmp_path: Path, name: str, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(file_of(tmp_path, name, entries=entries))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("phi-4-mini", b"rope_factors_short", "rope_factors_shxrt.weight', which a model"),
        ("gpt-oss", b"blk.1.ffn_up_exps.weight", "got the tensor 'blk.1.ffn_xp_exps.weight', which a model"),
    ],
)
def test_tensors_of_other_names_are_refused(tmp_path: Path, name: str, tensor: bytes, message: str) -> None:
    path = file_of(tmp_path, name)
    place = path.read_bytes().index(tensor)
    changed = tensor.replace(b"short", b"shxrt").replace(b"up", b"xp")
    path.write_bytes(path.read_bytes()[:place] + changed + path.read_bytes()[place + len(tensor) :])
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["gemma", "phi-4-mini", "gpt-oss"])
def test_random_damage_raises_value_errors_only(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, name)
    assert count_refused_damaged(path, path.read_bytes(), 5000, path) > 20
