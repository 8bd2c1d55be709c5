"""New weights for a loaded target: all are checked, then copied in place, because recorded graphs keep addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.config_fields import DTYPES
from stepgraph.runtime.models.files.weights import SafetensorsSource, StoredTensor, check_stored, llama_slices, require_finite, whole_slices
from stepgraph.runtime.models.llama import Llama
from stepgraph.sampling.fields import checked_path, clip_repr

_FLOATS = {*map(str, DTYPES.values())}


@torch.no_grad()
def checked_update(target: object, weights: Any, buffers: StaticBuffers) -> Callable[[], None]:
    """Check all tensors, and return the function that copies them. ValueError names the first that does not fit.

    weights: tensors by their names in a folder of the model, or by those of its parameters if it is a module of the user; or the path of
    all of them.
    """
    if not isinstance(target, nn.Module):
        raise ValueError(f"Engine.target: got a {type(target).__name__}, expected an nn.Module, whose parameters can be updated")
    slices = getattr(target, "stored_slices", None) or whole_slices({name: name for name, _ in target.named_parameters()})
    if isinstance(target, Llama):
        slices = llama_slices(target.config) | (whole_slices({"lm_head.weight": "embedding"}) if target.config.tied else {})
    is_path = isinstance(weights, (str, Path))
    path = checked_path("weights", weights) if is_path else Path("weights")
    source = _stored(path, target) if is_path else _given(weights)
    unknown = [name for name in source.tensors if name not in slices and not str(name).endswith("rotary_emb.inv_freq")]
    if unknown and not (is_path and isinstance(target, Llama)):  # whose names were checked
        raise ValueError(f"{path}: got {len(unknown)} tensors that the model does not have, such as {clip_repr(unknown[0])}")
    parts = dict[tuple[Tensor, int], str]()  # the given parts of parameters
    for name in filter(source.tensors.__contains__, slices):
        part = slices[name]
        parameter = target.get_parameter(part.parameter)
        if str(parameter.dtype) not in _FLOATS:
            raise ValueError(f"{path}: {name}: got new values for quantised weights, expected an engine with weights='dequantised'")
        if buffers.owner_of(parameter) is None:
            expected = "expected that of the graphs: copy new values into it"
            raise ValueError(f"{path}: {name}: the parameter got other memory since the engine was made, {expected}")
        check_stored(path, source, name, part.stored_shape(target))
        require_finite(path, name, (values := source.read(name)).to(parameter.dtype))
        if (first := parts.setdefault((parameter, part.rows.start or 0), name)) != name and not torch.equal(source.read(first), values):
            raise ValueError(f"{path}: {name} differs from {first}, expected equal values: the model has one parameter for both")
    places = ((name, (target.get_parameter(part.parameter), part.rows.start or 0)) for name, part in slices.items() if is_path)
    if missing := [name for name, place in places if place not in parts]:
        raise ValueError(f"{path}: {missing[0]} is missing")

    @torch.no_grad()
    def copy() -> None:
        for name in parts.values():
            own = slices[name].of(target)
            own.copy_(source.read(name).reshape(own.shape))

    return copy


def _given(weights: Any) -> Any:
    """Tensors of the caller as a Source."""
    weights = list(weights) if isinstance(weights, Iterator) else weights  # outside of `try`: its errors are the caller's
    try:
        named: dict[str, Any] = dict(weights)
    except (TypeError, ValueError):
        expected = "a mapping of names to tensors, pairs of these, or a path"
        raise ValueError(f"weights: got {clip_repr(weights)}, expected {expected}") from None
    if len(named) < len(weights):
        names = [name for name, _ in weights]
        raise ValueError(f"weights: got {clip_repr(next(n for n in names if names.count(n) > 1))} twice, expected each name once")
    tensors = dict[str, StoredTensor]()
    for name, value in named.items():
        has_values = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta
        kind = str(value.dtype) if has_values else f"{type(value).__name__} on {getattr(value, 'device', None)}"
        tensors[name] = StoredTensor(tuple(getattr(value, "shape", ())), kind, kind in _FLOATS)
    return SimpleNamespace(tensors=tensors, read=lambda name: named[name].detach())


def _stored(path: Path, target: nn.Module) -> Any:
    """The tensors of a path, whose config must be that of a native target."""
    if not isinstance(target, Llama):
        return SafetensorsSource(path)
    checkpoint, own = open_checkpoint(path, target.config.dtype), target.config
    config = replace(checkpoint.config, tied=own.tied)
    if other := [field.name for field in fields(own) if getattr(config, field.name) != getattr(own, field.name)]:
        raise ValueError(f"{path}: config: {', '.join(other)}: got other values, expected the loaded model's")
    return checkpoint.source
