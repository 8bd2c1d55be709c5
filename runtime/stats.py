"""What an engine has done so far: frozen figures, each taken at one moment. Knows numbers only."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.graphs.buffers import REFUSED
from stepgraph.graphs.shapes import GraphKey
from stepgraph.sampling.grammar.compile.compiler import CompileStats
from stepgraph.sampling.grammar.status import MaskStatus


class Loss(str, enum.Enum):
    """Why the drafts of a row did not all hold in a round."""

    ILLEGAL = "illegal"  # its grammar forbids the next one: seen as it was proposed, or as it was judged
    IMPROBABLE = "improbable"  # the target chose, or drew, something else
    ENDED = "ended"  # the text ended with a draft, or where the next one would have stood
    UNDRAFTED = "undrafted"  # nobody had one for the next place


def loss_of(wanted: int, emitted: int, accepted: int, offered: int, statuses: Sequence[int], drafts: Sequence[int]) -> Loss | None:
    """Of a row that wants so many drafts, by what a round says of it; None where they all held."""
    if accepted >= wanted:
        return None
    if emitted == accepted:
        return Loss.ENDED
    if accepted < offered:
        return Loss.IMPROBABLE if MaskStatus.OK <= statuses[accepted + 1] < MaskStatus.ILLEGAL else Loss.ILLEGAL
    return Loss.ILLEGAL if drafts[accepted] == REFUSED else Loss.UNDRAFTED


@dataclass(frozen=True)
class DraftStats:
    """What became of drafts, counted once per row and round: `full` rounds and lost ones are all `rounds`.

    A text's first round counts only where something was drafted for it, and a request without speculation never.
    """

    rounds: int
    tokens: int  # that these rounds emitted
    full: int  # every draft that the request wants held
    illegal: int  # the rest by Loss: what came first in the chain
    improbable: int
    ended: int
    undrafted: int
    offered: tuple[int, ...]  # by place, from the first draft of a chain on
    accepted: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """Tokens per round of a row, the target's own included; 0 before the first."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class GraphStats:
    """What one graph was replayed for, or in an eager engine, what ran in its stead."""

    key: GraphKey
    rounds: int
    padded_rounds: int  # with fewer rows than it has: no graph is smaller and large enough
    padded_rows: int


@dataclass(frozen=True)
class Histogram:
    """How often a figure was at most each bound, and above the one before."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one per bound, and last those above all
    total: float  # of the figures

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.counts))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and how it stands.

    What jobs did and hold is of one moment, and so is what was launched, a little later: never less than what jobs were told of.
    What the device and the compiler did is read beside it.
    """

    rounds: int
    replays: int
    host_syncs: int  # waits for the whole device on the launching thread; rounds make none
    event_waits: int  # for a round's results, or for a slot of pinned memory that was still being copied
    eager_rounds: int  # that replayed nothing
    eager_reason: str  # why; empty where rounds are recorded
    graphs: tuple[GraphStats, ...]  # largest first; those that were used
    tokens: int
    prompt_tokens: int  # computed; what was found in the cache is in reused_tokens
    accepted_drafts: int
    drafting: DraftStats
    forced_drafts: int  # drafts that a grammar forced
    accepted_forced_drafts: int
    looked_up_drafts: int  # drafts that a look-up found
    accepted_looked_up_drafts: int
    forced_looks: int  # how often a grammar was asked what must come next
    mask_fills: int
    matcher_accepts: int
    matcher_rollbacks: int
    host_nodes: Histogram  # seconds that each host node took: masks, and the matchers' way to them
    longest_host_node_seconds: float
    # That the main stream stood waiting for a mask. Known on the tape; of an eager engine, which hides nothing, it is all of
    # host_nodes; where graphs failed to be captured, that of the recorded rounds. None on CUDA: only a profile knows.
    exposed_wait_seconds: float | None
    grammars: CompileStats
    saved_texts: int  # whose hidden states are on disk
    unsaved_texts: int  # that the disk was too slow for, or refused
    saving_error: str  # why nothing more is saved; empty while all is well
    submitted: int
    finished: tuple[tuple[str, int], ...]  # jobs by finish reason
    running: int
    waiting: int
    most_waiting: int  # at any time
    queue_seconds: Histogram  # from submit to a row
    first_token_seconds: Histogram  # from submit until a first token was known
    pages: int
    free_pages: int  # those that are only kept for their prefix included
    most_used_pages: int  # at any time; what is only kept not included
    cached_pages: int  # that a request may find its prefix in
    evicted_pages: int
    reused_tokens: int  # of prompts: found, not computed
