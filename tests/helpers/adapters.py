"""Random LoRA adapters as PEFT stores them, and models with their weights merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
ALPHA = 16


def save_adapter(
    folder: Path,
    model: Any,
    rank: int,
    targets: str = ALL,
    seed: int = 1,
    others: Mapping[str, tuple[int, float]] | None = None,
    **fields: Any,
) -> Any:
    """The model with the adapter merged. targets: names of nn.Linear modules. others: modules with another rank and alpha, by the end of
    their name. fields: of adapter_config.json."""
    folder.mkdir()
    rng, merged, tensors = torch.Generator().manual_seed(seed), copy.deepcopy(model), dict[str, torch.Tensor]()
    for name, module in merged.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets.split():
            outer, inner = module.weight.shape
            r, alpha = next((pair for end, pair in (others or {}).items() if name.endswith(end)), (rank, ALPHA))
            down, up = torch.randn(r, inner, generator=rng) * inner**-0.5, torch.randn(outer, r, generator=rng) * 0.1
            tensors |= {f"base_model.model.{name}.lora_{matrix}.weight": value for matrix, value in (("A", down), ("B", up))}
            module.weight.data += alpha / (r**0.5 if fields.get("use_rslora") else r) * up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none", "target_modules": targets.split()}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return merged
