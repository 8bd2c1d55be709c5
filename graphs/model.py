"""All that a stage may call of a model: bring your own nn.Module with these three methods; nothing else is inherited.

A model keeps whatever it remembers of a row in static buffers that it declares itself, one entry per cache slot. The
runtime tells it, on the device, which slot belongs to which position; rejected drafts are simply overwritten later. Its
weights are its parameters and registered buffers: a tensor that it holds otherwise is refused when a step is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.shapes import Limits

Attend = Callable[[Tensor, Tensor, Tensor, "ModelInput", int, float, Tensor], None]  # query, keys, values, inputs, window, scale, output


class ModelInput(NamedTuple):
    """One call's worth of tokens: B rows of Q positions. Prompts come with B = 1 and any Q, rounds with any B and a fixed Q.

    Positions are consecutive, but for inert ones at a row's end: those lie in the scratch page (slot < page_size), their
    positions are only clamped into range, and what is computed for them is never used.
    """

    tokens: Tensor  # [B, Q] int64
    positions: Tensor  # [B, Q] int64, place of each token in its row's history; a query sees entries at positions <= its own
    slots: Tensor  # [B, Q] int64, cache slot of each token
    block_tables: Tensor  # [B, pages_per_row] int64; position p is kept at block_table[p // page_size] * page_size + p % page_size
    page_size: int
    features: Tensor | None = None  # draft only, [B, Q, F]: features of the position before each token; zeros at position 0
    step: int = 1  # draft only: which draft of the round this call is for; 1, and every prompt: the features are the target's
    attend: Attend | None = None  # what `attention` runs as in this call; None: its operation


class ModelOutput(NamedTuple):
    hidden: Tensor  # [B, Q, H], what `logits` takes
    features: Tensor  # [B, Q, F], what the draft is fed with: the target's at its first step, its own afterwards

    def saved(self, width: int) -> Tensor:
        """[B, Q, width] features and hidden states side by side; where `width` is H, the hidden states alone."""
        kept = self.hidden if self.hidden.shape[-1] == width else torch.cat([self.features, self.hidden], -1)
        check_shape("target features and hidden", kept, *self.hidden.shape[:-1], width)
        return kept


class TargetModel(Protocol):
    """The model whose law is kept. Works on any B and Q, allocates nothing that outlives the call, never asks the host.

    A model may also have `notes`, a tuple of sentences that the capture report repeats, and `attends`, a tuple of
    AttentionShape: what it asks of `attention`, so that a kernel is found for it, or refused, before anything is captured.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def feature_dtype(self) -> torch.dtype: ...

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        """The static buffers of its cache, `limits.cache_slots` entries each, under names no other model uses."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        """Write the tokens' cache entries, then look back at each position's prefix."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocab_size]."""


class DraftModel(Protocol):
    """The model that proposes. Like a target, but it is fed with features, and its logits are asked at one position a row."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def d2t(self) -> Tensor | None:
        """[vocab_size] int64, the target's id of each of the draft's own tokens; None where both share one vocabulary."""

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]: ...

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class ModelPair(NamedTuple):
    target: TargetModel
    draft: DraftModel | None  # None exactly where num_speculative_tokens is 0


def check_shape(name: str, tensor: Tensor, *sizes: int) -> None:
    """ValueError where a model returned something else than it promised; free in a replay, which runs no Python."""
    if tuple(tensor.shape) != sizes:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {sizes}")
