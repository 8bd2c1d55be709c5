"""What a draft's config.json says of it, held against the target. ValueError names the field; nothing here reads weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepgraph.runtime.models.eagle3 import Eagle3Config
from stepgraph.runtime.models.files.weights import Source
from stepgraph.runtime.models.llama_config import LlamaConfig, read_config

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields that change a head's arithmetic and are not implemented, and what they are where nothing changes.
_PLAIN = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": 1.0,
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
_INTEGERS = ("I64", "I32")


def is_eagle3(told: Mapping[str, Any]) -> bool:
    """Some public heads call themselves a plain LlamaForCausalLM; those have a draft_vocab_size."""
    kind = [told.get("architectures"), told.get("speculators_model_type")]
    return "draft_vocab_size" in told or "eagle3" in str(kind).lower()


def read_eagle3(told: Mapping[str, Any], target: LlamaConfig) -> Eagle3Config:
    """A head for this target, from the configs of EAGLE, SpecForge and ModelOpt, or of speculators, which nests the layer's fields."""
    nested = told.get("eagle_config") or {}
    inner = told.get("transformer_layer_config") or {}
    for name, part in (("eagle_config", nested), ("transformer_layer_config", inner)):
        if not isinstance(part, Mapping):
            raise ValueError(f"config.{name}: got {part!r:.100}, want an object")
    fields = {**inner, **told}
    for name, plain in _PLAIN.items():
        for part in (fields, nested):
            if part.get(name, plain) not in (plain, None):
                raise ValueError(f"config.{name}: got {part[name]!r:.100}, want {plain}")
    if fields.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"config.num_hidden_layers: got {fields['num_hidden_layers']!r:.100}, want 1, a head of one layer")
    layer = read_config({**fields, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "tie_word_embeddings": False})
    own, fused = fields.get("draft_vocab_size"), fields.get("target_hidden_size")
    if own is not None and (isinstance(own, bool) or not isinstance(own, int) or not 1 <= own <= layer.vocab_size):
        raise ValueError(f"config.draft_vocab_size: got {own!r:.100}, want a whole number from 1 to vocab_size={layer.vocab_size}")
    if fused not in (None, target.hidden_size):
        raise ValueError(f"config.target_hidden_size: got {fused!r:.100}, want the target's hidden_size {target.hidden_size}")
    check_vocab_size(layer, target)
    before_residual = fields.get("norm_before_residual", False)
    if not isinstance(before_residual, bool):
        raise ValueError(f"config.norm_before_residual: got {before_residual!r:.100}, want true or false")
    return Eagle3Config(
        layer=replace(layer, dtype=target.dtype),
        feature_layers=_feature_layers(fields, nested, target.num_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=layer.vocab_size if own is None else own,
        norm_before_residual=before_residual,
    )


def _feature_layers(fields: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs are fused. vLLM and speculators, at the top of a config, count so as well; in an
    `eagle_config`, where ModelOpt writes them and SGLang reads them, a number names the layer whose output is taken, one less.
    Where nothing is said, all take what enters layers 2, n // 2 and n - 3, as EAGLE trains its heads.
    """
    given, later = (fields[_LAYER_IDS], 0) if fields.get(_LAYER_IDS) else (nested.get(_LAYER_IDS), 1)
    if not given:
        if layers < 3:
            raise ValueError(f"config.{_LAYER_IDS}: got none, want it said for a target of {layers} layers")
        return (2, layers // 2, layers - 3)
    whole = isinstance(given, list) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in given)
    if not whole or not all(0 <= layer + later <= layers for layer in given):
        raise ValueError(f"config.{_LAYER_IDS}: got {given!r:.100}, want a list of layers of the target, which has {layers}")
    return tuple(layer + later for layer in given)


def read_mtp(told: Mapping[str, Any], target: LlamaConfig, count: int) -> LlamaConfig:
    """The layers of MTP modules with a folder of their own. Where the family slides, they slide as the target's last layer does."""
    named = told.get("num_nextn_predict_layers", count)
    if named != count:
        raise ValueError(f"config.num_nextn_predict_layers: got {named!r:.100}, want {count}, as many as there are eh_proj")
    layer = read_config({**told, "num_hidden_layers": 1, "layer_types": None, "sliding_window": None, "use_sliding_window": False})
    if layer.hidden_size != target.hidden_size:
        raise ValueError(f"config.hidden_size: got {layer.hidden_size}, want the target's {target.hidden_size}")
    check_vocab_size(layer, target)
    return replace(layer, windows=(target.windows[-1],) * count, dtype=target.dtype, tied=False)


def check_vocab_size(layer: LlamaConfig, target: LlamaConfig) -> None:
    if layer.vocab_size != target.vocab_size:
        raise ValueError(f"config.vocab_size: got {layer.vocab_size}, want the target's {target.vocab_size}")


def read_d2t(source: Source, config: Eagle3Config) -> Tensor | None:
    """The target's id of each token that the head proposes; None where it proposes all. ValueError names the table."""
    proposed, known, found = config.draft_vocab_size, config.layer.vocab_size, source.tensors
    if "d2t" not in found:
        if proposed != known:
            raise ValueError(f"d2t is missing, want it with shape ({proposed},): the head proposes {proposed} of {known} tokens")
        return None
    if found["d2t"].shape != (proposed,) or found["d2t"].kind not in _INTEGERS:
        raise ValueError(f"d2t is {found['d2t'].kind} of shape {found['d2t'].shape}, want I64 of ({proposed},)")
    # How far beyond its own id a token's id of the target is.
    ids = source.read("d2t").to(torch.int64) + torch.arange(proposed)
    if bool(((ids < 0) | (ids >= known)).any()) or len(ids.unique()) != proposed:
        raise ValueError(f"d2t names ids of the target twice, or such as it does not have, want {proposed} distinct ids below {known}")
    if "t2d" in found:
        marked = source.read("t2d").bool()
        if marked.shape != (known,) or not torch.equal(marked.nonzero().flatten(), ids.sort().values):
            raise ValueError(f"t2d does not mark the {proposed} ids that d2t names")
    return ids
