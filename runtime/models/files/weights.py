"""Tensors from files, and the parameter that each fills. Names, shapes and types are checked before any weight is read.

safetensors and GGUF are data formats: nothing here unpickles or executes file contents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from stepgraph.graphs.layers.quantised import KINDS, TILE, Grouped, QuantKind, common_kind, empty_packed, pack
from stepgraph.runtime.models.llama_config import ExpertsConfig, LlamaConfig
from stepgraph.sampling.fields import clip_error
from stepgraph.sampling.grammar.tokenizers.readers import read_json as read_json

FLOATS = ("F32", "BF16", "F16")
M = TypeVar("M", bound=nn.Module)


class StoredTensor(NamedTuple):
    """A tensor as the file's header describes it."""

    shape: tuple[int, ...]
    kind: str  # name of its type in the file format
    readable: bool


class Source(Protocol):
    """Tensors by their names in a Hugging Face folder."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""

    def read_grouped(self, name: str) -> Iterator[Grouped]:
        """A tensor of one of KINDS, in parts of consecutive rows, each of whole tiles, so that reading takes little further memory."""


class ParameterSlice(NamedTuple):
    """The part of a parameter that a stored tensor fills. Several stored tensors may share one parameter (q, k and v)."""

    parameter: str
    rows: slice = slice(None)
    # For a tensor stored with other dimensions: those of the parameter, their order in the file, and the shape in the file.
    unfolded: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    def of(self, model: nn.Module) -> Tensor:
        found = model.get_parameter(self.parameter)[self.rows]
        return found.view(self.unfolded).permute(self.order) if self.order else found

    def stored_shape(self, model: nn.Module) -> tuple[int, ...]:
        return self.shape or tuple(self.of(model).shape)

    @property
    def tiles(self) -> slice:
        """The rows in tiles, for a packed parameter."""
        start, stop = self.rows.start, self.rows.stop
        return slice(start and start // TILE, stop and stop // TILE)


Slices = dict[str, ParameterSlice]  # by name of the stored tensor


class SafetensorsSource:
    """The tensors of one file, or of the files that an index lists. renamed: maps a stored name to the name in `tensors`."""

    def __init__(self, folder: Path, single: str = "model.safetensors", renamed: Callable[[str], str] = str) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._stored: dict[str, tuple[Any, str]] = {}  # the opened file of each tensor, and its name in the file
        index = folder / f"{single}.index.json"
        files = read_json(index).get("weight_map") if index.exists() else {}
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError(f"{index}: weight_map: got {files!r:.100}, expected an object with a file name for each tensor name")
        if (folder / single).exists() and single not in files.values():  # an index beside it is of an earlier save in several files
            files = dict.fromkeys(_open(folder, single, index).keys(), single)
        elif not index.exists():
            raise ValueError(f"{folder}: got neither {single} nor {index.name}; other formats, such as pickled ones, are not read")
        opened = {file: _open(folder, file, index) for file in dict.fromkeys(files.values())}
        for stored, file in files.items():
            try:
                header = opened[file].get_slice(stored)
            except SafetensorError as error:
                raise ValueError(f"{folder / file}: {stored}: {error}") from None
            name, kind = renamed(stored), header.get_dtype()
            if name in self.tensors:
                raise ValueError(f"{name}: got it twice, as {self._stored[name][1]} and as {stored}")
            self.tensors[name] = StoredTensor(tuple(header.get_shape()), kind, kind in FLOATS)
            self._stored[name] = opened[file], stored

    def read(self, name: str, dim: int = 0, part: slice | None = None) -> Tensor:
        """part: indices of dimension `dim`; the file's other bytes are not read."""
        file, stored = self._stored[name]
        tensor: Tensor = file.get_tensor(stored) if part is None else file.get_slice(stored)[(slice(None),) * dim + (part,)]
        return tensor

    def read_grouped(self, name: str, dim: int = 0, part: slice | None = None) -> Iterator[Grouped]:
        raise AssertionError(f"{name}: no safetensors type is among KINDS")


def _open(folder: Path, file: str, index: Path) -> Any:
    if Path(file).name != file or not file.endswith(".safetensors"):
        raise ValueError(f"{index}: got the file name {file!r}, expected the name of a .safetensors file in this folder")
    if (folder / file).exists() and not (folder / file).is_file():
        raise ValueError(f"{folder / file}: expected a regular file")
    try:
        return safe_open(folder / file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / file}: {clip_error(error)}") from None


