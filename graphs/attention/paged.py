"""Paged attention without a plan: lengths and block tables are read on the device, nothing comes from the host.

The cache of a model is two static buffers, keys and values of all layers by cache slot. Each query sees the entries of its row up
to its own position. Other entries, in the scratch page or left by an earlier owner of a page, may hold NaN: they are not even
multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.layers.dense import LEAST_ROWS
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import Attend, ModelInput
from stepgraph.sampling.kernels.c_kernel import CKernel, is_contiguous, same_float_type
from stepgraph.sampling.kernels.operation import Contiguous, operation

HEAD_SIZES = (64, 96, 128, 192, 256)  # that the Triton program was checked for; the reference takes any
C_HEAD_SIZE = 256  # the largest in C
PART = 128  # keys that the reference weighs at a time


class AttentionShape(NamedTuple):
    """The shape of one model's attention."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    windows: tuple[int | None, ...] = (None,)
    softcap: bool = False  # see `attention`
    sinks: bool = False


def cache_specs(name: str, layers: int, limits: Limits, heads: int, size: int, dtype: torch.dtype) -> tuple[BufferSpec, BufferSpec]:
    """The spec table of one model's cache: `name`_keys and `name`_values, [layers, slots, heads, size] each."""
    shape = (layers, limits.cache_slots, heads, size)
    return BufferSpec(f"{name}_keys", shape, dtype), BufferSpec(f"{name}_values", shape, dtype)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    inputs: ModelInput,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each query over its row's cache, [B, Q, heads, size] as `query`.

    query [B, Q, heads, size]; keys, values [slots, kv_heads, size] of one layer, already written; query head h reads cache head
    h // (heads // kv_heads). window: how many positions back a query sees, including its own; None: all. softcap: a scaled score s
    becomes softcap * tanh(s / softcap); 0: it stays. sinks [heads]: the score of one more entry per head, without a value.
    """
    batch, count, heads, size = query.shape
    assert keys.shape == values.shape and keys.shape[2] == size and heads % keys.shape[1] == 0, f"query {query.shape}, keys {keys.shape}"
    assert inputs.positions.shape == inputs.slots.shape == (batch, count), f"query {query.shape}, positions {inputs.positions.shape}"
    assert query.dtype is keys.dtype is values.dtype, f"query {query.dtype}, keys {keys.dtype}"
    assert sinks is None or sinks.shape == (heads,), f"query {query.shape}, sinks {sinks.shape if sinks is not None else None}"
    scale = size**-0.5 if scale is None else scale
    if inputs.attend is not None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        more = (softcap, sinks) if softcap or sinks is not None else ()
        inputs.attend(query.contiguous(), keys, values, inputs, window or 0, scale, output, *more)
        return output
    tables, page_size = inputs.block_tables, inputs.page_size
    return paged_attention(query, keys, values, inputs.positions, inputs.slots, tables, page_size, window or 0, scale, softcap, sinks)


def _in_c(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor, *others: float | Tensor | None
) -> bool:
    sinks = others[-1]
    dense = all(tensor.is_contiguous() for tensor in (query, keys, values)) and query.shape[3] <= C_HEAD_SIZE
    dense = dense and (not isinstance(sinks, Tensor) or (sinks.is_contiguous() and same_float_type(sinks)))
    return dense and same_float_type(query, keys, values) and is_contiguous(torch.int64, positions, slots, block_tables)


def _outputs(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@operation(_outputs, triton=True, c=CKernel("attention", _in_c), flashinfer="stepgraph.graphs.attention.flashinfer")
def paged_attention(
    query: Contiguous,
    keys: Tensor,
    values: Tensor,
    positions: Contiguous,
    slots: Contiguous,
    block_tables: Contiguous,
    page_size: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Contiguous | None = None,
) -> Tensor:
    """`attention` in float32 and plain torch. A query's result has the same bits in any batch and with any length of the tables."""
    batch, count, heads, size = query.shape
    kv_heads, device = keys.shape[1], query.device
    last = torch.where(slots >= page_size, positions, -1).amax(1, keepdim=True)  # inert positions do not count
    if device.type == "cpu":  # the only device where reading a length is free: a table is mostly unused
        needed = -(-(int(last.max()) + 1) // PART) * PART
        block_tables = block_tables[:, : max(1, -(-needed // page_size))]
    entries = (block_tables[:, :, None] * page_size + torch.arange(page_size, device=device)).flatten(1)
    index = torch.arange(entries.shape[1], device=device)
    held = index <= last
    visible = held[:, None] & (index <= positions[..., None])
    if window:
        visible = visible & (index > positions[..., None] - window)
    key = keys[entries].transpose(1, 2).float()
    value = torch.where(held[..., None, None], values[entries].float(), 0.0).transpose(1, 2)

    groups = heads // kv_heads
    rows = max(groups * count, LEAST_ROWS)
    packed = query.view(batch, count, kv_heads, groups, size).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * count, size)
    packed = functional.pad(packed.float() * scale, (0, 0, 0, rows - groups * count))
    scores = (packed @ key.transpose(2, 3))[:, :, : groups * count].view(batch, kv_heads, groups, count, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.finfo(torch.float32).min  # finite: a query that sees nothing gives no NaN
    scores = scores.masked_fill(~visible[:, None, None], hidden)
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, count, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(index)].flatten(2, 3)
    weights = functional.pad(weights, (0, 0, 0, rows - groups * count))
    total = torch.zeros(batch, kv_heads, rows, size, device=device)
    for start in range(0, len(index), PART):  # one long product would sum in an order that depends on its length
        total = total + weights[..., start : start + PART] @ value[:, :, start : start + PART]
    result = total[:, :, : groups * count].view(batch, kv_heads, groups, count, size)
    return result.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


reference_attention = operation(_outputs, name="reference_attention")(paged_attention.reference)


def by_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    inputs: ModelInput,
    window: int,
    scale: float,
    output: Tensor,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """For ModelInput.attend: plain torch on every device. On the CPU it is an operation, which the tape records as one node."""
    run = reference_attention.out if query.device.type == "cpu" else reference_attention.run_reference
    places = (inputs.positions, inputs.slots, inputs.block_tables, inputs.page_size)
    run(query, keys, values, *places, window, scale, softcap, sinks, output)


def run_operation(*_: int) -> None:
    """No other implementation: `attention` calls the operation paged_attention."""


@dataclass(frozen=True)
class AttentionChoice:
    """The implementations of an engine's attention: `choose.choose_attention` makes it."""

    rounds: str = ""  # flashinfer, triton, reference, or native on the CPU; empty if no model declares its attention
    prompts: str = ""
    passed_over: tuple[str, ...] = ()  # preferred implementations, and why they cannot be used
    round_call: Callable[[], Attend | None] = run_operation  # ModelInput.attend for one call of a model in a round
    prompt_call: Callable[[int, int], Attend | None] = run_operation  # the same for a number of prompt tokens from a position on
    chunk_call: Callable[[], Attend | None] = run_operation  # the same for a recorded chunk of a prompt

    def __str__(self) -> str:
        names = self.rounds if self.rounds == self.prompts else f"rounds {self.rounds}, prompts {self.prompts}"
        return "; ".join((names, *self.passed_over))


OPERATION = AttentionChoice()
