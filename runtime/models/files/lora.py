"""Reads a LoRA adapter from a folder in the layout of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.layers.lora import LoraWeight
from stepgraph.runtime.models.files.quantised_folder import ConfigFields
from stepgraph.runtime.models.files.weights import SafetensorsSource, read_finite, read_json, require_finite
from stepgraph.sampling.fields import is_int, is_number

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
_ACCEPTED: dict[str, tuple[object, ...]] = {  # values of fields that change what an adapter computes or to which weights
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),  # other values change the model's own weights
    "task_type": (None, "CAUSAL_LM"),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"), (None, False)),
    **dict.fromkeys(
        ("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "alora_invocation_tokens"), (None, [])
    ),
}


class SlotContent(NamedTuple):
    """One slot of the buffers of a LoraWeight."""

    down: Tensor
    up: Tensor


def read_lora(folder: Path, weights: Mapping[str, LoraWeight], max_rank: int, dtype: torch.dtype) -> dict[str, SlotContent]:
    """The content of the adapter's slot for each of `weights`, on the CPU; `up` includes the adapter's scale."""
    config = _read_config(folder / "adapter_config.json")
    source = SafetensorsSource(folder, "adapter_model.safetensors")
    modules = {module: (name, index) for name, weight in weights.items() for index, module in enumerate(weight.parts)}
    module_names: list[str] = []
    for tensor in source.tensors:
        match = _TENSOR.fullmatch(tensor)
        if match is None or match[1] not in modules:
            kinds = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
            expected = f"base_model.model.MODULE.lora_A.weight or lora_B.weight of the model's {kinds}"
            raise ValueError(f"{folder}: {tensor}: got this name, expected {expected}")
        module_names.append(match[1])
    if not module_names:
        raise ValueError(f"{folder}: got no tensors, expected those of an adapter")
    contents = {
        name: SlotContent(torch.zeros(weight.down_shape(max_rank), dtype=dtype), torch.zeros(weight.up_shape(max_rank), dtype=dtype))
        for name, weight in weights.items()
    }
    for module in dict.fromkeys(module_names):
        name, index = modules[module]
        weight, content = weights[name], contents[name]
        sizes = list(weight.parts.values())
        first, column = sum(sizes[:index]), index * max_rank
        rank, scale = _rank_and_scale(config, module, max_rank)
        down = read_finite(folder, source, f"base_model.model.{module}.lora_A.weight", (rank, weight.inner))
        up = read_finite(folder, source, f"base_model.model.{module}.lora_B.weight", (sizes[index], rank))
        content.down[column : column + rank] = require_finite(folder, f"{module}.lora_A.weight in {dtype}", down.to(dtype))
        scaled = require_finite(folder, f"{module}.lora_B.weight times lora_alpha / r", (up.float() * scale).to(dtype))
        content.up[first : first + sizes[index], column : column + rank] = scaled
    return contents


def _read_config(path: Path) -> ConfigFields:
    fields = ConfigFields(read_json(path), str(path))
    for name, accepted in _ACCEPTED.items():
        fields.one_of(name, *accepted)
    fields.one_of("use_rslora", None, False, True)
    return fields


def _rank_and_scale(fields: ConfigFields, module: str, max_rank: int) -> tuple[int, float]:
    (name, rank), (alpha_name, alpha) = (
        _setting(fields, "r", "rank_pattern", module),
        _setting(fields, "lora_alpha", "alpha_pattern", module),
    )
    if not is_int(rank) or not 1 <= rank <= max_rank:
        raise ValueError(f"{name}: got {rank!r:.100}, expected a whole number from 1 to EngineConfig.max_lora_rank={max_rank}")
    if not is_number(alpha) or not 0 < alpha < 1e6:
        raise ValueError(f"{alpha_name}: got {alpha!r:.100}, expected a number above 0 and below 1e6")
    return rank, alpha / (rank**0.5 if fields.config.get("use_rslora") else rank)


def _setting(fields: ConfigFields, name: str, patterns_name: str, module: str) -> tuple[str, Any]:
    """A field of the adapter and its value for a module: that of the first pattern that matches the end of its name, as in PEFT."""
    patterns = fields.inner(patterns_name).config if fields.config.get(patterns_name) is not None else {}
    for pattern, value in patterns.items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise ValueError(f"{fields.path}.{patterns_name}: got {pattern!r:.100} ({error}), expected patterns of module names") from None
        if found:
            return f"{fields.path}.{patterns_name}[{pattern!r:.100}]", value
    return f"{fields.path}.{name}", fields.config.get(name)
