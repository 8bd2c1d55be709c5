"""What drafters are called in files: every tensor of an EAGLE-3 head or of MTP modules by its public name, to be read and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stepgraph.runtime.models.eagle3 import Eagle3, Eagle3Config
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.models.weights import Place, layer_places


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
    tensors = stored(head, dict(eagle3_places(head.config, own_embedding, own_head)))
    if head.d2t is not None:
        ids = head.d2t.cpu()
        known = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    config = head.config
    told = layer_fields(config.layer) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
    }
    return write_folder(folder, told, tensors)


def layer_fields(config: LlamaConfig) -> dict[str, Any]:
    """A config.json of the Llama family, as `read_config` takes it."""
    if config.head_norms or config.qkv_bias != config.output_bias:
        raise ValueError("config: got norms of heads, or biases of some products only, want a layer as Llama has it")
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
        "model_type": "llama",
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
        "tie_word_embeddings": False,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
    }


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
