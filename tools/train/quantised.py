"""EAGLE-3 heads in 8 bits, in the layout `pack-quantized` of compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepgraph.runtime.models.files.weights import FLOATS, SafetensorsSource, read_json
from tools.train.saving import write_folder

GROUP_SIZE, MAX_NUMBER = 32, 127  # inner indices with one scale, and the largest magnitude
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP_SIZE, "symmetric": True},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
}


def quantise_head(head: Path, out: Path) -> None:
    """Write the head of the folder `head` into the folder `out`. Raises ValueError that names the file, and the field or tensor."""
    fields, source = read_json(head / "config.json"), SafetensorsSource(head)
    if fields.get("quantization_config"):
        raise ValueError(f"{head / 'config.json'}: quantization_config: got one, expected a head that is not quantised")
    if out.resolve() == head.resolve():
        raise ValueError(f"OUT: got {str(out)!r}, the folder of the head, expected another one")
    tensors: dict[str, Tensor] = {}
    for name, stored in source.tensors.items():
        tensor = source.read(name)
        is_packable = len(stored.shape) == 2 and not stored.shape[1] % GROUP_SIZE and not name.endswith("embed_tokens.weight")
        if not is_packable or stored.kind not in FLOATS:
            tensors[name] = tensor
            continue
        tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in pack_weight(tensor).items()}
    write_folder(out, fields | {"quantization_config": QUANTIZATION_CONFIG}, tensors)


def pack_weight(weight: Tensor) -> dict[str, Tensor]:
    """The packed tensors of a weight [out, in], by name suffix. A weight is (number - 128) times the scale of its group."""
    groups = weight.float().view(len(weight), -1, GROUP_SIZE)
    scales = (groups.abs().amax(2) / MAX_NUMBER).half()
    numbers = (groups / scales.float().clamp(min=2**-24)[:, :, None]).round().clamp(-MAX_NUMBER, MAX_NUMBER) + 128
    words = numbers.to(torch.uint8).view(len(weight), -1).view(torch.int32)  # four numbers per word, the lowest bits first
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
