"""Drafts from files: what kind of draft a folder holds, everything in it held against the target, and only then its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from stepgraph.graphs.model import DraftModel
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.models.draft_llama import DraftLlama, Translation, translate
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.files.checkpoint import Checkpoint, memory, open_checkpoint
from stepgraph.runtime.models.files.draft_config import is_eagle3, read_d2t, read_eagle3, read_mtp
from stepgraph.runtime.models.files.draft_names import eagle3_name, eagle3_places, mtp_layers, mtp_places, mtp_shared, refuse_other_layers
from stepgraph.runtime.models.files.weights import (
    PartSource,
    Place,
    SafetensorsSource,
    Source,
    check_numbers,
    check_tensors,
    load_tensors,
    places,
    read_json,
)
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import ARCHITECTURES
from stepgraph.runtime.models.mtp import Mtp

OWN_MTP = "mtp"
Device = str | torch.device


class DraftCheckpoint(Protocol):
    """A draft that was found whole and fits its target, and takes no memory yet."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Of the target: whose inputs the draft is fed with."""

    @property
    def most_drafts(self) -> int:
        """That it can make in one round."""

    @property
    def most_positions(self) -> int | None:
        """That it reads; None: as many as there are."""

    def memory(self, limits: Limits) -> str:
        """What loading will take, for people to read."""

    def check(self, progress: bool = False) -> None:
        """Read every number. ValueError names the tensor that will not do."""

    def load(self, target: Llama, device: Device, progress: bool = False) -> DraftModel:
        """After `check`, beside a target that is loaded."""


def open_draft(draft: str | Path, target: Checkpoint, dtype: torch.dtype | None = None) -> DraftCheckpoint:
    """A draft by its name, or from a folder or .gguf file, whose config and tensor names say what it is.

    "mtp" takes the MTP modules of the target's own folder. ValueError names the file and the field or tensor that is wrong.
    """
    if draft == OWN_MTP:
        if not target.mtp_modules:
            raise ValueError(f"draft: got {OWN_MTP!r}, want a target with MTP modules; {target.path} names no num_nextn_predict_layers")
        return _open_mtp(target.path, target.source, {}, target)
    path = Path(draft)
    if path.suffix == ".gguf" and path.is_file():
        return _open_model(path, target, dtype)
    if not path.is_dir():
        names = "'mtp', 'ngram', 'forced', 'none', 'auto'"
        raise ValueError(f"draft: got {str(draft)!r}, want a local folder with a config.json, a .gguf file, or one of {names}")
    told = read_json(path / "config.json")
    try:
        if is_eagle3(told):
            return _open_eagle3(path, told, target)
        source = SafetensorsSource(path)
        if mtp_layers(source) and "model.norm.weight" not in source.tensors:
            return _open_mtp(path, source, told, target)
    except ValueError as error:
        raise _said_of(path, error) from None
    if told.get("architectures") in [[name] for name in ARCHITECTURES]:
        return _open_model(path, target, dtype)
    wanted = f"an EAGLE-3 head (LlamaForCausalLMEagle3), MTP modules (eh_proj.weight), or a model of {', '.join(ARCHITECTURES)}"
    raise ValueError(f"{path}: config.architectures: got {told.get('architectures')!r:.100}, want {wanted}")


@dataclass(frozen=True)
class HeadCheckpoint:
    """EAGLE-3 or MTP: weights of its own, and some of the target's."""

    path: Path
    kind: str
    make: Callable[[Llama, Device], Eagle3 | Mtp]  # around this target, on this device
    target: Checkpoint
    source: Source
    wanted: Mapping[str, Place]
    feature_layers: tuple[int, ...] = ()
    most_drafts: int = 8
    most_positions: int | None = None  # what it was not trained for costs acceptance, and is not refused
    repeated: Mapping[str, str] = field(default_factory=dict)  # stored tensors that have to be the target's, and which of its

    def checked(self) -> HeadCheckpoint:
        """Every tensor is there, in its shape. ValueError names the one that is not."""
        check_tensors(self._outline()[1], self.wanted, self.source, self.path, {"d2t", "t2d", *self.repeated})
        for name, its in self.repeated.items():
            shape = self.target.source.tensors[its].shape
            if self.source.tensors[name].shape != shape:
                raise ValueError(f"{self.path}: {name} has shape {self.source.tensors[name].shape}, want {shape}, as the target's {its}")
        return self

    def memory(self, limits: Limits) -> str:
        target, head = self._outline()
        return memory(f"{self.path.name}: {self.kind}", head, limits, shared=target)

    def _outline(self) -> tuple[Llama, Eagle3 | Mtp]:
        target = self.target.outline(self.feature_layers)
        return target, self.make(target, "meta")

    def check(self, progress: bool = False) -> None:
        check_numbers(self.wanted, self.source, self.path, progress)
        for name, its in self.repeated.items():
            if not torch.equal(self.source.read(name), self.target.source.read(its)):
                raise ValueError(f"{self.path}: {name} holds other numbers than the target's {its}, which the modules share")

    def load(self, target: Llama, device: Device, progress: bool = False) -> Eagle3 | Mtp:
        model = self.make(target, device)
        load_tensors(model, self.wanted, self.source, self.path, progress)
        model.eval()
        return model


