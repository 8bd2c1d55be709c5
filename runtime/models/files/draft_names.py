"""The public file layouts of EAGLE-3 heads and MTP modules: tensor names, and functions that write them to a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stepgraph.runtime.models.eagle3 import Eagle3, Eagle3Config
from stepgraph.runtime.models.files.weights import ParameterSlice, Source, layer_slices
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.models.mtp import Mtp

# Parts of tensor names that only unsupported layers have.
_UNSUPPORTED = {
    ".mlp.experts.": "a mixture of experts (MoE)",
    ".mlp.gate.": "a mixture of experts (MoE)",
    "_proj_with_mqa.": "latent attention (MLA)",
    ".self_attn.kv_b_proj.": "latent attention (MLA)",
    ".self_attn.q_b_proj.": "latent attention (MLA)",
}


def eagle3_name(name: str) -> str:
    """EAGLE's name of a stored tensor. speculators calls the layer `layers.0`; some heads prefix all names with `model`."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def eagle3_slices(config: Eagle3Config, own_embedding: bool, own_head: bool) -> Iterator[tuple[str, ParameterSlice]]:
    """All stored tensors of a head except d2t and t2d."""
    layer, hidden = config.layer, config.layer.hidden_size
    yield "fc.weight", ParameterSlice("fuse", 0, hidden)
    yield "midlayer.hidden_norm.weight", ParameterSlice("state_norm", 0, hidden)
    yield from layer_slices(layer, "midlayer", "layer")
    yield "norm.weight", ParameterSlice("norm", 0, hidden)
    if own_head:
        yield "lm_head.weight", ParameterSlice("head", 0, config.draft_vocab_size)
    if own_embedding:
        yield "embed_tokens.weight", ParameterSlice("embedding", 0, layer.vocab_size)


def mtp_slices(config: LlamaConfig, first: int) -> Iterator[tuple[str, ParameterSlice]]:
    """All stored tensors of the modules except those of the target. first: layer number of the first module in the file."""
    hidden = config.hidden_size
    for index in range(config.num_layers):
        stored, module = f"model.layers.{first + index}", f"depths.{index}"
        whole = {"enorm": "token_norm", "hnorm": "state_norm", "eh_proj": "join", "shared_head.norm": "norm"}
        for name, parameter in whole.items():
            yield f"{stored}.{name}.weight", ParameterSlice(f"{module}.{parameter}", 0, hidden)
        yield from layer_slices(config, stored, f"{module}.layer")


def mtp_layers(source: Source) -> list[int]:
    """Layer numbers of the MTP modules in a file."""
    matches = (re.fullmatch(r"model\.layers\.(\d{1,6})\.eh_proj\.weight", name) for name in source.tensors)
    layers = sorted(int(match[1]) for match in matches if match)
    if layers and layers != list(range(layers[0], layers[0] + len(layers))):
        raise ValueError(f"eh_proj.weight: got it in layers {layers}, expected consecutive layers")
    return layers


def check_dense_layers(source: Source) -> None:
    """Raises ValueError if a tensor name shows that an MTP module has a layer of another family than Llama."""
    for name in source.tensors:
        kind = next((kind for part, kind in _UNSUPPORTED.items() if part in name), None)
        if kind:
            raise ValueError(f"{name}: got an MTP module with {kind}, expected a dense layer of the Llama family")


def mtp_shared(config: LlamaConfig, first: int, tied: bool) -> dict[str, str]:
    """Copies of target tensors that a file may hold for each module: from the stored name to the target's name."""
    embedding = "model.embed_tokens.weight"
    copies = {"embed_tokens.weight": embedding, "shared_head.head.weight": embedding if tied else "lm_head.weight"}
    return {f"model.layers.{first + index}.{name}": original for index in range(config.num_layers) for name, original in copies.items()}


def extract_tensors(model: nn.Module, slices: Mapping[str, ParameterSlice]) -> dict[str, Tensor]:
    """Copies of the model's weights on the CPU, by their names in files."""
    return {
        name: model.get_parameter(source.parameter).detach()[source.start : source.start + source.rows].cpu().contiguous().clone()
        for name, source in slices.items()
    }


def save_eagle3(folder: str | Path, head: Eagle3, *, own_embedding: bool = False, own_head: bool = True) -> Path:
    """Write a folder that `Engine.from_pretrained(..., draft=folder)` reads, in the layout of public checkpoints. Returns its path.

    own_embedding, own_head: False if the head uses the target's, which is then not written. In the file, d2t[i] is the
    target's id of the head's token i minus i, and t2d marks the target ids that the head proposes.
    """
    config = head.config
    fields = layer_fields(config.layer)
    if fields["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"Eagle3Config.layer: got a layer of {fields['architectures'][0]}, expected a layer of LlamaForCausalLM")
    tensors = extract_tensors(head, dict(eagle3_slices(config, own_embedding, own_head)))
    if head.d2t is not None:
        ids = head.d2t.cpu()
        proposed = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
        proposed[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": proposed}
    fields |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
    }
    return _write_folder(folder, fields, tensors)


def save_mtp(folder: str | Path, draft: Mtp, *, first: int) -> Path:
    """Like `save_eagle3`, for MTP modules. They are stored as layers `first`, `first + 1`, ...; first: the target's number of layers."""
    count = len(draft.depths)
    fields = layer_fields(draft.config) | {"num_hidden_layers": first, "num_nextn_predict_layers": count, "layer_types": None}
    return _write_folder(folder, fields, extract_tensors(draft, dict(mtp_slices(draft.config, first))))


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
        "tie_word_embeddings": False,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
    }


def _write_folder(folder: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
