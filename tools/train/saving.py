"""Writes EAGLE-3 heads and MTP modules as folders in the layout of public checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.files.draft_layouts import eagle3_slices, mtp_slices
from stepgraph.runtime.models.files.weights import Slices
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.models.mtp import Mtp


def extract_tensors(model: nn.Module, slices: Slices) -> dict[str, Tensor]:
    """Copies of the model's weights on the CPU, by their names in files."""
    return {name: part.of(model).detach().cpu().contiguous().clone() for name, part in slices.items()}


def save_eagle3(folder: str | Path, head: Eagle3, *, own_embedding: bool = False, own_head: bool = True) -> Path:
    """Write a folder that `Engine.from_pretrained(..., draft=folder)` reads, in the layout of public checkpoints. Returns its path.

    own_embedding, own_head: False if the head uses the target's, which is then not written. In the file, d2t[i] is the
    target's id of the head's token i minus i, and t2d marks the target ids that the head proposes.
    """
    config = head.config
    fields = layer_fields(config.layer)
    if fields["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"Eagle3Config.layer: got a layer of {fields['architectures'][0]}, expected a layer of LlamaForCausalLM")
    tensors = extract_tensors(head, eagle3_slices(config.layer, own_embedding, own_head))
    if head.d2t is not None:
        ids = head.d2t.cpu()
        is_proposed = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
        is_proposed[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_proposed}
    fields |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
    }
    return write_folder(folder, fields, tensors)


def save_mtp(folder: str | Path, draft: Mtp, *, first: int) -> Path:
    """Like `save_eagle3`, for MTP modules. They are stored as layers `first`, `first + 1`, ...; first: the target's number of layers."""
    count = len(draft.depths)
    fields = layer_fields(draft.config) | {"num_hidden_layers": first, "num_nextn_predict_layers": count, "layer_types": None}
    return write_folder(folder, fields, extract_tensors(draft, mtp_slices(draft.config, first)))


def layer_fields(config: LlamaConfig) -> dict[str, Any]:
    """The fields of a config.json from which `read_config` makes this config."""
    if config.head_norms and config.qkv_bias != config.output_bias:
        raise ValueError("LlamaConfig.head_norms: got True with qkv_bias != output_bias, which no model of the family has")
    windows = [window for window in config.windows if window is not None]
    architecture = "Qwen2" if config.qkv_bias and not config.output_bias else "Qwen3" if config.head_norms else "Llama"
    rope = config.rope
    scaling: dict[str, Any] | None = None
    if rope.original_length is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_frequency_factor,
            "high_freq_factor": rope.high_frequency_factor,
            "original_max_position_embeddings": rope.original_length,
        }
    elif rope.factor != 1:
        scaling = {"rope_type": "linear", "factor": rope.factor}
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_positions,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
        "tie_word_embeddings": False,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
    }


def write_folder(folder: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
