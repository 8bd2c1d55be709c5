"""The contract between a round and whoever drives its matchers: rows, steps, host nodes, announcements.

Knows pinned arrays and matchers; knows nothing of graphs, streams or requests. Every mask row that a link fills carries a
tag (owner, committed tokens, index, status): a mask of another row, round or place is never used. The index says which of
the row's K + 1 mask rows it is; the stage is the place in pinned memory through which it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from stepgraph.sampling.grammar.link.node_log import NodeLog
from stepgraph.sampling.grammar.xgrammar_lib.matcher import Matcher


class HostAction(IntEnum):
    """What a host node does to its batch or to each of its rows. native/host_link.h has the same numbers."""

    BEGIN_ROUND = 0  # first of a round: take its batch, and withdraw every mask that an earlier round left
    FILL_NEW = 1  # fill row 0 of the requests that have not been in a round before
    COMMIT = 2  # roll back the rejected drafts, accept what the target added, fill row 0
    ADVANCE = 3  # accept one draft, fill the row behind it
    END_ROUND = 4  # last of a round: let go of the batch


class HostStep(NamedTuple):
    action: HostAction
    stage: int = 0  # the mask row that FILL_NEW or ADVANCE fills; for ADVANCE also which draft it accepts, from 1


BEGIN_ROUND, COMMIT, END_ROUND = HostStep(HostAction.BEGIN_ROUND), HostStep(HostAction.COMMIT), HostStep(HostAction.END_ROUND)


def fill_new(stage: int) -> HostStep:
    return HostStep(HostAction.FILL_NEW, stage)


def advance(index: int) -> HostStep:
    return HostStep(HostAction.ADVANCE, index)


class MatcherRow(Protocol):
    """One constrained request as the host nodes see it; touched by them alone from its first round to its last."""

    @property
    def owner(self) -> int: ...

    @property
    def matcher(self) -> Matcher: ...

    @property
    def fault(self) -> str:
        """Why no mask of this row will come any more; empty while it works."""


NODE_BOUNDS_NS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)  # host_link.c has the same


@dataclass(frozen=True)
class HostStats:
    """Counts, and what the nodes took by the clock, which is not compared. A node that ends just then may be in some of them only."""

    fills: int = 0
    accepts: int = 0
    rollbacks: int = 0
    looks: int = 0  # for a forced text
    node_ns: int = field(default=0, compare=False)
    longest_node_ns: int = field(default=0, compare=False)
    nodes: tuple[int, ...] = field(default=(0,) * (len(NODE_BOUNDS_NS) + 1), compare=False)  # that took at most each bound, then the rest


class HostLink(Protocol):
    """Drives the matchers of a batch. Its nodes are called in the order of the rounds, and never overlap."""

    @property
    def name(self) -> str:
        """For the capture report."""

    @property
    def stats(self) -> HostStats: ...

    def row(self, owner: int, matcher: Matcher, committed: int = 0) -> MatcherRow:
        """A row for `push_batch`. The matcher belongs to the host nodes from now on. From any thread."""

    def node(self, steps: Sequence[HostStep]) -> Callable[[], object]:
        """A host node for `CaptureContext.host_node`. A round's first step is BEGIN_ROUND and its last one END_ROUND."""

    def push_batch(self, batch: Sequence[MatcherRow | None]) -> None:
        """Say who sits in which slot of the next round; by the launching thread, before the launch."""

    def release_finished(self) -> None:
        """Drop the rows of rounds that have ended; by the launching thread."""

    def note_nodes(self, log: NodeLog | None) -> None:
        """Write down from now on when every node ran; None: no longer. While no node is running."""

    def close(self) -> None:
        """End threads, free memory. After the last node has run."""