def llama_slices(config: LlamaConfig) -> Slices:
    """Every tensor that a model needs, by its name in a Hugging Face folder."""
    found = whole_slices({"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm"})
    for index in range(config.num_layers):
        found |= layer_slices(config, f"model.layers.{index}.", f"layers.{index}.", config.experts_of(index))
    return found if config.tied else found | whole_slices({"lm_head.weight": "head"})


def layer_slices(config: LlamaConfig, stored: str, module: str, experts: ExpertsConfig | None = None) -> Slices:
    """The tensors of one layer. stored: prefix of their names in the file. module: prefix of the parameters."""
    whole = {
        "input_layernorm.weight": "attention_norm",
        "post_attention_layernorm.weight": "attention_output_norm" if config.output_norms else "mlp_norm",
    }
    if config.output_norms:
        whole |= {"pre_feedforward_layernorm.weight": "mlp_norm", "post_feedforward_layernorm.weight": "mlp_output_norm"}
    whole |= {"self_attn.o_proj.bias": "output_bias"} if config.output_bias else {}
    whole |= {"self_attn.sinks": "sinks"} if config.sinks else {}
    whole |= {"self_attn.q_norm.weight": "query_norm", "self_attn.k_norm.weight": "key_norm"} if config.head_norms else {}
    if config.latent is not None:
        whole["self_attn.kv_a_layernorm.weight"] = "latent.entry_norm"
        whole |= {"self_attn.q_a_layernorm.weight": "latent.query_norm"} if config.latent.query_rank else {}
    found: Slices = {}
    for parameter, (_, parts) in config.products(experts).items():
        found |= row_slices({f"{stored}{part}.weight": size for part, size in parts.items()}, module + parameter)
    if config.qkv_bias:
        found |= row_slices({f"{stored}self_attn.{part}.bias": size for part, size in config.qkv_parts.items()}, f"{module}qkv_bias")
    found |= _expert_slices(experts, config.hidden_size, stored, f"{module}experts.") if experts else {}
    return found | whole_slices(whole, stored, module)


def _expert_slices(experts: ExpertsConfig, hidden_size: int, stored: str, module: str) -> Slices:
    if experts.stored_names is None:
        return _gpt_oss_slices(experts, hidden_size, f"{stored}mlp.", module)
    mlp, *gate_up, down = experts.stored_names
    whole = {"gate.weight": "router"} | ({"gate.e_score_correction_bias": "correction"} if experts.routing else {})
    prefixes = [f"{stored}{mlp}.experts.{index}." for index in range(experts.num_experts)]
    first = {f"{prefix}{name}.weight": experts.expert_size for prefix in prefixes for name in gate_up}
    last = {f"{prefix}{down}.weight": hidden_size for prefix in prefixes}
    return whole_slices(whole, f"{stored}{mlp}.", module) | row_slices(first, f"{module}gate_up") | row_slices(last, f"{module}down")


def _gpt_oss_slices(experts: ExpertsConfig, hidden_size: int, stored: str, module: str) -> Slices:
    """The outputs are the last dimension of stored weights; those of gate and up alternate."""
    count, size = experts.num_experts, experts.expert_size
    found = whole_slices({"router.weight": "router", "router.bias": "router_bias"}, stored, module)
    kinds = {
        "gate_up_proj": ("gate_up", (count, 2, size, hidden_size), (0, 3, 2, 1), (count, hidden_size, 2 * size)),
        "gate_up_proj_bias": ("gate_up_bias", (count, 2, size), (0, 2, 1), (count, 2 * size)),
        "down_proj": ("down", (count, hidden_size, size), (0, 2, 1), (count, size, hidden_size)),
        "down_proj_bias": ("down_bias", (count, hidden_size), (0, 1), (count, hidden_size)),
    }
    return found | {f"{stored}experts.{name}": ParameterSlice(module + to, slice(None), *places) for name, (to, *places) in kinds.items()}


def whole_slices(parameters: Mapping[str, str], stored: str = "", module: str = "") -> Slices:
    """parameters: from stored name to parameter name, without the prefixes `stored` and `module`."""
    return {stored + name: ParameterSlice(module + parameter) for name, parameter in parameters.items()}


def row_slices(rows: Mapping[str, int], parameter: str) -> Slices:
    """rows: numbers of rows of stored tensors that are consecutive in a parameter."""
    ends = itertools.accumulate(rows.values())
    return {name: ParameterSlice(parameter, slice(end - count, end)) for (name, count), end in zip(rows.items(), ends, strict=True)}


