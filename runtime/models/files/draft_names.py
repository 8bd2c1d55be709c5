"""What drafters are called in files: every tensor of an EAGLE-3 head or of MTP modules by its public name, to be read and written."""

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
from stepgraph.runtime.models.files.weights import Place, Source, layer_places
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.models.mtp import Mtp

# What tells layers of other families.
_OTHERS = {
    ".mlp.experts.": "a mixture of experts (MoE)",
    ".mlp.gate.": "a mixture of experts (MoE)",
    "_proj_with_mqa.": "latent attention (MLA)",
    ".self_attn.kv_b_proj.": "latent attention (MLA)",
    ".self_attn.q_b_proj.": "latent attention (MLA)",
}


def eagle3_name(name: str) -> str:
    """Of a stored tensor, as EAGLE itself calls it: speculators counts its one layer, some put all below `model`."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def eagle3_places(config: Eagle3Config, own_embedding: bool, own_head: bool) -> Iterator[tuple[str, Place]]:
    """Every stored tensor of a head, but its token tables."""
    layer, hidden = config.layer, config.layer.hidden_size
    yield "fc.weight", Place("fuse", 0, hidden)
    yield "midlayer.hidden_norm.weight", Place("state_norm", 0, hidden)
    yield from layer_places(layer, "midlayer", "layer")
    yield "norm.weight", Place("norm", 0, hidden)
    if own_head:
        yield "lm_head.weight", Place("head", 0, config.draft_vocab_size)
    if own_embedding:
        yield "embed_tokens.weight", Place("embedding", 0, layer.vocab_size)


def mtp_places(config: LlamaConfig, first: int) -> Iterator[tuple[str, Place]]:
    """Every stored tensor of the modules, the first of which is layer `first` of the file; but what they share with the target."""
    hidden = config.hidden_size
    for index in range(config.num_layers):
        there, here = f"model.layers.{first + index}", f"depths.{index}"
        whole = {"enorm": "token_norm", "hnorm": "state_norm", "eh_proj": "join", "shared_head.norm": "norm"}
        for name, parameter in whole.items():
            yield f"{there}.{name}.weight", Place(f"{here}.{parameter}", 0, hidden)
        yield from layer_places(config, there, f"{here}.layer")


def mtp_layers(source: Source) -> list[int]:
    """Which layers of a file are MTP modules."""
    named = (re.fullmatch(r"model\.layers\.(\d{1,6})\.eh_proj\.weight", name) for name in source.tensors)
    layers = sorted(int(name[1]) for name in named if name)
    if layers and layers != list(range(layers[0], layers[0] + len(layers))):
        raise ValueError(f"got eh_proj.weight in the layers {layers}, want them in a row")
    return layers


def refuse_other_layers(source: Source) -> None:
    """MTP modules around layers of other families than Llama's, by the names of their tensors."""
    for name in source.tensors:
        kind = next((kind for part, kind in _OTHERS.items() if part in name), None)
        if kind:
            raise ValueError(f"{name} belongs to {kind}, which MTP modules are not supported with; want a dense layer as Llama has it")


def mtp_shared(config: LlamaConfig, first: int, tied: bool) -> dict[str, str]:
    """What a file may repeat of the target in each module: the name there, and the target's own."""
    embedding = "model.embed_tokens.weight"
    names = {"embed_tokens.weight": embedding, "shared_head.head.weight": embedding if tied else "lm_head.weight"}
    return {f"model.layers.{first + index}.{name}": its for index in range(config.num_layers) for name, its in names.items()}


def stored(model: nn.Module, places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Each tensor as a file holds it."""
    return {
        name: model.get_parameter(place.parameter).detach()[place.start : place.start + place.rows].cpu().contiguous().clone()
        for name, place in places.items()
    }


def save_eagle3(folder: str | Path, head: Eagle3, *, own_embedding: bool = False, own_head: bool = True) -> Path:
    """A folder that `Engine.from_pretrained(..., draft=folder)` reads, in the layout of public checkpoints.

    own_embedding, own_head: False leaves out what is the target's own. Tokens are stored as those checkpoints do: d2t[i] is
    how far beyond i the target's id of the head's token i is, and t2d marks the target's ids that the head knows.
    """
    config = head.config
    fields = layer_fields(config.layer)
    if fields["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"Eagle3Config.layer: got a layer as {fields['architectures'][0]} has it, want one as Llama has it")
    tensors = stored(head, dict(eagle3_places(head.config, own_embedding, own_head)))
    if head.d2t is not None:
        ids = head.d2t.cpu()
        known = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    told = fields | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
    }
    return write_folder(folder, told, tensors)


def save_mtp(folder: str | Path, draft: Mtp, *, first: int) -> Path:
    """As `save_eagle3`, of MTP modules, which are called the layers `first`, ... of the file: the target's number of layers."""
    count = len(draft.depths)
    told = layer_fields(draft.config) | {"num_hidden_layers": first, "num_nextn_predict_layers": count, "layer_types": None}
    return write_folder(folder, told, stored(draft, dict(mtp_places(draft.config, first))))


def layer_fields(config: LlamaConfig) -> dict[str, Any]:
    """A config.json of the Llama family, as `read_config` takes it."""
    if config.head_norms and config.qkv_bias != config.output_bias:
        raise ValueError("LlamaConfig: got norms of heads with biases of some products only, want a layer as one of the family has it")
    slides = [window for window in config.windows if window is not None]
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
        "sliding_window": slides[0] if slides else None,
        "tie_word_embeddings": False,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
    }


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
