"""Calls in C for operations of torch on few integers, and for copies of rows: those that rounds have many of. Torch takes longer to start
one than to compute it.

Every call that makes a new tensor is compared with torch's result when it is recorded (`replay_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgraph.graphs.buffers import storage_key
from stepgraph.sampling.kernels.c_kernel import NONE, PackedCall, join_calls, pack_argument
from stepgraph.sampling.native import kernel

Run = Callable[[], object]
MAX_ELEMENTS = 1 << 14
_DIMENSIONS = 4
_INTEGERS = (torch.bool, torch.int32, torch.int64)
_KINDS = "copy add sub mul eq ne lt le gt ge bitwise_and bitwise_or clamp_min clamp_max where gather".split()  # as in small.c
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_ARITHMETIC = {"add", "sub", "mul", "bitwise_and", "bitwise_or"}
_COPIES = {"copy_", "clone", "_to_copy"}
_CONSTANTS = {"arange", "scalar_tensor", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like"}


def small_operation(name: str, values: Mapping[str, Any], target: Tensor) -> Run | None:
    """A call that writes the result of an operation into `target`, of a mutating one its first argument; None if not supported.

    values: the arguments by the names of the schema.
    """
    name = name.removeprefix("aten::")
    fits = 0 < target.numel() <= MAX_ELEMENTS and target.dim() <= _DIMENSIONS and not target.is_neg()
    if target.device.type != "cpu" or not fits or kernel("small_operation") is None:
        return None
    if name in _CONSTANTS:
        return _small_call("copy", target, target.clone()) if target.dtype in _INTEGERS else None
    if name in _COPIES:
        source = values["src"] if name == "copy_" else values["self"]
        if not isinstance(source, Tensor):  # a number, within vmap
            return None
        same = source.dtype is target.dtype or (source.dtype in _INTEGERS and target.dtype in _INTEGERS[1:])
        overlaps = name == "copy_" and storage_key(source) == storage_key(target)  # torch copies element by element
        return _small_call("copy", target, source) if same and not overlaps and _is_plain(source) else None
    if name == "cat":
        return _concatenation(target, values["tensors"], values["dim"])
    if name in ("index", "embedding", "gather"):
        return _indexing(name, values, target)
    return _arithmetic(name, values, target)


def _arithmetic(name: str, values: Mapping[str, Any], target: Tensor) -> Run | None:
    first, other = values.get("self"), values.get("other")
    if name == "where":
        three = [each for each in (values.get("condition"), first, other) if isinstance(each, Tensor) and each.dtype in _INTEGERS]
        return _small_call("where", target, *three) if len(three) == 3 else None
    if target.dtype not in _INTEGERS or not isinstance(first, Tensor) or first.dtype not in _INTEGERS:
        return None
    if name in ("clamp", "clamp_"):
        least, most = values.get("min"), values.get("max")
        bound = least if most is None else most
        if not isinstance(bound, int) or bound.bit_length() > 31 or None not in (least, most):
            return None
        return _small_call("clamp_min" if most is None else "clamp_max", target, first, bound)
    integers = target.dtype is torch.bool if name in _COMPARISONS else target.dtype is not torch.bool or name.startswith("bitwise")
    if name not in _COMPARISONS | _ARITHMETIC or not integers or values.get("alpha", 1) != 1:
        return None
    if not isinstance(other, (int, Tensor)) or (other.bit_length() > 31 if isinstance(other, int) else other.dtype not in _INTEGERS):
        return None
    # The calls compute in int64. torch may compute in a narrower type: numbers and tensors without dimensions do not promote others.
    has_wide, common = torch.int64 in (target.dtype, first.dtype, getattr(other, "dtype", None)), torch.result_type(first, other)
    is_narrow = (has_wide and common is not torch.int64) or (name == "add" and common is torch.bool)
    return None if is_narrow else _small_call(name, target, first, other)


def _indexing(name: str, values: Mapping[str, Any], target: Tensor) -> Run | None:
    """Rows of tables, and elements, by indices in int64."""
    if name == "gather":
        table, dim, index = values["self"], values["dim"] % max(target.dim(), 1), values["index"]
        if not target.dim() or not table.dim() or not _is_plain(table):
            return None
        cut = table[tuple(slice(1 if each == dim else size) for each, size in enumerate(target.shape))]
        return _small_call("gather", target, cut, index, indexed=table.movedim(dim, 0))
    table, index = (values["weight"], values["indices"]) if name == "embedding" else (values["self"], values["indices"][0])
    rest = table.dim() - 1
    one = name == "embedding" or len(values["indices"]) == 1
    if not one or index is None or index.dtype is not torch.int64 or not _is_plain(table) or target.dim() != index.dim() + rest:
        return None
    row = table[:1].view([*[1] * index.dim(), *table.shape[1:]]) if table[:1].is_contiguous() else None
    if row is None:
        return None
    return _small_call("gather", target, row, index.view([*index.shape, *[1] * rest]), indexed=table, wraparound=name == "index")


def _concatenation(target: Tensor, tensors: Sequence[Tensor], dim: int) -> Run | None:
    overlaps = any(storage_key(each) == storage_key(target) for each in tensors)  # torch copies row by row
    if overlaps or not all(each.dtype is target.dtype and each.dim() == target.dim() and _is_plain(each) for each in tensors):
        return None
    calls, start = list[PackedCall](), 0
    for each in tensors:
        if each.numel():
            calls.append(_small_call("copy", target.narrow(dim, start, each.shape[dim]), each))
        start += each.shape[dim]
    return join_calls(calls) if calls else None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.element_size() <= 8 and not tensor.is_complex() and not tensor.is_neg() and tensor.dim() <= _DIMENSIONS


def _small_call(kind: str, target: Tensor, *operands: Tensor | int, indexed: Tensor | None = None, wraparound: bool = False) -> PackedCall:
    """indexed: a tensor whose first dimension is the one that is indexed."""
    arguments: list[Tensor | int] = [_KINDS.index(kind), _in_four_dims(target, target)]
    arguments += [_in_four_dims(each, target) if isinstance(each, Tensor) else int(each) for each in operands]
    packed = b"".join([pack_argument(each) for each in arguments] + [NONE] * (_DIMENSIONS - 1 - len(operands)))
    places = (0, 0) if indexed is None else (indexed.stride(0), indexed.shape[0])
    function = kernel("small_operation")
    assert function is not None
    return PackedCall.of(function, packed + b"".join(map(pack_argument, (*places, int(wraparound)))), (target, *operands))


def _in_four_dims(tensor: Tensor, target: Tensor) -> Tensor:
    expanded = tensor.expand(target.shape)
    return expanded[(None,) * (_DIMENSIONS - expanded.dim())]
