"""Logits processors: functions of the user that change the target's logits within a sampled round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.errors import step_errors
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.fields import FUNCTION, Check, check_fields, shows_fields, whole
from stepgraph.sampling.sampler import VocabColumns

MAX_ARGUMENTS = 64


@shows_fields
class ProcessorInput(NamedTuple):
    """What a logits processor reads of B rows at Q positions: a position follows the last token of its row, or a draft."""

    arguments: Tensor  # [B, num_arguments] float32: those of each request; 0 in a row that does not use the processor
    tokens: Tensor  # [B, Q] int64, the token before each position; -1 where there is no draft
    generated: Tensor  # [B] int64, tokens emitted so far: before position 0
    output_counts: Tensor  # [B, num_tokens] int32: how often each token id was emitted


@dataclass(frozen=True)
class LogitsProcessor:
    """A device function that changes the target's logits, for the requests that name it in SamplingParams.logits_processors.

    function(logits, given): logits [B, Q, num_tokens] float32, a copy; given: a ProcessorInput, which is not changed in place. Returns
    logits of that shape, float32. It is recorded in the round, so it obeys the rules of a step: no value is read on the host. The logits
    of a position are used only if the drafts before it are accepted, so given.tokens[:, 1:] count as emitted. An nn.Module may have tensors
    on the engine's device.
    """

    name: str
    function: Callable[[Tensor, ProcessorInput], Tensor]
    num_arguments: int = 0  # numbers that a request passes

    def __post_init__(self) -> None:
        name = Check(lambda value: isinstance(value, str) and value.isidentifier(), "an identifier")
        check_fields(self, {"name": name, "function": FUNCTION, "num_arguments": whole(0, MAX_ARGUMENTS)})

    def apply(self, logits: Tensor, given: ProcessorInput) -> Tensor:
        """The function's logits. ValueError for anything else that it returns, and if it changes `given`, which other requests use."""
        before = [each.is_inference() or each._version for each in given]  # tensors of inference mode have no version
        result = self.function(logits.to(torch.float32, copy=True), given)
        for name, each, version in zip(given._fields, given, before, strict=True):
            if version != (each.is_inference() or each._version):
                raise ValueError(f"LogitsProcessor {self.name!r}: changed given.{name} in place, expected changes of the logits only")
        if not isinstance(result, Tensor) or result.shape != logits.shape or result.dtype is not torch.float32:
            got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"LogitsProcessor {self.name!r}: returned {got}, expected torch.float32 {tuple(logits.shape)}")
        return result


def check_processors(processors: tuple[LogitsProcessor, ...], limits: Limits, backend: Backend) -> None:
    """Records each function by itself. CaptureError, with rule, file and line, for one that cannot be part of a round."""
    rows, width = limits.max_rows, limits.num_tokens
    for processor, positions in product(processors, {1, limits.positions}):  # without drafts, and with all
        specs = (
            BufferSpec("logits", (rows, positions, width), torch.float32),
            BufferSpec("arguments", (rows, processor.num_arguments), torch.float32),
            BufferSpec("tokens", (rows, positions), torch.int64),
            BufferSpec("generated", (rows,), torch.int64),
            BufferSpec("output_counts", (rows, width), torch.int32),
        )
        module = processor.function if isinstance(processor.function, torch.nn.Module) else None
        buffers = StaticBuffers(specs, backend.device, None if module is None else {"processor": module})

        def step(buffers: StaticBuffers, processor: LogitsProcessor = processor) -> None:
            given = ProcessorInput(buffers.arguments, buffers.tokens, buffers.generated, buffers.output_counts)
            buffers.logits.copy_(processor.apply(buffers.logits, given))

        with step_errors(f"LogitsProcessor {processor.name!r}", backend.device):
            backend.measure(step, buffers)


def apply_processors(
    buffers: StaticBuffers, batch: Batch, logits: Tensor, processors: Sequence[LogitsProcessor], columns: VocabColumns
) -> Tensor:
    """Logits [B, Q, V] after the processors that each row uses; the bits of other rows do not change. Functions get those of all tokens."""
    settings, first = buffers.row_processors[batch.rows], 0  # [B, sum of 1 + num_arguments]: whether it is used, then its arguments
    logits = columns.whole(logits)
    tokens = torch.cat([batch.column(Column.LAST_TOKEN)[:, None], batch.drafts], 1)
    for processor in processors:
        end = first + 1 + processor.num_arguments
        counts = buffers.row_output_counts[batch.rows]
        given = ProcessorInput(settings[:, first + 1 : end], tokens, batch.column(Column.GENERATED), counts)
        logits = torch.where((settings[:, first] != 0)[:, None, None], processor.apply(logits, given), logits)
        first = end
    return columns.part(logits)
