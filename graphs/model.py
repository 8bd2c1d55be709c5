"""Protocols of models: an nn.Module with these methods can be a target, a draft or a proposer. No base class is needed.
What they are called with and return: `model_call`.

A model keeps its per-token state in static buffers that it declares, one entry per cache slot. The input names the slot of each
position, on the device. Entries of rejected drafts are overwritten later, and requests with an equal prefix share the slots of its
full pages; a model with state elsewhere sets `shares_prefix = False`. Weights must be parameters or registered buffers: a capture
refuses any other tensor.

A model whose logits are divided among ranks has a `shard`: a VocabularyShard, the tokens of its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from stepgraph.graphs.attention.float8 import ENTRIES, FLOAT8
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import ModelInput, ModelOutput


class NoCache:
    """A base class for models without state per token."""

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()


class AttentionShape(NamedTuple):
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    windows: tuple[int | None, ...] = (None,)
    softcap: bool = False  # see attention.paged.attention
    sinks: bool = False
    float8: bool = False  # the cache: see attention.float8


def cache_specs(name: str, layers: int, limits: Limits, heads: int, size: int, dtype: torch.dtype) -> tuple[BufferSpec, BufferSpec]:
    """The spec table of one model's cache: `name`_keys and `name`_values, [layers, slots, heads, size] each; see attention.float8."""
    shape, dtype = (layers, limits.cache_slots, heads, size), ENTRIES if limits.kv_cache_dtype == FLOAT8 else dtype
    return BufferSpec(f"{name}_keys", shape, dtype), BufferSpec(f"{name}_values", shape, dtype)


class TargetModel(Protocol):
    """The model whose output distribution is preserved. Accepts any B and Q, keeps no allocation after a call, never synchronises.

    Optional attributes: `notes`, sentences for the capture report; `attends`, a tuple of AttentionShape, from which attention is chosen
    before a capture; `embedding_size`, the width of `inputs.embeddings`, if it accepts them (of dtype `feature_dtype`); `lora_weights`, a
    LoraWeight by the name of its buffers, if it calls `add_lora`; `batch_invariant = True` if a row has the same bits in any batch on CPUs.
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

    A draft that writes entries at earlier positions than their token's, because they depend on that token, sets `lookahead` to the largest
    distance. All its entries are then at earlier positions, and it must not write below `inputs.shared`. A draft without a cache may read
    the target's buffers by name: entries up to position - step belong to the text, up to position - 1 where positions do not advance.

    Optional attributes: `advances = False` for a draft without a cache, all of whose drafts are made at the position of the last token
    of the text; `shares_embeddings = True` if embeddings are the target's, which `prompt_embeddings` replace; `batch_invariant`, as above.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def d2t(self) -> Tensor | None:
        """[vocab_size] int64, the target id of each draft token; None if both share a vocabulary."""

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]: ...

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class History(NamedTuple):
    """Input of a proposer: the texts of B rows after the round's emission. Those of inert rows are arbitrary, even all -1."""

    tokens: Tensor  # [B, T] int32: history at [0, length), then stale tokens; the given text from `given_from` on, then -1
    length: Tensor  # [B] int64, at least 1
    generated: Tensor  # [B] int64, output tokens among them
    given_from: int  # preceded by a column of -1 and the last ANCHOR_TOKENS of the prompt
    num_drafts: int  # K


@runtime_checkable
class Proposer(Protocol):
    """Drafts whole chains from the text, without a model, as device code inside the round.

    Like a model it never synchronises; it may keep state in static buffers, one entry per row (at `buffers.batch_rows[:B]`), and
    may have `notes`. Its drafts affect speed only: each counts as drawn with probability 1 and is verified against the target's
    masked distribution.
    """

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]: ...

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        """[B, K] int64 token ids. A chain ends at the first id that is not a token, such as -1."""


class Models(NamedTuple):
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
