"""All that a stage may call of a model: bring your own nn.Module with these three methods; nothing else is inherited.

A model keeps whatever it remembers of a row in static buffers that it declares itself, one entry per cache slot. The
runtime tells it, on the device, which slot belongs to which position; rejected drafts are simply overwritten later, and
requests that begin alike share the slots of full pages. A model that remembers anything elsewhere says `shares_prefix = False`.
Its weights are its parameters and registered buffers: a tensor that it holds otherwise is refused when a step is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from stepgraph.graphs.buffers import BufferSpec, StaticBuffers
from stepgraph.graphs.shapes import Limits

Attend = Callable[[Tensor, Tensor, Tensor, "ModelInput", int, float, Tensor], None]  # query, keys, values, inputs, window, scale, output


class Embeddings(NamedTuple):
    """What stands in place of the embeddings of tokens, say of an image."""

    values: Tensor  # [B, Q, E]
    given: Tensor  # [B, Q] bool: where


class ModelInput(NamedTuple):
    """One call's worth of tokens: B rows of Q positions. Prompts come with B = 1 and any Q, rounds with any B and a fixed Q.

    Positions are consecutive, but for inert ones at a row's end: those lie in the scratch page (slot < page_size), their
    positions are only clamped into range, and what is computed for them is never used. Where a prompt goes on behind shared
    pages, its first position may be the last of those: its entry is there, it lies in the scratch page, and it is used.
    """

    tokens: Tensor  # [B, Q] int64
    positions: Tensor  # [B, Q] int64, place of each token in its row's history; a query sees entries at positions <= its own
    slots: Tensor  # [B, Q] int64, cache slot of each token
    block_tables: Tensor  # [B, pages_per_row] int64; position p is kept at block_table[p // page_size] * page_size + p % page_size
    page_size: int
    features: Tensor | None = None  # draft only, [B, Q, F]: features of the position before each token; zeros at position 0
    step: int = 1  # draft only: which draft of the round this call is for; 1, and every prompt: the features are the target's
    attend: Attend | None = None  # what `attention` runs as in this call; None: its operation
    shared: int = 0  # prompts only: entries at positions below are others' too; `slots` names none of them
    embeddings: Embeddings | None = None  # target only, in prompts that bring some


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
    One that takes `inputs.embeddings` says so with `embedding_size`, how wide they are; they come as its `feature_dtype`.
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
    """The model that proposes. Like a target, but it is fed with features, and its logits are asked at one position a row.

    One that keeps entries in front of their token's position, of which they follow, says with `lookahead` how far at most; it
    leaves positions below `inputs.shared` alone. One without a cache of its own may read the target's, by the name of its buffers:
    entries up to position - step are those of the text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def d2t(self) -> Tensor | None:
        """[vocab_size] int64, the target's id of each of the draft's own tokens; None where both share one vocabulary."""

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]: ...

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class History(NamedTuple):
    """What a proposer is shown of B rows, after what a round added to them. Inert rows show whatever they hold, also -1 alone."""

    tokens: Tensor  # [B, T] int32: a row's history at [0, length), old tokens behind it; the given text from `given_from` on, then -1
    length: Tensor  # [B] int64, at least 1
    generated: Tensor  # [B] int64, how many of these are output
    given_from: int  # in front of it: a column of -1, then the last ANCHOR tokens of the prompt
    num_drafts: int  # K


@runtime_checkable
class Proposer(Protocol):
    """What drafts without a model: whole chains at once, from the text alone, as device code inside the round.

    It asks the host for nothing, like a model, may keep a state of its own in static buffers, one entry per row (at
    `buffers.batch_rows[:B]`), and may have `notes`. Whatever it proposes changes speed only: its drafts are certainties,
    judged under the target's own masked distribution.
    """

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]: ...

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        """[B, K] int64, token ids. A chain ends at its first -1, or at any other id that is no token's."""


class ModelPair(NamedTuple):
    """Who verifies and who drafts: a draft model or a proposer, neither exactly where num_speculative_tokens is 0."""

    target: TargetModel
    draft: DraftModel | None
    proposer: Proposer | None = None
    look_up: Proposer | None = None  # stands in for a draft model where it finds something

    @property
    def reads_text(self) -> bool:
        """Whether the device keeps the rows' texts, for somebody proposes from them."""
        return self.proposer is not None or self.look_up is not None

    @property
    def drafter(self) -> DraftModel | Proposer | None:
        return self.draft if self.proposer is None else self.proposer


def check_shape(name: str, tensor: Tensor, *sizes: int) -> None:
    """ValueError where a model returned something else than it promised; free in a replay, which runs no Python."""
    if tuple(tensor.shape) != sizes:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {sizes}")
