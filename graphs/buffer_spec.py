"""Declarations of static tensors, and the tensors that a step may read besides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stepgraph.graphs.memory import check_memory
from stepgraph.sampling.fields import check_value, clip_repr, instance_of, is_int, is_list_like, one_of


@dataclass(frozen=True)
class BufferSpec:
    """Declaration of one static tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: Literal["device", "pinned"] = "device"
    fill: float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name.startswith("_"):
            raise ValueError(f"BufferSpec.name: got {clip_repr(self.name)}, expected a public Python identifier")
        check_value(f"BufferSpec.memory of {self.name!r}", self.memory, one_of(("device", "pinned")))
        if self.name.endswith("_host") != (self.memory == "pinned"):
            raise ValueError(
                f"BufferSpec.name: got {self.name!r} in {self.memory} memory, expected the suffix _host for pinned memory only"
            )
        if not isinstance(self.shape, tuple) or not all(is_int(size) and size >= 0 for size in self.shape):
            raise ValueError(f"BufferSpec.shape of {self.name!r}: got {clip_repr(self.shape)}, expected a tuple of integers >= 0")
        check_value(f"BufferSpec.dtype of {self.name!r}", self.dtype, instance_of(torch.dtype, "a torch.dtype"))
        try:
            held = torch.full((), self.fill, dtype=self.dtype, device="cpu")
            exact = self.dtype.is_floating_point or self.dtype.is_complex or held.item() == self.fill
        except (TypeError, ValueError, OverflowError, RuntimeError):
            exact = False
        if not exact:
            raise ValueError(f"BufferSpec.fill of {self.name!r}: got {clip_repr(self.fill)}, expected a number of {self.dtype}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        pinned = self.memory == "pinned"
        place, pin = torch.device("cpu") if pinned else device, pinned and device.type == "cuda"
        with torch.inference_mode(False):  # buffers are also written outside of a mode of the caller
            return torch.full(self.shape, self.fill, dtype=self.dtype, device=place, pin_memory=pin)


class UnknownBufferError(ValueError, AttributeError, KeyError):
    """A buffer of this name is not declared. An AttributeError for hasattr(), a KeyError for mappings."""

    __str__ = ValueError.__str__  # KeyError.__str__ adds quotes


class NamedTensors(dict[str, Tensor]):
    """Tensors by name; the error for an unknown name lists the declared ones."""

    def __missing__(self, name: object) -> Tensor:
        raise UnknownBufferError(f"StaticBuffers: got {clip_repr(name)}, expected one of: {', '.join(self) or 'none are declared'}")


def checked_specs(specs: Iterable[BufferSpec], owner: type) -> dict[str, BufferSpec]:
    """The specs by name; the tensors become attributes of an object of type `owner`."""
    named = dict[str, BufferSpec]()
    for spec in specs if is_list_like(specs) else (specs,):
        if not isinstance(spec, BufferSpec):
            raise ValueError(f"StaticBuffers.specs: got {clip_repr(spec)}, expected BufferSpecs")
        if hasattr(owner, spec.name):
            raise ValueError(f"StaticBuffers.specs: got {spec.name!r}, a method of StaticBuffers, expected another name")
        if spec.name in named:
            raise ValueError(f"StaticBuffers.specs: {spec.name!r} is declared twice, expected unique names")
        named[spec.name] = spec
    return named


def check_fit(name: str, specs: Iterable[BufferSpec], device: torch.device, remedy: str = "") -> None:
    """ValueError if the tensors need more memory than there is."""
    host, needed = torch.device("cpu"), Counter[torch.device]()
    for spec in specs:
        needed[host if spec.memory == "pinned" else device] += spec.nbytes
    for place, nbytes in needed.items():
        check_memory(name, nbytes, place, remedy)


def named_tensors(constants: Mapping[str, Tensor | nn.Module] | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a step may read besides the static ones: those given, and those of modules."""
    if not isinstance(constants, (Mapping, type(None))):
        raise ValueError(f"StaticBuffers.constants: got {clip_repr(constants)}, expected a mapping of names to tensors or modules")
    for name, source in (constants or {}).items():
        if isinstance(source, Tensor):
            check_constant(f"StaticBuffers.constants[{clip_repr(name)}]", source)
            yield name, source
        elif not isinstance(source, nn.Module):
            raise ValueError(f"StaticBuffers.constants[{clip_repr(name)}]: got {clip_repr(source)}, expected a tensor or a module")
        else:
            for inner, tensor in [*source.named_parameters(), *source.named_buffers()]:
                check_constant(f"StaticBuffers.constants[{clip_repr(name)}].{inner}", tensor)
                yield f"{name}.{inner}", tensor


def check_constant(name: str, tensor: Tensor) -> None:
    """ValueError for a tensor without an address that a graph can keep."""
    got = f"a tensor of layout {tensor.layout}" if tensor.layout is not torch.strided else ""
    got = "an uninitialised tensor of a lazy module" if is_lazy(tensor) else got
    if got:
        expected = "expected one of layout torch.strided with values; keep others in a torch.library.custom_op"
        raise ValueError(f"{name}: got {got}, {expected}")
