"""Configs written for heads: reading one gives the same config, and unsupported layers are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.files.config_fields import read_config
from stepgraph.runtime.models.llama_config import Eagle3Config, LlamaConfig, RopeConfig
from tools.train.quantised import pack_weight
from tools.train.saving import layer_fields, save_eagle3

LAYER = LlamaConfig(64, 32, 40, 4, 2, 8, (None,), rope=RopeConfig(500.0), dtype=torch.float32)


def test_layer_fields_round_trip() -> None:
    for config in (LAYER, replace(LAYER, rope=RopeConfig(500.0, 4.0)), replace(LAYER, windows=(8,), qkv_bias=True)):
        assert read_config(layer_fields(config) | {"torch_dtype": "float32"}) == config


def test_unsupported_layers_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head_norms: got True with qkv_bias != output_bias"):
        layer_fields(replace(LAYER, head_norms=True, qkv_bias=True))
    head = Eagle3(Eagle3Config(replace(LAYER, head_norms=True), (0, 1, 2), 32, 64))
    with pytest.raises(ValueError, match=r"Eagle3Config\.layer: got a layer of Qwen3ForCausalLM, expected a layer of LlamaForCausalLM"):
        save_eagle3(tmp_path / "head", head)


@pytest.mark.parametrize("largest", [1.0, 0.005, 0.0005])
def test_small_weights_in_eight_bits_keep_their_sizes(largest: float) -> None:
    """Below 0.0077 the scale of a group is a subnormal float16."""
    weight = (torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1) * largest
    packed = pack_weight(weight)
    numbers = packed["weight_packed"].view(torch.uint8).view(16, 2, 32).float() - 128
    found = (numbers * packed["weight_scale"].float()[:, :, None]).view_as(weight)
    assert (found - weight).norm() < 0.005 * weight.norm()