def check_stored(path: Path, source: Source, name: str, shape: tuple[int, ...]) -> None:
    """ValueError for a tensor that is missing, or has another shape or an unknown type."""
    found = source.tensors.get(name)
    if found is None:
        raise ValueError(f"{path}: {name} is missing, expected it with shape {shape}")
    if found.shape != shape:
        raise ValueError(f"{path}: {name}: got shape {found.shape}, expected {shape} by the config")
    if not found.readable:
        raise ValueError(f"{path}: {name}: got type {found.kind}, which is not supported")


def read_finite(path: Path, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    check_stored(path, source, name, shape)
    try:
        return require_finite(path, name, source.read(name))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {name}: {error}") from None


def require_finite(path: Path, name: str, tensor: Tensor) -> Tensor:
    ends = torch.stack(tensor.aminmax())  # both are NaN if an element is; one pass over the tensor
    if not bool(torch.isfinite(ends).all()):
        raise ValueError(f"{path}: {name} holds NaN or infinity")
    return tensor


@dataclass(frozen=True)
class StoredModel:
    """The tensors of a model in files, and the parameters that they fill."""

    path: Path
    source: Source
    slices: Slices
    packed: Mapping[str, QuantKind] = field(default_factory=dict, kw_only=True)  # parameters that stay quantised

    def check_header(self, outline: nn.Module, unused: Iterable[str] = ()) -> None:
        """Check names, shapes and types. Raises ValueError for a tensor that is missing, does not fit, or is neither needed nor
        listed in `unused`."""
        for name, target in self.slices.items():
            check_stored(self.path, self.source, name, target.stored_shape(outline))
        used = {*self.slices, *unused}
        extra = [name for name in self.source.tensors if name not in used and not name.endswith("rotary_emb.inv_freq")]
        biases = {f"{name.removesuffix('weight')}bias" for name in self.slices}  # AutoGPTQ stores zeros as the bias of every weight
        if extra := [name for name in extra if name not in biases or bool(self.source.read(name).any())]:
            raise ValueError(f"{self.path}: got {len(extra)} tensors that the config does not account for, such as {extra[0]}")

    def packable(self) -> dict[str, QuantKind]:
        """The parameters whose tensors have a common kind of KINDS, in whole tiles and groups."""
        parts: dict[str, list[StoredTensor]] = {}
        whole: dict[str, bool] = {}
        for name, target in self.slices.items():
            stored, start = self.source.tensors[name], target.rows.start or 0
            parts.setdefault(target.parameter, []).append(stored)
            fits = len(stored.shape) == 2 and not stored.shape[0] % TILE and not start % TILE
            whole[target.parameter] = whole.get(target.parameter, True) and fits
        common = {name: common_kind({KINDS.get(part.kind) for part in stored}) for name, stored in parts.items() if whole[name]}
        return {name: kind for name, kind in common.items() if kind is not None and not parts[name][0].shape[1] % kind.block_size}

    def allocate_packed(self, model: M) -> M:
        """Replace the parameters that stay quantised by packed ones. Returns the model."""
        for name, kind in self.packed.items():
            module, _, parameter = name.rpartition(".")
            packed_weight = empty_packed(kind, model.get_parameter(name))
            setattr(model.get_submodule(module), parameter, nn.Parameter(packed_weight, requires_grad=False))
        return model

    @torch.no_grad()
    def fill(self, model: nn.Module, progress: bool) -> None:
        """ValueError for a tensor that cannot be read, or holds NaN or infinity."""
        slices = self.slices.items()
        for name, target in tqdm(slices, desc="load", unit="tensor") if progress else slices:
            try:
                if kind := self.packed.get(target.parameter):
                    self._fill_packed(name, kind, model.get_parameter(target.parameter)[target.tiles])
                else:
                    part = target.of(model)
                    part.copy_(self.source.read(name).view(part.shape))
                    # float16 has no numbers above 65,504
                    require_finite(self.path, f"{name} in float16" if part.dtype is torch.float16 else name, part)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path}: {name}: {error}") from None
        model.eval()

    def _fill_packed(self, name: str, kind: QuantKind, weight: Tensor) -> None:
        start = 0
        for rows in self.source.read_grouped(name):
            for values in (rows.scales, rows.minimums, rows.numbers.view(torch.float8_e4m3fn).float() if kind.float8 else None):
                if values is not None:  # other numbers than those of float8 are integers
                    require_finite(self.path, name, values)
            packed = pack(kind, rows)
            weight[start : start + len(packed)].view(torch.int64).copy_(packed.view(torch.int64))  # few elements, so no threads
            start += len(packed)
