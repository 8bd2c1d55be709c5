"""Where weights come from, and how they get into a model: everything is checked by name before anything is read or made.

Knows files, names and shapes. Nothing here unpickles or runs what it finds: safetensors and GGUF are data.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.sampling.fields import clip_error
from stepgraph.sampling.grammar.tokenizers.tokenizer_json import read_json as read_json

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """One tensor of a file, by what the file's header says."""

    shape: tuple[int, ...]
    kind: str  # of its numbers, as the format calls it
    readable: bool


class Source(Protocol):
    """Tensors under the names of a Hugging Face folder."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What the headers say."""

    def read(self, name: str) -> Tensor:
        """On the CPU, in floating point."""


class Place(NamedTuple):
    """Where a stored tensor goes: rows of a parameter, which may be several tensors in one."""

    parameter: str
    start: int
    rows: int


class SafetensorsSource:
    """`model.safetensors`, or what its index lists."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        self._home: dict[str, str] = {}
        index = folder / _INDEX
        if index.exists():
            homes = read_json(index).get("weight_map")
            if not isinstance(homes, dict) or not all(isinstance(file, str) for file in homes.values()):
                raise ValueError(f"{index}: got no weight_map, want tensor names with the files that hold them")
        elif (folder / _SINGLE).exists():
            homes = dict.fromkeys(self._open(folder, _SINGLE).keys(), _SINGLE)
        else:
            raise ValueError(f"{folder}: got neither {_SINGLE} nor {_INDEX}; other formats, pickled ones above all, are not read")
        for name, file in homes.items():
            self._add(folder, name, file)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._home[name]].get_tensor(name)
        return tensor

    def _add(self, folder: Path, name: str, file: str) -> None:
        opened = self._open(folder, file)
        try:
            described = opened.get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{folder / file}: {name}: {error}") from None
        kind = described.get_dtype()
        self.tensors[name] = Stored(tuple(described.get_shape()), kind, kind in FLOATS)
        self._home[name] = file

    def _open(self, folder: Path, file: str) -> Any:
        if file not in self._files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{folder / _INDEX}: got the file name {file!r}, want the plain name of a .safetensors file")
            if (folder / file).exists() and not (folder / file).is_file():
                raise ValueError(f"{folder / file}: want a plain file")
            try:
                self._files[file] = safe_open(folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{folder / file}: {clip_error(error)}") from None
        return self._files[file]


class PartSource:
    """Some tensors of a source, under other names."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self.tensors = {name: source.tensors[stored] for name, stored in names.items()}
        self._source, self._names = source, names

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])


def places(model: Llama) -> Iterator[tuple[str, Place]]:
    """Every stored tensor that a model wants, by its name in a Hugging Face folder."""
    config = model.config
    yield "model.embed_tokens.weight", Place("embedding", 0, config.vocab_size)
    for index in range(config.num_layers):
        yield from layer_places(config, f"model.layers.{index}", f"layers.{index}")
    yield "model.norm.weight", Place("norm", 0, config.hidden_size)
    if not config.tied:
        yield "lm_head.weight", Place("head", 0, config.vocab_size)


def layer_places(config: LlamaConfig, there: str, here: str) -> Iterator[tuple[str, Place]]:
    """Of one layer, called `there` in the file and `here` in the model."""
    heads, kv_heads, hidden = config.num_heads * config.head_size, config.num_kv_heads * config.head_size, config.hidden_size
    start = 0
    for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{there}.self_attn.{part}_proj.weight", Place(f"{here}.qkv", start, rows)
        if config.qkv_bias:
            yield f"{there}.self_attn.{part}_proj.bias", Place(f"{here}.qkv_bias", start, rows)
        start += rows
    for place, part in enumerate(("gate", "up")):
        middle = config.intermediate_size
        yield f"{there}.mlp.{part}_proj.weight", Place(f"{here}.gate_up", place * middle, middle)
    whole = {"self_attn.o_proj.weight": "output", "mlp.down_proj.weight": "down"}
    whole |= {"input_layernorm.weight": "attention_norm", "post_attention_layernorm.weight": "mlp_norm"}
    whole |= {"self_attn.o_proj.bias": "output_bias"} if config.output_bias else {}
    for name, parameter in whole.items():
        yield f"{there}.{name}", Place(f"{here}.{parameter}", 0, hidden)
    if config.head_norms:
        for part, parameter in (("q", "query_norm"), ("k", "key_norm")):
            yield f"{there}.self_attn.{part}_norm.weight", Place(f"{here}.{parameter}", 0, config.head_size)


def check_tensors(model: nn.Module, wanted: Mapping[str, Place], source: Source, where: Path, spare: Container[str] = ()) -> None:
    """Every tensor is there, in its shape and a readable type, and none is there that would be left out, but `spare`. Reads headers."""
    found = source.tensors
    for name, place in wanted.items():
        shape = (place.rows, *model.get_parameter(place.parameter).shape[1:])
        if name not in found:
            raise ValueError(f"{where}: {name} is missing, want it with shape {shape}")
        if found[name].shape != shape:
            raise ValueError(f"{where}: {name} has shape {found[name].shape}, want {shape} by the config")
        if not found[name].readable:
            raise ValueError(f"{where}: {name} is stored as {found[name].kind}, which is not read")
    extra = [name for name in found if name not in wanted and name not in spare and not name.endswith("rotary_emb.inv_freq")]
    if extra:
        raise ValueError(f"{where}: got {len(extra)} tensors that the config has no use for, such as {extra[0]}")


def check_numbers(wanted: Mapping[str, Place], source: Source, where: Path, progress: bool) -> None:
    """Every number is finite; ValueError names the tensor. A pass of its own, so that a bad file is found before memory is taken."""
    for name, tensor, _ in _read(wanted, source, where, progress, "check"):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{where}: {name} holds NaN or infinity")


@torch.no_grad()
def load_tensors(model: nn.Module, wanted: Mapping[str, Place], source: Source, where: Path, progress: bool) -> None:
    """Fill the model."""
    for _, tensor, place in _read(wanted, source, where, progress, "load"):
        model.get_parameter(place.parameter)[place.start : place.start + place.rows].copy_(tensor)


def _read(wanted: Mapping[str, Place], source: Source, where: Path, progress: bool, what: str) -> Iterator[tuple[str, Tensor, Place]]:
    """One tensor after the other, under a progress bar."""
    for name, place in tqdm(wanted.items(), desc=what, unit="tensor", disable=not progress):
        try:
            tensor = source.read(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{where}: {name}: {error}") from None
        yield name, tensor, place
