"""What `accept` does on request: forced acceptance, and the user's logits processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.errors import step_errors
from stepgraph.graphs.layers.vocabulary_shard import VocabularyShard
from stepgraph.graphs.limits import Limits
from stepgraph.sampling.fields import FUNCTION, Check, check_fields, whole

MAX_ARGUMENTS = 64


class ProcessorInput(NamedTuple):
    """What a logits processor reads of B rows at Q positions: a position follows the last token of its row, or a draft."""

    arguments: Tensor  # [B, num_arguments] float32: those of each request; 0 in a row that does not use the processor
    tokens: Tensor  # [B, Q] int64, the token before each position; -1 where there is no draft
    generated: Tensor  # [B] int64, tokens emitted so far: before position 0
    output_counts: Tensor  # [B, num_tokens] int32: how often each of them is a token id


@dataclass(frozen=True)
class LogitsProcessor:
    """A device function that changes the target's logits, for the requests that name it in SamplingParams.logits_processors.

    function(logits, given): logits [B, Q, num_tokens] float32, a copy, and a ProcessorInput; returns logits of that shape, float32. It is
    recorded in the round, so it obeys the rules of a step: no value is read on the host. The logits of a position are used only if the
    drafts before it are accepted, so given.tokens[:, 1:] count as emitted. An nn.Module may have tensors on the engine's device.
    """

    name: str
    function: Callable[[Tensor, ProcessorInput], Tensor]
    num_arguments: int = 0  # numbers that a request passes

    def __post_init__(self) -> None:
        name = Check(lambda value: isinstance(value, str) and value.isidentifier(), "an identifier")
        check_fields(self, {"name": name, "function": FUNCTION, "num_arguments": whole(0, MAX_ARGUMENTS)})

    def apply(self, logits: Tensor, given: ProcessorInput) -> Tensor:
        """The function's logits. ValueError for anything else that it returns."""
        found = self.function(logits.to(torch.float32, copy=True), given)
        if not isinstance(found, Tensor) or found.shape != logits.shape or found.dtype is not torch.float32:
            got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"LogitsProcessor {self.name!r}: returned {got}, expected torch.float32 {tuple(logits.shape)}")
        return found


@dataclass(frozen=True)
class AcceptOptions:
    """Beside the settings of the rows."""

    forced: tuple[float, ...] | None = None  # for benchmarks: the probability that draft j is accepted, whatever the models
    processors: tuple[LogitsProcessor, ...] = ()
    shard: VocabularyShard | None = None  # the tokens of the target's logits, where ranks divide them


PLAIN_ACCEPT = AcceptOptions()


def check_processors(processors: tuple[LogitsProcessor, ...], limits: Limits, backend: Backend, device: torch.device) -> None:
    """Records each function by itself. CaptureError, with rule, file and line, for one that cannot be part of a round."""
    rows, positions, width = limits.max_rows, limits.positions, limits.num_tokens
    for processor in processors:
        specs = (
            BufferSpec("logits", (rows, positions, width), torch.float32),
            BufferSpec("arguments", (rows, processor.num_arguments), torch.float32),
            BufferSpec("tokens", (rows, positions), torch.int64),
            BufferSpec("generated", (rows,), torch.int64),
            BufferSpec("output_counts", (rows, width), torch.int32),
        )
        module = processor.function if isinstance(processor.function, torch.nn.Module) else None
        buffers = StaticBuffers(specs, device, None if module is None else {"processor": module})

        def step(buffers: StaticBuffers, processor: LogitsProcessor = processor) -> None:
            given = ProcessorInput(buffers.arguments, buffers.tokens, buffers.generated, buffers.output_counts)
            buffers.logits.copy_(processor.apply(buffers.logits, given))

        with step_errors(f"LogitsProcessor {processor.name!r}", device):
            backend.measure(step, buffers)
