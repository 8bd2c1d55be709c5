"""Paged attention without a plan: lengths and block tables are read on the device, nothing comes from the host.

The cache of a model is two static buffers, keys and values of all layers by cache slot. Each query sees the entries of its row up
to its own position. Other entries, in the scratch page or left by an earlier owner of a page, may hold NaN: they are not even
multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stepgraph.graphs.attention.float8 import ENTRIES, MAX_C_HEAD_SIZE, c_supports_cache
from stepgraph.graphs.attention.reference import reference_attention
from stepgraph.graphs.model_call import Attend, ModelInput
from stepgraph.sampling.kernels.c_kernel import same_float_type
from stepgraph.sampling.kernels.operation import empty_as, operation

HEAD_SIZES = (64, 96, 128, 192, 256)  # tested with the Triton program; the reference takes any


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
    becomes softcap * tanh(s / softcap); 0: no cap. sinks [heads]: the score of one more entry per head, without a value.
    """
    batch, count, heads, size = query.shape
    if keys.shape != values.shape or keys.shape[2] != size or heads % keys.shape[1]:
        shapes = f"{tuple(keys.shape)}, values {tuple(values.shape)}"
        raise ValueError(f"attention.keys: got {shapes}, expected [slots, kv_heads, {size}] both, kv_heads a divisor of {heads}")
    if not inputs.positions.shape == inputs.slots.shape == (batch, count):
        raise ValueError(f"attention.query: got {tuple(query.shape)}, expected [B, Q, ...] of positions {tuple(inputs.positions.shape)}")
    if keys.dtype is not values.dtype or keys.dtype not in (query.dtype, ENTRIES):
        raise ValueError(f"attention.keys: got {keys.dtype} and values {values.dtype}, expected {query.dtype}, as query, or {ENTRIES}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"attention.sinks: got shape {tuple(sinks.shape)}, expected {(heads,)}")
    if window is not None and window < 1:
        raise ValueError(f"attention.window: got {window}, expected a whole number >= 1, or None")
    scale = size**-0.5 if scale is None else scale
    if inputs.attend is not None:
        output = empty_as(query)
        more = (softcap, sinks) if softcap or sinks is not None else ()
        inputs.attend(query.contiguous(), keys, values, inputs, window or 0, scale, output, *more)
        return output
    tables, page_size = inputs.block_tables, inputs.page_size
    return paged_attention(query, keys, values, inputs.positions, inputs.slots, tables, page_size, window or 0, scale, softcap, sinks)


def _c_supports(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> bool:
    fits = query.shape[3] <= MAX_C_HEAD_SIZE and keys.is_contiguous() and values.is_contiguous()
    return fits and c_supports_cache(query, keys=keys, values=values) and (sinks is None or same_float_type(sinks))


paged_attention = operation(
    empty_as,
    name="paged_attention",
    triton="stepgraph.graphs.attention.triton.paged",
    c="attention",
    supports=_c_supports,
)(reference_attention.reference)
paged_attention.__doc__ = "`attention` by the pages of block tables, without a plan."


def use_operation(*_: int) -> None:
    """No other implementation: `attention` calls the operation paged_attention."""


@dataclass(frozen=True)
class AttentionChoice:
    """The implementations of an engine's attention: `choose.choose_attention` makes it."""

    rounds: str = ""  # flashinfer, triton, reference, or native on the CPU; empty if no model declares its attention
    prompts: str = ""
    unavailable: tuple[str, ...] = ()  # preferred implementations, and why they cannot be used
    round_attend: Callable[[], Attend | None] = use_operation  # ModelInput.attend for one call of a model in a round
    prompt_attend: Callable[[int, int], Attend | None] = use_operation  # the same for a number of prompt tokens from a position on
    chunk_attend: Callable[[], Attend | None] = use_operation  # the same for a recorded chunk of a prompt

    def __str__(self) -> str:
        names = self.rounds if self.rounds == self.prompts else f"rounds {self.rounds}, prompts {self.prompts}"
        return "; ".join((names, *self.unavailable))


DEFAULT_ATTENTION = AttentionChoice()
