"""MTP modules for a target that `transformers` implements: checked on the meta device before their weights are loaded."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepgraph.graphs.limits import Limits
from stepgraph.runtime.models.files.checkpoint import MemoryNeed, memory_need
from stepgraph.runtime.models.files.draft_layouts import MAX_DRAFTS, mtp_layers
from stepgraph.runtime.models.files.transformers_folder import TransformersCheckpoint, load_weights, outline
from stepgraph.runtime.models.files.weights import SafetensorsSource, require_finite
from stepgraph.runtime.models.mtp import TransformersMtp

if TYPE_CHECKING:
    from stepgraph.runtime.models.llama import Llama
    from stepgraph.runtime.models.transformers_model import ModelSizes, TransformersModel

_OWN = {"enorm.weight": "token_norm", "hnorm.weight": "state_norm", "eh_proj.weight": "join"}
_REPEATED = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "unembedding"}  # the target's
_LAST_NORM = "shared_head.norm.weight"


@dataclass(frozen=True)
class MtpCheckpoint:
    """Modules whose names and sizes were checked."""

    path: Path
    source: SafetensorsSource
    target: TransformersCheckpoint
    layers: tuple[int, ...]  # numbers of the modules in the file
    outlined: Any  # a model of one layer on the meta device: the decoder of a module
    sizes: ModelSizes
    kind: str = "MTP"
    feature_layers: tuple[int, ...] = ()
    max_positions: int | None = None  # the target's are as many

    @property
    def max_drafts(self) -> int:
        return MAX_DRAFTS if len(self.layers) == 1 else len(self.layers)

    def memory(self, limits: Limits) -> MemoryNeed:
        target = self.target.outline()
        return memory_need(f"{self.path.name}: MTP", self._make(target, lambda layer: self.outlined), limits, shared=target)

    def check(self, progress: bool = False) -> None:
        """The weights are checked when they are loaded."""

    def load(self, target: Llama | TransformersModel, device: str | torch.device, progress: bool = False) -> TransformersMtp:
        """ValueError names a tensor that is missing, does not fit, holds NaN or infinity, or differs from the target's."""
        draft = self._make(target, lambda layer: self._load(layer, progress).to(device))
        for module, layer in zip(draft.depths, self.layers, strict=True):
            for name, parameter in _OWN.items():
                module.get_parameter(parameter).copy_(self._read(layer, name))
            for name, repeated in _REPEATED.items():
                stored = f"{_prefix(layer)}{name}"
                if stored in self.source.tensors and not torch.equal(
                    self.source.read(stored).to(target.config.dtype), getattr(target, repeated).cpu()
                ):
                    raise ValueError(f"{self.path}: {stored} differs from the target's, which MTP modules share")
        return draft

    def _make(self, target: Llama | TransformersModel, model_of: Callable[[int], Any]) -> TransformersMtp:
        models = importlib.import_module("stepgraph.runtime.models.transformers_model")
        decoders = [models.TransformersModel(model_of(layer), self.sizes, name=f"draft{layer}") for layer in self.layers]
        return TransformersMtp(decoders, float(self.outlined.config.rms_norm_eps), target.embedding, target.unembedding)

    def _load(self, layer: int, progress: bool) -> Any:
        """The decoder of a module. Its embedding and head have one token and no use."""
        inside = {name: name.removeprefix(_prefix(layer)) for name in self.source.tensors if name.startswith(_prefix(layer))}
        names = {stored: f"model.layers.0.{name}" for stored, name in inside.items() if name not in {**_OWN, **_REPEATED, _LAST_NORM: ""}}
        names[f"{_prefix(layer)}{_LAST_NORM}"] = "model.norm.weight"
        state = {name: self.source.read(stored) for stored, name in names.items()}
        state |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), torch.zeros(1, self.sizes.hidden_size))
        try:
            return load_weights(type(self.outlined), self.path, self.sizes.dtype, config=self.outlined.config, state_dict=state)
        except ValueError as error:
            raise ValueError(str(error).replace("model.layers.0.", _prefix(layer))) from None

    def _read(self, layer: int, name: str) -> Tensor:
        stored = f"{_prefix(layer)}{name}"
        return require_finite(self.path, stored, self.source.read(stored))


def open_transformers_mtp(path: Path, target: TransformersCheckpoint) -> MtpCheckpoint:
    """path: the target's folder, or one with the modules only."""
    source = SafetensorsSource(path)
    layers, own = tuple(mtp_layers(source)), path == target.path
    expected = tuple(range(target.config.num_layers, target.config.num_layers + target.mtp_modules))
    if own and layers != expected:
        raise ValueError(f"{path}: eh_proj.weight: got it in layers {list(layers)}, expected {list(expected)}, as the config says")
    config = copy.deepcopy(target.outlined.config)
    last = config.num_hidden_layers - 1
    lists = {name: value[last:] for name, value in vars(config).items() if name.endswith("layer_types") and isinstance(value, list)}
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 1, "tie_word_embeddings": False}
    for name, value in {**lists, **changes, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))}.items():
        setattr(config, name, value)
    outlined, sizes = outline(path, type(target.outlined), config, target.config.dtype)
    hidden = sizes.hidden_size
    shapes = {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden), _LAST_NORM: (hidden,)}
    for layer in layers:
        for name, shape in shapes.items():
            found = source.tensors.get(f"{_prefix(layer)}{name}")
            if found is None or found.shape != shape or not found.readable:
                got = "none" if found is None else f"{found.kind} of shape {found.shape}"
                raise ValueError(f"{path}: {_prefix(layer)}{name}: got {got}, expected floats of shape {shape}")
    return MtpCheckpoint(path, source, target, layers, outlined, sizes)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."
