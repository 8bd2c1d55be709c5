"""The layouts of public EAGLE-3 heads and MTP modules: fields of config.json, checked against the target's config, and tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepgraph.runtime.models.files.config_fields import MTP_COUNT, count_field, flag_field, read_config, require_off
from stepgraph.runtime.models.files.weights import Slices, Source, layer_slices, whole_slices
from stepgraph.runtime.models.llama_config import Eagle3Config, LlamaConfig
from stepgraph.sampling.fields import is_int

if TYPE_CHECKING:
    from stepgraph.runtime.models.transformers_model import ModelSizes

MAX_DRAFTS = 8  # of a single module, which runs for every draft
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Options that are not implemented, with the values that turn them off.
_UNSUPPORTED = {
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting", "use_mtp_layernorm"), False),
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
    "logit_scale": 1.0,
    "num_hidden_layers": 1,
}


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether the config is of an EAGLE-3 head. Heads with the architecture LlamaForCausalLM have a draft_vocab_size."""
    kind = [config.get("architectures"), config.get("speculators_model_type")]
    return "draft_vocab_size" in config or "eagle3" in str(kind).lower()


def read_eagle3(config: Mapping[str, Any], target: LlamaConfig | ModelSizes) -> Eagle3Config:
    """Reads configs of EAGLE, SpecForge, ModelOpt and speculators, which nests the layer's fields."""
    eagle_config = config.get("eagle_config") or {}
    layer_config = config.get("transformer_layer_config") or {}
    for name, part in (("eagle_config", eagle_config), ("transformer_layer_config", layer_config)):
        if not isinstance(part, Mapping):
            raise ValueError(f"config.{name}: got {part!r:.100}, expected an object")
    fields = {**layer_config, **config}
    for part in (fields, eagle_config):
        require_off(part, _UNSUPPORTED)
    slides = fields.get("layer_types") == ["sliding_attention"]  # followed, as in vLLM
    fields |= {"layer_types": None} if slides else {}
    layer = read_config({**fields, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "tie_word_embeddings": False})
    layer = replace(layer, windows=(count_field(fields, "sliding_window", 1 << 30),)) if slides else layer
    hidden_size = fields.get("target_hidden_size")
    if hidden_size not in (None, target.hidden_size):
        raise ValueError(f"config.target_hidden_size: got {hidden_size!r:.100}, expected the target's hidden_size {target.hidden_size}")
    _check_vocab_size(layer, target)
    return Eagle3Config(
        layer=replace(layer, dtype=target.dtype),
        feature_layers=_feature_layers(fields, eagle_config, target.num_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=count_field(fields, "draft_vocab_size", layer.vocab_size, default=layer.vocab_size),
        norm_before_residual=flag_field(fields, "norm_before_residual"),
    )


def _feature_layers(fields: Mapping[str, Any], eagle_config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs are the features.

    At the top of a config (vLLM, speculators) an id names the layer whose input is taken. Inside `eagle_config` (written by
    ModelOpt, read by SGLang) it names the layer whose output is taken. Without ids, the inputs of layers 2, n // 2 and n - 3.
    """
    layer_ids, offset = (fields[_LAYER_IDS], 0) if fields.get(_LAYER_IDS) else (eagle_config.get(_LAYER_IDS), 1)
    if not layer_ids:
        if layers < 3:
            raise ValueError(f"config.{_LAYER_IDS}: got none, expected a list of layers: a target of {layers} layers has no default")
        return (2, layers // 2, layers - 3)
    if not isinstance(layer_ids, list) or not all(is_int(layer) and 0 <= layer + offset <= layers for layer in layer_ids):
        raise ValueError(f"config.{_LAYER_IDS}: got {layer_ids!r:.100}, expected a list of layers of the target, which has {layers}")
    return tuple(layer + offset for layer in layer_ids)


def read_mtp(config: Mapping[str, Any], target: LlamaConfig, count: int) -> LlamaConfig:
    """The config of a folder with `count` MTP modules only. Their attention window is that of the target's last layer."""
    stated = config.get("num_nextn_predict_layers", count)
    if stated != count:
        raise ValueError(f"config.num_nextn_predict_layers: got {stated!r:.100}, expected {count}, the number of eh_proj.weight tensors")
    layer = read_config({**config, "num_hidden_layers": 1, "layer_types": None, "sliding_window": None, "use_sliding_window": False})
    if layer.hidden_size != target.hidden_size:
        raise ValueError(f"config.hidden_size: got {layer.hidden_size}, expected the target's {target.hidden_size}")
    _check_vocab_size(layer, target)
    return replace(layer, windows=(target.windows[-1],) * count, dtype=target.dtype, tied=False)


def _check_vocab_size(layer: LlamaConfig, target: LlamaConfig | ModelSizes) -> None:
    if layer.vocab_size != target.vocab_size:
        raise ValueError(f"config.vocab_size: got {layer.vocab_size}, expected the target's {target.vocab_size}")


def read_d2t(source: Source, config: Eagle3Config) -> Tensor | None:
    """[draft_vocab_size] int64 target ids of the head's tokens; None if the head has the target's vocabulary."""
    own, total, tensors = config.draft_vocab_size, config.layer.vocab_size, source.tensors
    if "d2t" not in tensors:
        if own != total:
            raise ValueError(f"d2t is missing, expected it with shape ({own},): the head proposes {own} of {total} tokens")
        return None
    if tensors["d2t"].shape != (own,) or tensors["d2t"].kind not in ("I64", "I32"):
        raise ValueError(f"d2t: got {tensors['d2t'].kind} of shape {tensors['d2t'].shape}, expected I64 of shape ({own},)")
    ids = source.read("d2t").to(torch.int64) + torch.arange(own)  # stored as the difference of target id and draft id
    if bool(((ids < 0) | (ids >= total)).any()) or len(ids.unique()) != own:
        raise ValueError(f"d2t: got duplicate target ids, or ids out of range, expected {own} distinct ids below {total}")
    if "t2d" in tensors:
        marked = source.read("t2d").bool()
        if marked.shape != (total,) or not torch.equal(marked.nonzero().flatten(), ids.sort().values):
            raise ValueError(f"t2d: got marks that differ from the {own} target ids of d2t")
    return ids


def eagle3_name(name: str) -> str:
    """The name of a stored tensor in EAGLE. speculators calls the layer `layers.0`; some heads prefix all names with `model`."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def eagle3_slices(layer: LlamaConfig, own_embedding: bool, own_head: bool) -> Slices:
    """All stored tensors of a head except d2t and t2d."""
    whole = {"fc.weight": "fuse", "midlayer.hidden_norm.weight": "state_norm", "norm.weight": "norm"}
    whole |= {"lm_head.weight": "head"} if own_head else {}
    whole |= {"embed_tokens.weight": "embedding"} if own_embedding else {}
    return whole_slices(whole) | layer_slices(layer, "midlayer.", "layer.")


def mtp_slices(config: LlamaConfig, first: int) -> Slices:
    """All stored tensors of the modules except copies of target tensors. first: layer number of the first module in the file."""
    whole = {"enorm": "token_norm", "hnorm": "state_norm", "eh_proj": "join", "shared_head.norm": "norm"}
    found: Slices = {}
    for index in range(config.num_layers):
        stored, module = f"model.layers.{first + index}.", f"depths.{index}."
        found |= whole_slices({f"{name}.weight": parameter for name, parameter in whole.items()}, stored, module)
        found |= layer_slices(config, stored, f"{module}layer.", config.experts_of(index))
    return found


def count_mtp_modules(config: Mapping[str, Any], source: Source, num_layers: int) -> int:
    """As in the config of a model with modules after its last layer; 0 if the file has no such layer."""
    count = count_field(config, MTP_COUNT, 64, least=0, default=0)
    return count if any(name.startswith(f"model.layers.{num_layers}.") for name in source.tensors) else 0


def mtp_layers(source: Source) -> list[int]:
    """Layer numbers of the MTP modules in a file."""
    matches = (re.fullmatch(r"model\.layers\.(\d{1,6})\.eh_proj\.weight", name) for name in source.tensors)
    layers = sorted(int(match[1]) for match in matches if match)
    if layers and layers != list(range(layers[0], layers[0] + len(layers))):
        raise ValueError(f"eh_proj.weight: got it in layers {layers}, expected consecutive layers")
    return layers


def mtp_shared(config: LlamaConfig, first: int, tied: bool) -> dict[str, str]:
    """Copies of target tensors that a file may hold for each module: from the stored name to the target's name."""
    embedding = "model.embed_tokens.weight"
    copies = {"embed_tokens.weight": embedding, "shared_head.head.weight": embedding if tied else "lm_head.weight"}
    return {f"model.layers.{first + index}.{name}": original for index in range(config.num_layers) for name, original in copies.items()}
