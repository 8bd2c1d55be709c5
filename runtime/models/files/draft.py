"""Drafts from files: determine what a draft folder holds, check it against the target, then load it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepgraph.graphs.limits import Limits
from stepgraph.runtime.models.draft_llama import DraftLlama, TokenMap, map_tokens
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.files import draft_layouts as layouts
from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, Checkpoint, MemoryNeed, WeightsMode, memory_need
from stepgraph.runtime.models.files.config_fields import MTP_COUNT, UnsupportedConfigError
from stepgraph.runtime.models.files.quantised_folder import quantised_source
from stepgraph.runtime.models.files.transformers_folder import (
    MtpCheckpoint,
    Target,
    TransformersCheckpoint,
    open_target,
    open_transformers_mtp,
)
from stepgraph.runtime.models.files.weights import SafetensorsSource, Source, StoredModel, read_json
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.mtp import Mtp
from stepgraph.sampling.kernels.c_kernel import why_no_c
from stepgraph.sampling.kernels.triton import why_no_triton

if TYPE_CHECKING:
    from stepgraph.runtime.models.transformers_model import DraftTransformers, TransformersModel

OWN_MTP = "mtp"
Device = str | torch.device
Draft = DraftLlama | Eagle3 | Mtp


@dataclass(frozen=True)
class DraftCheckpoint(StoredModel):
    """A draft that was checked against its target; its weights are not in memory yet."""

    kind: str
    make: Callable[[Llama | TransformersModel, Device], Draft]  # arguments: the target, and the device
    target: Target
    feature_layers: tuple[int, ...] = ()  # layers of the target whose inputs are the draft's features
    max_drafts: int = layouts.MAX_DRAFTS  # per round
    max_positions: int | None = None  # None: no limit; positions beyond those of the training only lower acceptance
    model: Checkpoint | None = None  # set for a complete model, which ranks may divide
    token_map: TokenMap | None = None
    target_copies: Mapping[str, str] = field(default_factory=dict)  # stored copies of target tensors, and their names in the target

    def check_shapes(self, other_tensors: Iterable[str] = ()) -> DraftCheckpoint:
        """Check names, shapes and types of all tensors but the `other_tensors`. Raises ValueError that names the tensor. Returns self."""
        self.check_header(self._outline()[1], {"d2t", "t2d", *self.target_copies, *other_tensors})
        return self

    def memory(self, limits: Limits) -> MemoryNeed:
        target, draft = self._outline()
        return memory_need(f"{self.path.name}: {self.kind}", draft, limits, shared=target)

    def unshared_weights(self) -> list[nn.Parameter]:
        """The parameters, on the meta device, that the draft does not share with the target."""
        target, draft = self._outline()
        shared = set(target.parameters())
        return [parameter for parameter in draft.parameters() if parameter not in shared]

    def _outline(self) -> tuple[Llama | TransformersModel, Draft]:
        target = self.target.outline(self.feature_layers)
        return target, self.allocate_packed(self.make(target, "meta"))

    def load(self, target: Llama | TransformersModel, device: Device, progress: bool = False) -> Draft:
        """target: the loaded target."""
        for name, target_name in self.target_copies.items():
            assert isinstance(self.target, Checkpoint)  # only MTP modules repeat tensors
            if not torch.equal(self.source.read(name), self.target.source.read(target_name)):
                raise ValueError(f"{self.path}: {name} differs from the target's {target_name}, which MTP modules share")
        model = self.allocate_packed(self.make(target, device))
        if hasattr(target, "shard") and model.head is target.unembedding:  # ranks divide the head that both have
            model.shard = target.shard
        self.fill(model, progress)
        return model


@dataclass(frozen=True)
class TransformersDraft:
    """A smaller model that `transformers` implements; its weights are not in memory yet."""

    stored: TransformersCheckpoint
    token_map: TokenMap | None
    feature_layers: tuple[int, ...] = ()
    max_drafts: int = layouts.MAX_DRAFTS

    @property
    def max_positions(self) -> int:
        return self.stored.config.max_positions

    def memory(self, limits: Limits) -> MemoryNeed:
        return memory_need(f"{self.stored.path.name}: draft", self._wrapped(self.stored.meta_model), limits)

    def load(self, target: object, device: Device, progress: bool = False) -> DraftTransformers:
        return self._wrapped(self.stored.load_model(device, progress))

    def _wrapped(self, model: Any) -> DraftTransformers:
        from stepgraph.runtime.models.transformers_model import DraftTransformers

        return DraftTransformers(model, self.stored.config, self.token_map)


StoredDraft = DraftCheckpoint | TransformersDraft | MtpCheckpoint


def open_draft(draft: str | Path, target: Target, dtype: torch.dtype | None = None, weights: WeightsMode = DEQUANTISED) -> StoredDraft:
    """Open a draft folder or .gguf file; "mtp" opens the MTP modules in the target's own folder.
    The config and the tensor names decide which kind of draft it is."""
    if draft == OWN_MTP:
        if not target.mtp_modules:
            why = f"{target.path} has no {MTP_COUNT}, or none of their tensors"
            raise ValueError(f"draft: got {OWN_MTP!r}, expected a target with MTP modules; {why}")
        if isinstance(target, TransformersCheckpoint):
            return open_transformers_mtp(target.path, target)
        return _open_mtp(target.path, target.source, None, target)
    path = Path(draft)
    try:
        if path.suffix == ".gguf" and path.is_file():
            return _open_model(path, target, dtype, weights)
        if not (path / "config.json").is_file():
            names = "'mtp', 'ngram', 'forced', 'none', 'auto'"
            raise ValueError(f"draft: got {str(draft)!r}, expected a local folder with a config.json, a .gguf file, or one of {names}")
        fields = read_json(path / "config.json")
        if layouts.is_eagle3(fields):
            return _open_eagle3(path, fields, target)
        source = SafetensorsSource(path)
        if layouts.mtp_layers(source) and "model.norm.weight" not in source.tensors:
            if isinstance(target, TransformersCheckpoint):
                return open_transformers_mtp(path, target)
            return _open_mtp(path, source, fields, target)
        return _open_model(path, target, dtype, weights)
    except UnsupportedConfigError as error:
        raise ValueError(f"{error}, an EAGLE-3 head (LlamaForCausalLMEagle3), or MTP modules (eh_proj.weight)") from None
    except ValueError as error:  # the path shows that the draft is wrong, not the target
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from None


def _open_eagle3(path: Path, fields: Mapping[str, object], target: Target) -> DraftCheckpoint:
    source = quantised_source(SafetensorsSource(path, renamed=layouts.eagle3_name), fields)
    config = layouts.read_eagle3(fields, target.config)
    d2t = layouts.read_d2t(source, config)
    own_embedding, own_head = (name in source.tensors for name in ("embed_tokens.weight", "lm_head.weight"))
    same_width = config.layer.hidden_size == target.config.hidden_size
    scaled = isinstance(target, Checkpoint) and target.config.embedding_scale != 1
    if not own_embedding and (scaled or not same_width):
        shape = (config.layer.vocab_size, config.layer.hidden_size)
        why = "the target's is scaled" if scaled else f"the target's has a width of {target.config.hidden_size}"
        raise ValueError(f"embed_tokens.weight is missing, expected it with shape {shape}: {why}")
    # A head without lm_head.weight uses the target's, if that has the same width and vocabulary.
    own_head = own_head or not same_width or d2t is not None

    def make(target_model: Llama | TransformersModel, device: Device) -> Eagle3:
        embedding = None if own_embedding else target_model.embedding
        return Eagle3(config, d2t=d2t, embedding=embedding, head=None if own_head else target_model.unembedding, device=device)

    slices = layouts.eagle3_slices(config.layer, own_embedding, own_head)
    head = DraftCheckpoint(path, source, slices, "EAGLE-3 head", make, target, config.feature_layers).check_shapes()
    # Packed whether or not the target's weights are: drafts change no text.
    why_not = why_no_triton(torch.device("cuda")) if torch.cuda.is_available() else why_no_c(config.layer.dtype)
    return head if why_not else replace(head, packed=head.packable())


def _open_mtp(path: Path, source: Source, fields: Mapping[str, object] | None, target: Checkpoint) -> DraftCheckpoint:
    """fields: the config of a folder that holds MTP modules only; None for the modules in the target's folder."""
    same = target.config
    grouped = same.experts is not None and same.experts.routing is not None
    if not grouped and not same.has_llama_layers:
        raise ValueError(f"draft: got MTP modules, expected another drafter: the target {target.path.name} has other layers than a Llama")
    if fields is None:
        first, count, other_tensors = same.num_layers, target.mtp_modules, source.tensors.keys() - target.mtp_tensors  # the target's own
    else:
        layers = layouts.mtp_layers(source)
        first, count, other_tensors = layers[0], len(layers), set()
    config = replace(same, windows=same.windows[-1:] * count)
    if grouped:  # modules have the layer type of the target's last layers; the config of their own folder is not read
        config = replace(config, experts=same.experts and replace(same.experts, dense_layers=frozenset()))
    elif fields is not None:
        config = layouts.read_mtp(fields, same, count)

    def make(target_model: Llama | TransformersModel, device: Device) -> Mtp:
        return Mtp(config, embedding=target_model.embedding, head=target_model.unembedding, device=device)

    return DraftCheckpoint(
        path,
        source,
        layouts.mtp_slices(config, first),
        "MTP",
        make,
        target,
        max_drafts=layouts.MAX_DRAFTS if count == 1 else count,
        target_copies={name: its for name, its in layouts.mtp_shared(config, first, target.config.tied).items() if name in source.tensors},
    ).check_shapes(other_tensors)


def _open_model(path: Path, target: Target, dtype: torch.dtype | None, weights: WeightsMode) -> StoredDraft:
    stored = open_target(path, dtype, weights)
    token_map = map_tokens(stored.vocabulary, target.vocabulary)
    if isinstance(stored, TransformersCheckpoint):
        return TransformersDraft(stored, token_map)

    def make(target_model: Llama | TransformersModel, device: Device) -> DraftLlama:
        return DraftLlama(stored.config, token_map, device=device)

    return DraftCheckpoint(
        path,
        stored.source,
        stored.slices,
        "draft",
        make,
        target,
        max_positions=stored.config.max_positions,
        model=stored,
        token_map=token_map,
        packed=stored.packed,
    )
