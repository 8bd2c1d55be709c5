"""The protocol of a proposer: drafts whole chains from the text, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits


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
