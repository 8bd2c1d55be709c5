"""Protocols of models: an nn.Module with these methods can be a target, a draft or a proposer. No base class is needed.

A model keeps its per-token state in static buffers that it declares, one entry per cache slot. The input names the slot of each
position, on the device. Entries of rejected drafts are overwritten later, and requests with an equal prefix share the slots of its
full pages; a model with state elsewhere sets `shares_prefix = False`. Weights must be parameters or registered buffers: a capture
refuses any other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.proposer import Proposer

Attend = Callable[..., None]  # (query, keys, values, inputs, window, scale, output), then (softcap, sinks) where a model has either


class Embeddings(NamedTuple):
    """Embeddings that replace those of some tokens, for example of an image."""

    values: Tensor  # [B, Q, E]
    given: Tensor  # [B, Q] bool: positions that they replace


class ModelInput(NamedTuple):
    """Tokens of one call: B rows of Q positions. Prompts have B = 1 and any Q, rounds any B and a fixed Q. Both are recorded.

    Positions are consecutive. Inert positions at a row's end have a slot in the scratch page (slot < page_size) and a position clamped
    into range; their output is not used. After a shared prefix, a prompt's first position may be the last shared one: its slot is
    in the scratch page, because its cache entry exists, and its output is used.
    """

    tokens: Tensor  # [B, Q] int64
    positions: Tensor  # [B, Q] int64, index of each token in its row's history; a query attends to positions <= its own
    slots: Tensor  # [B, Q] int64, cache slot of each token
    block_tables: Tensor  # [B, pages_per_row] int64; position p is in slot block_table[p // page_size] * page_size + p % page_size
    page_size: int
    features: Tensor | None = None  # draft only, [B, Q, F]: features of the position before each token; zeros at position 0
    step: int = 1  # draft only: which draft of the round, from 1; at 1 and in prompts the features are the target's
    attend: Attend | None = None  # implementation of `attention` in this call; None: the operation
    shared: Tensor | int = 0  # entries below this position are shared with other rows, and `slots` contains none; [1] int64 in prompts
    embeddings: Embeddings | None = None  # prompts only; of a draft only if it has shares_embeddings


class ModelOutput(NamedTuple):
    hidden: Tensor  # [B, Q, H], input of `logits`
    features: Tensor | None = None  # [B, Q, F], input of the draft: the target's at its first step, its own later; None: `hidden`

    @property
    def next_features(self) -> Tensor:
        return self.hidden if self.features is None else self.features

    def saved_states(self, width: int) -> Tensor:
        """[B, Q, width] features and hidden states concatenated; only the hidden states if `width` is H."""
        states = self.hidden if self.hidden.shape[-1] == width else torch.cat([self.next_features, self.hidden], -1)
        check_shape("target features and hidden", states, *self.hidden.shape[:-1], width)
        return states


class TargetModel(Protocol):
    """The model whose output distribution is preserved. Accepts any B and Q, keeps no allocation after a call, never synchronises.

    Optional attributes: `notes`, a tuple of sentences for the capture report; `attends`, a tuple of AttentionShape, from which the
    attention kernel is chosen before anything is captured; `embedding_size`, the width of `inputs.embeddings`, if it accepts
    them (their dtype is `feature_dtype`).
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def feature_dtype(self) -> torch.dtype: ...

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        """The static buffers of its cache, `limits.cache_slots` entries each. Names must be unique among the models of an engine."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        """Write the tokens' cache entries, then attend to each position's prefix."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocab_size]."""


class DraftModel(Protocol):
    """The model that drafts. Like a target, but with features as input, and logits at one position per row.

    A draft that writes an entry at an earlier position than its token's, because the entry depends on that token, sets `lookahead` to
    the largest distance, and must not write below `inputs.shared`. A draft without a cache may read the target's buffers by
    name: entries up to position - step belong to the text, up to position - 1 where positions do not advance.

    Optional attributes: `advances = False` for a draft without a cache, all of whose drafts are made at the position of the last token
    of the text; `shares_embeddings = True` if its token embeddings are the target's, so that `prompt_embeddings` replace them as well.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def d2t(self) -> Tensor | None:
        """[vocab_size] int64, the target id of each draft token; None if both share a vocabulary."""

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]: ...

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class ModelPair(NamedTuple):
    """The target and what drafts for it: a draft model or a proposer; neither if num_speculative_tokens is 0."""

    target: TargetModel
    draft: DraftModel | None
    proposer: Proposer | None = None
    look_up: Proposer | None = None  # beside a draft model: its tokens replace the model's

    @property
    def reads_text(self) -> bool:
        """Whether the device must keep the rows' texts."""
        return self.proposer is not None or self.look_up is not None

    @property
    def drafter(self) -> DraftModel | Proposer | None:
        return self.draft if self.proposer is None else self.proposer


def run_model(name: str, model: TargetModel | DraftModel, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
    """The model's output. ValueError if it returned something else. Costs nothing in a replay, which runs no Python."""
    output: object = model.forward(inputs, buffers)
    if not isinstance(output, ModelOutput):
        raise ValueError(f"{name}.forward: got {type(output).__name__}, expected a ModelOutput; its features may be None")
    for field, tensor in (("hidden", output.hidden), ("features", output.next_features)):
        check_shape(f"{name} {field}", tensor, *inputs.tokens.shape, tensor.shape[-1])
    return output


def check_shape(name: str, tensor: Tensor, *sizes: int) -> None:
    """ValueError if a model returned another shape. Costs nothing in a replay, which runs no Python."""
    if tuple(tensor.shape) != sizes:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {sizes}")
