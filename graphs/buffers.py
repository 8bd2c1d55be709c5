"""Static memory: every tensor that a graph uses is declared in a spec table, allocated here, and never rebound.

A name that ends in `_host` is pinned host memory, any other name is device memory. Graphs hold raw addresses, so nothing here may
be reallocated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffer_spec import BufferSpec, NamedTensors, check_fit, checked_specs, named_tensors
from stepgraph.sampling.fields import clip_repr, error_summary
from stepgraph.sampling.lifetimes import BoundToProcess

Residence = Literal["device", "pinned", "constant"]


class StaticBuffers(BoundToProcess):
    """The tensors of a spec table as attributes, and the constants (weights) that a step may read.

    buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32)], constants={"model": module})
    buffers.x        # the tensor: the same object, at the same address, for the life of the buffers
    """

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        device: str | torch.device = "cpu",
        constants: Mapping[str, Tensor | nn.Module] | None = None,
    ) -> None:
        self._specs, self._constants = checked_specs(specs, StaticBuffers), dict(named_tensors(constants))
        try:
            self._device = torch.empty(0, device=device).device if device is not None else torch.device(device)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ValueError(f"StaticBuffers.device: got {clip_repr(device)} ({error_summary(error)}), expected a torch device") from None
        check_fit("StaticBuffers.specs", self.specs, self._device)
        self._memory = [tensor.detach() for tensor in self._constants.values()]  # recordings read it also if a parameter gets other memory
        self._tensors = NamedTensors((name, spec.allocate(self._device)) for name, spec in self._specs.items())
        self._residence: dict[int, tuple[str, Residence]] = {storage_key(t): (name, "constant") for name, t in self._constants.items()}
        for name, tensor in self._tensors.items():
            self._residence[storage_key(tensor)] = (name, self._specs[name].memory)

    def __repr__(self) -> str:
        return f"<StaticBuffers: {len(self._tensors)} tensors, {self.nbytes:,} bytes on {self._device}; {len(self._constants)} constants>"

    def __setattr__(self, name: str, value: object) -> None:
        tensor = self.__dict__.get("_tensors", {}).get(name)
        if tensor is not None and value is not tensor:  # `buffers.x += 1` assigns the same object
            raise AttributeError(f"buffers.{name} is static and cannot be rebound; write into it: buffers.{name}.copy_(...)")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("_tensors")
        if tensors is None:  # before __init__, for example in a copy
            raise AttributeError(name)
        return tensors[name]  # type: ignore[no-any-return]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        return tuple(self._specs.values())

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self._specs.values())

    def owner_of(self, tensor: Tensor) -> tuple[str, Residence] | None:
        """Name and residence of the registered memory that `tensor` is a view of; None if it is not registered."""
        return self._residence.get(storage_key(tensor)) if tensor.layout is torch.strided else None

    def reset(self) -> None:
        """Fill every tensor in place with its declared value."""
        for name, spec in self._specs.items():
            self._tensors[name].fill_(spec.fill)

    def fingerprint(self) -> str:
        """Digest of every name, address, shape and stride; unchanged if nothing was rebound."""
        digest = hashlib.sha256()
        for name, tensor in sorted({**self._constants, **self._tensors}.items()):
            digest.update(repr((name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)).encode())
        return digest.hexdigest()[:16]


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of a tensor and its views; unique while the storage is alive."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # int() would triple the time, and recordings call it often
