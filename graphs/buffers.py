"""Static memory: every tensor that a graph uses is declared in a spec table, allocated here, and never rebound.

A name that ends in `_host` is pinned host memory, any other name is device memory. Graphs hold raw addresses, so nothing here may
be reallocated.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from stepgraph.graphs.shapes import Limits
from stepgraph.sampling.grammar.status import TAG_FIELDS, HostColumn
from stepgraph.sampling.sampler import Param

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
            raise ValueError(f"BufferSpec.name: got {self.name!r}, expected a public Python identifier")
        if self.memory not in ("device", "pinned"):
            raise ValueError(f"BufferSpec.memory of {self.name!r}: got {self.memory!r}, expected 'device' or 'pinned'")
        if self.name.endswith("_host") != (self.memory == "pinned"):
            raise ValueError(
                f"BufferSpec.name: got {self.name!r} in {self.memory} memory, expected the suffix _host for pinned memory only"
            )
        if not isinstance(self.shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in self.shape):
            raise ValueError(f"BufferSpec.shape of {self.name!r}: got {self.shape!r}, expected a tuple of integers >= 0")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"BufferSpec.dtype of {self.name!r}: got {self.dtype!r}, expected a torch.dtype")
        if hasattr(StaticBuffers, self.name):
            raise ValueError(f"BufferSpec.name: got {self.name!r}, a method of StaticBuffers, expected another name")

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


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
        for spec in specs:
            if spec.name in self._specs:
                raise ValueError(f"StaticBuffers.specs: {spec.name!r} is declared twice, expected unique names")
            self._specs[spec.name] = spec
        self._device = torch.device(device)
        self._constants = dict(_named_tensors(constants or {}))
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


def _named_tensors(constants: Mapping[str, Tensor | nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for name, source in constants.items():
        if isinstance(source, Tensor):
            yield name, source
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
    logprobs: list[list[float]]  # [K + 1][2] raw, masked; of sampled rounds


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

    def read(self, line: list[int], logprobs: list[list[float]]) -> ResultRecord:
        """The record of one line."""
        return ResultRecord._make((*self._fields_of(line), logprobs))

    def specs(self, limits: Limits) -> tuple[BufferSpec, ...]:
        slots, depth, positions = limits.max_rows, limits.ring_depth, limits.positions
        return (
            BufferSpec("results", (slots, self.width), torch.int64),
            BufferSpec("results_logprobs", (slots, positions, 2), torch.float32),
            BufferSpec("results_ring_host", (depth, slots, self.width), torch.int64, "pinned"),
            BufferSpec("logprobs_ring_host", (depth, slots, positions, 2), torch.float32, "pinned"),
        )


def forced_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for drafts that the grammar forces."""
    rows, slots, drafts = limits.rows, limits.max_rows, limits.num_speculative_tokens
    return (
        BufferSpec("row_forced", (rows, drafts), torch.bool),  # whether a grammar forced each draft
        BufferSpec("batch_forced", (drafts, slots), torch.int64, fill=-1),
        BufferSpec("forced_host", (drafts, slots), torch.int64, "pinned", fill=-1),
    )


def look_up_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs` and `text_specs`, for a look-up beside a draft model."""
    drafts = (limits.rows, limits.num_speculative_tokens)
    return (BufferSpec("row_looked_up", drafts, torch.bool),)  # found by the look-up and not forced


def round_specs(limits: Limits, drawn: bool = True) -> tuple[BufferSpec, ...]:
    """The static tensors of a round: R rows of state, B slots of a batch, K drafts.

    drawn: whether drafts may be drawn from a distribution, which is then stored for rejection sampling.
    """
    rows, slots, drafts, positions = limits.rows, limits.max_rows, limits.num_speculative_tokens, limits.positions
    words, depth, columns = limits.mask_words, limits.ring_depth, len(Column)
    int64, int32 = torch.int64, torch.int32
    admission = columns + len(Param) + limits.max_stop_ids + limits.pages_per_row + 2 * limits.max_bias_ids
    return (
        # rows: state of a request from admission to finish
        BufferSpec("row_state", (rows, columns), int64),
        BufferSpec("row_params", (rows, len(Param)), torch.float32),
        BufferSpec("row_stop_ids", (rows, limits.max_stop_ids), int64, fill=-1),
        BufferSpec("row_bias_ids", (rows, limits.max_bias_ids), int64, fill=-1),
        BufferSpec("row_biases", (rows, limits.max_bias_ids), torch.float32),  # minus infinity for a bad token
        BufferSpec("row_prompt_seen", (rows, limits.num_tokens), torch.bool),
        BufferSpec("row_output_counts", (rows, limits.num_tokens), int32),  # updated by sampled rounds only
        BufferSpec("row_block_tables", (rows, limits.pages_per_row), int64),
        BufferSpec("row_drafts", (rows, drafts), int64, fill=-1),  # after a chain's last draft -1, or REFUSED and -1
        # whether a draft was chosen with probability 1; if not, the distribution that it was drawn from
        BufferSpec("row_certain", (rows, drafts), torch.bool, fill=1),
        BufferSpec("row_draft_probs", (rows, drafts if drawn else 0, limits.num_tokens), torch.float32),
        BufferSpec("row_masks", (rows, positions, words), int32),
        BufferSpec("row_tags", (rows, positions, TAG_FIELDS), int64),
        # the batch of one round: slot -> row, and data that one stream writes and another reads
        BufferSpec("batch_rows", (slots,), int64, fill=limits.dummy_row),
        BufferSpec("batch_drafts", (drafts, slots), int64, fill=-1),
        BufferSpec("batch_masks", (positions, slots, words), int32),
        BufferSpec("batch_tags", (positions, slots, TAG_FIELDS), int64),
        *ResultLayout(drafts).specs(limits),
        # admission and prompts
        BufferSpec("admission", (admission,), int64),
        BufferSpec("prompt", (limits.prompt_window,), int64),
        # host link: written and read by host nodes within one replay
        BufferSpec("state_host", (slots, len(HostColumn)), int64, "pinned"),
        BufferSpec("drafts_host", (drafts, slots), int64, "pinned", fill=-1),
        BufferSpec("masks_host", (positions, slots, words), int32, "pinned"),
        BufferSpec("tags_host", (positions, slots, TAG_FIELDS), int64, "pinned"),
        # rings: the host never writes a slot that the device still has to copy
        BufferSpec("batch_rows_ring_host", (depth, slots), int64, "pinned", fill=limits.dummy_row),
        BufferSpec("admission_ring_host", (2 * limits.admission_ring_depth, admission), int64, "pinned"),
        BufferSpec("prompt_ring_host", (limits.admission_ring_depth, limits.prompt_window), int64, "pinned"),
        BufferSpec("seen_ring_host", (limits.admission_ring_depth, -(-limits.num_tokens // 32)), int32, "pinned"),  # prompt token bits
    )


def state_specs(limits: Limits, width: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for saving the target's states: `width` numbers per position."""
    depth, slots, positions = limits.ring_depth, limits.max_rows, limits.positions
    return (
        BufferSpec("results_states", (slots, positions, width), dtype),
        BufferSpec("states_ring_host", (depth, slots, positions, width), dtype, "pinned"),
        # one line per token; at most prefill_chunk tokens of prompts are processed between two rounds
        BufferSpec("prompt_states_ring_host", (depth * limits.prefill_chunk, width), dtype, "pinned"),
    )
