"""Static memory: every tensor that a graph uses is declared in a spec table, allocated here, and never rebound.

A name that ends in `_host` is pinned host memory, any other name is device memory. Graphs hold raw addresses, so nothing here may
be reallocated.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stepgraph.graphs.memory import check_memory
from stepgraph.sampling.fields import clip_repr, is_int

Residence = Literal["device", "pinned", "constant"]


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
        if self.memory not in ("device", "pinned"):
            raise ValueError(f"BufferSpec.memory of {self.name!r}: got {clip_repr(self.memory)}, expected 'device' or 'pinned'")
        if self.name.endswith("_host") != (self.memory == "pinned"):
            raise ValueError(
                f"BufferSpec.name: got {self.name!r} in {self.memory} memory, expected the suffix _host for pinned memory only"
            )
        if not isinstance(self.shape, tuple) or not all(is_int(size) and size >= 0 for size in self.shape):
            raise ValueError(f"BufferSpec.shape of {self.name!r}: got {clip_repr(self.shape)}, expected a tuple of integers >= 0")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"BufferSpec.dtype of {self.name!r}: got {clip_repr(self.dtype)}, expected a torch.dtype")
        try:
            torch.full((), self.fill, dtype=self.dtype, device="cpu")
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise ValueError(f"BufferSpec.fill of {self.name!r}: got {clip_repr(self.fill)}, expected a number of {self.dtype}") from None
        if hasattr(StaticBuffers, self.name):
            raise ValueError(f"BufferSpec.name: got {self.name!r}, a method of StaticBuffers, expected another name")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StaticBuffers:
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
        self._specs: dict[str, BufferSpec] = {}
        for spec in specs if isinstance(specs, Iterable) else (specs,):
            if not isinstance(spec, BufferSpec):
                raise ValueError(f"StaticBuffers.specs: got {clip_repr(spec)}, expected BufferSpecs")
            if spec.name in self._specs:
                raise ValueError(f"StaticBuffers.specs: {spec.name!r} is declared twice, expected unique names")
            self._specs[spec.name] = spec
        try:
            self._device = torch.empty(0, device=device).device if device is not None else torch.device(device)
        except (TypeError, ValueError, RuntimeError, AssertionError):
            raise ValueError(f"StaticBuffers.device: got {clip_repr(device)}, expected the name of a torch device") from None
        self._constants = dict(_named_tensors(constants))
        check_fit("StaticBuffers.specs", self.specs, self._device)
        on_cuda = self._device.type == "cuda"
        self._tensors = {
            name: torch.full(
                spec.shape,
                spec.fill,
                dtype=spec.dtype,
                device="cpu" if spec.memory == "pinned" else self._device,
                pin_memory=spec.memory == "pinned" and on_cuda,
            )
            for name, spec in self._specs.items()
        }
        self._residence: dict[int, tuple[str, Residence]] = {}
        for name, tensor in self._constants.items():
            self._residence[storage_key(tensor)] = (name, "constant")
        for name, tensor in self._tensors.items():
            self._residence[storage_key(tensor)] = (name, self._specs[name].memory)

    def __setattr__(self, name: str, value: object) -> None:
        tensor = self.__dict__.get("_tensors", {}).get(name)
        if tensor is not None and value is not tensor:  # `buffers.x += 1` assigns the same object
            raise AttributeError(f"buffers.{name} is static and cannot be rebound; write into it: buffers.{name}.copy_(...)")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_tensors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"StaticBuffers has no tensor {name!r}") from None

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
        return self._residence.get(storage_key(tensor))

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
    return int(tensor.untyped_storage()._cdata)


def check_fit(name: str, specs: Iterable[BufferSpec], device: torch.device, remedy: str = "") -> None:
    """ValueError if the tensors need more memory than there is."""
    host, needed = torch.device("cpu"), Counter[torch.device]()
    for spec in specs:
        needed[host if spec.memory == "pinned" else device] += spec.nbytes
    for place, nbytes in needed.items():
        check_memory(name, nbytes, place, remedy)


def _named_tensors(constants: Mapping[str, Tensor | nn.Module] | None) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(constants, (Mapping, type(None))):
        raise ValueError(f"StaticBuffers.constants: got {clip_repr(constants)}, expected a mapping of names to tensors or modules")
    for name, source in (constants or {}).items():
        if isinstance(source, Tensor):
            yield name, source
        elif not isinstance(source, nn.Module):
            raise ValueError(f"StaticBuffers.constants[{clip_repr(name)}]: got {clip_repr(source)}, expected a tensor or a module")
        else:
            for inner, tensor in [*source.named_parameters(), *source.named_buffers()]:
                yield f"{name}.{inner}", tensor


class Column(IntEnum):
    """Columns of `row_state`. The first ones are copied to the host nodes: status.HostColumn."""

    OWNER = 0  # serial of the request that owns the row
    GENERATED = 1  # tokens emitted so far
    LAST_TOKEN = 2  # last token of the history, the only one without a cache entry
    ACCEPTED = 3  # drafts accepted in the latest round
    FINISH = 4  # FinishCode
    DRAFT_COUNT = 5  # drafts for the next target_verify
    LENGTH = 6  # tokens in the history
    MAX_LENGTH = 7  # length at which the row finishes
    CONSTRAINED = 8  # 1 if the request has a constraint
    DRAFT_LIMIT = 9  # maximum drafts per round
    SEED = 10  # of the request's random number generator
    IMAGE = 11  # offset of its grammar in grammar_arena; 0: it has none on the device
    SKIPPED = 12  # last tokens of the history that the draft model has not processed: rounds without drafts added them


REFUSED = -2  # in `row_drafts`: the grammar does not allow the proposed token


class ResultRecord(NamedTuple):
    """Result of one round for one row."""

    emitted: int  # how many of `tokens` the round emitted
    finish: int  # FinishCode
    accepted: int  # drafts that were accepted
    draft_count: int  # drafts that were verified
    tokens: list[int]  # [K + 1]
    statuses: list[int]  # [K + 1] MaskStatus of each position
    drafts: list[int]  # [K], -1 or REFUSED after the last one
    forced: int  # one bit per draft: forced by the grammar; written by constrained rounds only
    looked_up: int  # one bit per draft: found by the look-up and not forced
    logprobs: list[list[Any]]  # [K + 1] raw and masked, with the likeliest tokens of each where the request asks; of sampled rounds


class ResultLayout:
    """Columns of `results`, int64: the fields of a ResultRecord, for the stage that writes them and the host that reads them.

    Log-probabilities are float32 and have buffers of their own.
    """

    def __init__(self, num_drafts: int) -> None:
        sizes = {"tokens": num_drafts + 1, "statuses": num_drafts + 1, "drafts": num_drafts}
        self.columns: dict[str, slice] = {}
        self.width = 0
        for name in ResultRecord._fields[:-1]:
            self.columns[name] = slice(self.width, self.width + sizes.get(name, 1))
            self.width = self.columns[name].stop
        self._fields_of = operator.itemgetter(*(each if name in sizes else each.start for name, each in self.columns.items()))

    def write(self, lines: Tensor, **fields: Tensor) -> None:
        """Write adjacent fields, [B] or [B, columns] each, into lines [B, width] with one copy."""
        columns = [self.columns[name] for name in fields]
        assert all(a.stop == b.start for a, b in itertools.pairwise(columns)), "adjacent fields in the order of ResultRecord"
        values = [value if value.dim() == 2 else value[:, None] for value in fields.values()]
        lines[:, columns[0].start : columns[-1].stop].copy_(torch.cat(values, 1) if len(values) > 1 else values[0])

    def read(self, line: list[int], logprobs: list[list[Any]]) -> ResultRecord:
        """The record of one line."""
        return ResultRecord._make((*self._fields_of(line), logprobs))
