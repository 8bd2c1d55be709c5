"""What the schema of an operation says of its arguments: their names, which of them it writes, which tensors are among them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def tensors_in(value: object) -> list[Tensor]:
    """Every tensor in the (nested) arguments or results of an operation."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    found = list[Tensor]()
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple, dict)):
            found += tensors_in(item)
    return found


@dataclass(frozen=True)
class Signature:
    """What a schema says, read once: torch makes it anew at every look."""

    defaults: dict[str, Any]  # of every argument, in order; None where it has none
    positional: tuple[str, ...]  # all but the keyword-only ones
    outs: tuple[str, ...]
    writes: tuple[str, ...]  # outs among them
    returns: int
    mutable: bool
    view: bool
    seeded: bool


@functools.cache
def signature(func: OpOverload) -> Signature:
    schema = func._schema
    return Signature(
        {a.name: a.default_value if a.has_default_value() else None for a in schema.arguments},
        tuple(a.name for a in schema.arguments if not a.kwarg_only),
        tuple(a.name for a in schema.arguments if a.is_out),
        tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        len(schema.returns),
        schema.is_mutable,
        not schema.is_mutable and any(r.alias_info is not None for r in schema.returns),
        torch.Tag.nondeterministic_seeded in func.tags,
    )


def bound(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their schema names, with defaults filled in."""
    values = dict(signature(func).defaults)
    values.update(zip(values, args, strict=False))
    values.update(kwargs)
    return values


def written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the operation writes, by its schema."""
    writes = signature(func).writes
    if not writes:
        return []
    values = bound(func, args, kwargs)
    return [tensor for name in writes for tensor in tensors_in(values[name])]