@dataclass(frozen=True)
class ModelCheckpoint:
    """A whole model."""

    checkpoint: Checkpoint
    translation: Translation | None
    feature_layers: tuple[int, ...] = ()
    most_drafts: int = 8

    @property
    def most_positions(self) -> int:
        return self.checkpoint.config.max_positions

    def memory(self, limits: Limits) -> str:
        return memory(f"{self.checkpoint.path.name}: draft", DraftLlama(self.checkpoint.config, device="meta"), limits)

    def check(self, progress: bool = False) -> None:
        self.checkpoint.check(progress)

    def load(self, target: Llama, device: Device, progress: bool = False) -> DraftLlama:
        opened = self.checkpoint
        model = DraftLlama(opened.config, self.translation, device=device)
        load_tensors(model, dict(places(model)), opened.source, opened.path, progress)
        model.eval()
        return model


def _open_eagle3(path: Path, told: Mapping[str, object], target: Checkpoint) -> HeadCheckpoint:
    found = SafetensorsSource(path)
    names: dict[str, str] = {}
    for name in found.tensors:
        called = eagle3_name(name)
        if called in names:
            raise ValueError(f"{called} is there twice, as {names[called]} and as {name}")
        names[called] = name
    source = PartSource(found, names)
    config = read_eagle3(told, target.config)
    d2t = read_d2t(source, config)
    own_embedding, own_head = (name in source.tensors for name in ("embed_tokens.weight", "lm_head.weight"))
    same = config.layer.hidden_size == target.config.hidden_size
    if not own_embedding and not same:
        wanted = (config.layer.vocab_size, config.layer.hidden_size)
        raise ValueError(f"embed_tokens.weight is missing, want it with shape {wanted}: the target's is {target.config.hidden_size} wide")
    # A head without one of its own, and a vocabulary like the target's, guesses with the target's.
    own_head = own_head or not same or d2t is not None

    def make(around: Llama, device: Device) -> Eagle3:
        embedding = None if own_embedding else around.embedding
        return Eagle3(config, d2t=d2t, embedding=embedding, head=None if own_head else around.unembedding, device=device)

    wanted_tensors = dict(eagle3_places(config, own_embedding, own_head))
    return HeadCheckpoint(path, "EAGLE-3 head", make, target, source, wanted_tensors, config.feature_layers).checked()


def _open_mtp(path: Path, found: Source, told: Mapping[str, object], target: Checkpoint) -> HeadCheckpoint:
    """`told` is the config of a folder of their own; empty for the target's own modules."""
    layers = mtp_layers(found) if told else range(target.config.num_layers, target.config.num_layers + target.mtp_modules)
    first, count = min(layers), len(layers)
    source = PartSource(found, {name: name for name in found.tensors if told or name in target.mtp_tensors})
    refuse_other_layers(source)
    config = read_mtp(told, target.config, count) if told else replace(target.config, windows=(target.config.windows[-1],) * count)

    def make(around: Llama, device: Device) -> Mtp:
        return Mtp(config, embedding=around.embedding, head=around.unembedding, device=device)

    most = 8 if count == 1 else count
    repeated = {name: its for name, its in mtp_shared(config, first, target.config.tied).items() if name in source.tensors}
    return HeadCheckpoint(path, "MTP", make, target, source, dict(mtp_places(config, first)), (), most, repeated=repeated).checked()


def _open_model(path: Path, target: Checkpoint, dtype: torch.dtype | None) -> ModelCheckpoint:
    try:
        opened = open_checkpoint(path, dtype)
        return ModelCheckpoint(opened, translate(opened.vocabulary, target.vocabulary))
    except ValueError as error:
        raise _said_of(path, error) from None


def _said_of(path: Path, error: ValueError) -> ValueError:
    """There is a target as well: which of the two is meant."""
    return error if str(path) in str(error) else ValueError(f"{path}: {error}")
