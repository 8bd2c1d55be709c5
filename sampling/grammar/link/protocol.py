"""The interface between a round and the host link that drives its matchers: rows, steps, host nodes, batches.

Handles pinned arrays and matchers, not graphs, streams or requests. Every mask row carries a tag (owner, committed tokens, index,
status), so that the device never uses a mask of another row, round or position. The index says which of the row's K + 1 masks it
is; the stage is the index in pinned memory through which it is transferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stepgraph.sampling.grammar.matchers.protocol import Matcher

NODE_BOUNDS_NS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)


class HostAction(IntEnum):
    """What a step does to the batch or to each of its rows. Same values as in host_link.h."""

    BEGIN_ROUND = 0  # take the round's batch and invalidate all masks of earlier rounds
    NEXT = 1  # fill the next missing mask: mask 0 if there is none or the history has changed, else the mask after the next draft
    COMMIT = 2  # roll back rejected drafts, accept the token that the target added, fill mask 0
    ADVANCE = 3  # accept one draft, fill the mask after it
    FOLLOW = 4  # as ADVANCE; a forced token replaces the draft
    END_ROUND = 5  # release the batch


class HostStep(NamedTuple):
    action: HostAction
    stage: int = 0  # NEXT, ADVANCE, FOLLOW: the mask row to fill, from 1; its draft is in row stage - 1. Not NEXT: also the mask index


BEGIN_ROUND, COMMIT, END_ROUND = HostStep(HostAction.BEGIN_ROUND), HostStep(HostAction.COMMIT), HostStep(HostAction.END_ROUND)
fill_next, advance, follow = (partial(HostStep, action) for action in (HostAction.NEXT, HostAction.ADVANCE, HostAction.FOLLOW))


class MatcherRow(Protocol):
    """One constrained request. From its first round to its last only host nodes access it."""

    @property
    def owner(self) -> int: ...

    @property
    def matcher(self) -> Matcher: ...

    @property
    def fault(self) -> str:
        """Why this row gets no further masks; empty without a fault."""


@dataclass(frozen=True)
class HostStats:
    """Counters of a host link. Times are wall clock and excluded from comparison. A node that ends while they are read may be counted
    in some fields only."""

    fills: int = 0
    accepts: int = 0
    rollbacks: int = 0
    looks: int = 0  # searches for forced text
    node_ns: int = field(default=0, compare=False)
    longest_node_ns: int = field(default=0, compare=False)
    nodes: tuple[int, ...] = field(default=(0,) * (len(NODE_BOUNDS_NS) + 1), compare=False)  # up to each bound, then beyond the last


class HostLink(Protocol):
    """Drives the matchers of a batch. Its nodes run in the order of the rounds and never overlap."""

    @property
    def name(self) -> str:
        """For the capture report."""

    @property
    def stats(self) -> HostStats: ...

    def row(self, owner: int, matcher: Matcher, committed: int = 0) -> MatcherRow:
        """A row for `push_batch`; any thread may call this. Afterwards only host nodes may use the matcher."""

    def node(self, steps: Sequence[HostStep]) -> Callable[[], object]:
        """A host node for `CaptureContext.host_node`. A round's first step is BEGIN_ROUND and its last one END_ROUND."""

    def push_batch(self, batch: Sequence[MatcherRow | None]) -> None:
        """Set the row of each batch slot for the next round; called by the launching thread before the launch."""

    def release_finished(self) -> None:
        """Release the rows of rounds that have ended; called by the launching thread."""

    def log_nodes(self, log: npt.NDArray[np.int64] | None) -> None:
        """Write the times of later nodes to `log` until it is full; None: stop. Called while no node is running.

        log [nodes + 1, 3]: the number of logged nodes in log[0, 0]; then per node whether it was the first of its round, its begin
        and its end on the monotonic clock, in nanoseconds.
        """

    def close(self) -> None:
        """End threads and free memory; called after the last node has run."""
