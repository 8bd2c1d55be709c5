"""Counters of an engine, and the frozen snapshot that `Engine.stats()` returns."""

from __future__ import annotations

import bisect
import collections
import enum
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepgraph.graphs.buffers import REFUSED
from stepgraph.graphs.capture import BackendStats
from stepgraph.graphs.shapes import GraphKey
from stepgraph.runtime.extras.hidden_states import HiddenStates
from stepgraph.runtime.request import NO_DRAFTS, DraftCounts, FinishReason
from stepgraph.runtime.slots import RowTable
from stepgraph.sampling.grammar.compile.compiler import CompileStats
from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS, HostStats
from stepgraph.sampling.grammar.status import MaskStatus

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
NODE_BOUNDS = tuple(bound / 1e9 for bound in NODE_BOUNDS_NS)


class Loss(str, enum.Enum):
    """Why a round accepted fewer drafts than the request asks for: the first cause in the chain."""

    ILLEGAL = "illegal"  # the grammar forbids the next draft; found when it was proposed or when it was verified
    IMPROBABLE = "improbable"  # the target chose or sampled another token
    ENDED = "ended"  # the text ended at an accepted draft, or at the position of the next one
    UNDRAFTED = "undrafted"  # no drafter proposed a token for the next position


def loss_of(requested: int, emitted: int, accepted: int, offered: int, statuses: Sequence[int], drafts: Sequence[int]) -> Loss | None:
    """The cause for one row of a round that `requested` so many drafts; None if all of them were accepted."""
    if accepted >= requested:
        return None
    if emitted == accepted:
        return Loss.ENDED
    if accepted < offered:
        return Loss.IMPROBABLE if MaskStatus.OK <= statuses[accepted + 1] < MaskStatus.ILLEGAL else Loss.ILLEGAL
    return Loss.ILLEGAL if drafts[accepted] == REFUSED else Loss.UNDRAFTED


@dataclass(frozen=True)
class DraftStats:
    """Acceptance of drafts, counted once per row and round; `rounds` = full + illegal + improbable + ended + undrafted.

    The first round of a request counts only if it had drafts. Requests without speculation are not counted.
    """

    rounds: int
    tokens: int  # emitted in these rounds
    full: int  # rounds in which every requested draft was accepted
    illegal: int  # the other rounds by Loss
    improbable: int
    ended: int
    undrafted: int
    offered: tuple[int, ...]  # by position in the chain, from the first draft on
    accepted: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """Tokens per round of a row, including the target's own token; 0 before the first round."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class GraphStats:
    """Rounds served by one graph, or by the eager round of that key."""

    key: GraphKey
    rounds: int
    padded_rounds: int  # with fewer rows than the graph has
    padded_rows: int


@dataclass(frozen=True)
class Histogram:
    bounds: tuple[float, ...]  # upper, inclusive
    counts: tuple[int, ...]  # one per bound, then one for larger values
    total: float  # sum of the values

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.counts))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


class HistogramBuilder:
    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


class Counters:
    """Counts of jobs, tokens and drafts. Not locked: the scheduler reads and writes it under its own lock."""

    def __init__(self, num_drafts: int) -> None:
        self.tokens = self.prompt_tokens = self.submitted = self.most_waiting = 0
        self.drafts = NO_DRAFTS
        self.finished = collections.Counter[FinishReason]()
        self.queue_seconds, self.first_token_seconds = HistogramBuilder(), HistogramBuilder()
        self._drafting_tokens = 0
        self._offered, self._accepted = [0] * (num_drafts + 1), [0] * (num_drafts + 1)  # rounds by number of drafts
        self._losses: dict[Loss | None, int] = dict.fromkeys((None, *Loss), 0)

    def add_drafting_round(self, tokens: int, offered: int, accepted: int, loss: Loss | None) -> None:
        """A round of a row for which drafts could be made."""
        self._offered[offered] += 1
        self._accepted[accepted] += 1
        self._drafting_tokens += tokens
        self._losses[loss] += 1

    @property
    def drafting(self) -> DraftStats:
        return DraftStats(
            rounds=sum(self._losses.values()),
            tokens=self._drafting_tokens,
            full=self._losses[None],
            offered=_at_least(self._offered),
            accepted=_at_least(self._accepted),
            **{loss.value: self._losses[loss] for loss in Loss},
        )


class GraphCounters:
    """Rounds launched per graph and number of active rows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: dict[tuple[int, bool, bool], int] = {}  # by active rows; a GraphKey's hash is Python code and slower
        self._keys: dict[tuple[int, bool, bool], GraphKey] = {}

    def add(self, key: GraphKey, rows: int) -> None:
        launched = rows, key.constrained, key.sampled
        with self._lock:
            if launched in self._rounds:
                self._rounds[launched] += 1
            else:
                self._rounds[launched], self._keys[launched] = 1, key

    @property
    def graphs(self) -> tuple[GraphStats, ...]:
        """Largest first."""
        with self._lock:
            counts = [(self._keys[launched], launched[0], rounds) for launched, rounds in self._rounds.items()]
        by_key: dict[GraphKey, list[int]] = {}
        for key, rows, rounds in counts:
            sums = by_key.setdefault(key, [0, 0, 0])
            sums[0] += rounds
            sums[1] += rounds if rows < key.rows else 0
            sums[2] += rounds * (key.rows - rows)
        return tuple(GraphStats(key, *sums) for key, sums in sorted(by_key.items(), reverse=True))


def _at_least(rounds: Sequence[int]) -> tuple[int, ...]:
    """From rounds with exactly 0, 1, ... drafts to rounds with at least 1, 2, ... drafts."""
    return tuple(itertools.accumulate(reversed(rounds[1:])))[::-1]


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and its present state.

    Counts of jobs and pages are taken at one moment under the scheduler's lock. The launched rounds include every round whose
    results are counted. Counts of the device and of the grammar compiler are read just before.
    """

    rounds: int
    replays: int
    host_syncs: int  # waits of the launching thread for the whole device; rounds make none
    event_waits: int  # for the results of a round, or for a pinned slot that was still being copied
    eager_rounds: int  # that replayed no graph
    eager_reason: str  # empty if all rounds are recorded
    graphs: tuple[GraphStats, ...]  # largest first; those that were used
    tokens: int
    prompt_tokens: int  # computed; tokens found in the prefix cache are in reused_tokens
    drafts: DraftCounts
    drafting: DraftStats
    forced_looks: int  # queries of a grammar for its forced next tokens
    mask_fills: int
    matcher_accepts: int
    matcher_rollbacks: int
    host_nodes: Histogram  # seconds of each host node: matcher updates and masks
    longest_host_node_seconds: float
    # Seconds that the main stream waited for masks. Tape: measured. Eager engine: all of host_nodes, as nothing overlaps; if some
    # graphs could not be captured: of the recorded rounds only. CUDA: None, as only a profiler can measure it.
    exposed_wait_seconds: float | None
    grammars: CompileStats
    saved_texts: int  # hidden states written to disk
    unsaved_texts: int  # not written: the disk was too slow or failed
    saving_error: str  # why saving stopped; empty if it did not
    submitted: int
    finished: tuple[tuple[str, int], ...]  # jobs by finish reason
    running: int
    waiting: int
    most_waiting: int  # at any time
    queue_seconds: Histogram  # from submit to a row
    first_token_seconds: Histogram  # from submit to the first token
    pages: int
    free_pages: int  # including pages that are kept only for their prefix
    most_used_pages: int  # at any time, without pages that are kept only for their prefix
    cached_pages: int  # findable by prefix
    evicted_pages: int
    reused_tokens: int  # prompt tokens found in the prefix cache


def take_stats(
    backend: BackendStats,
    host: HostStats,
    grammars: CompileStats,
    counters: Counters,
    launches: GraphCounters,
    rows: RowTable,
    waiting: int,
    states: HiddenStates | None,
    eager: Mapping[GraphKey, str],
) -> EngineStats:
    """A snapshot. The caller holds the scheduler's lock. eager: the keys whose rounds are not recorded, and why."""
    graphs = launches.graphs  # under the lock, so that every round counted in `counters` is among them
    rounds = sum(graph.rounds for graph in graphs)
    eager_rounds = sum(graph.rounds for graph in graphs if graph.key in eager)
    exposed_ns = host.node_ns if eager_rounds == rounds else backend.wait_ns
    return EngineStats(
        rounds=rounds,
        replays=backend.replays,
        host_syncs=backend.syncs,
        event_waits=backend.event_waits,
        eager_rounds=eager_rounds,
        eager_reason="; ".join(dict.fromkeys(eager.values())),
        graphs=graphs,
        tokens=counters.tokens,
        prompt_tokens=counters.prompt_tokens,
        drafts=counters.drafts,
        drafting=counters.drafting,
        forced_looks=host.looks,
        mask_fills=host.fills,
        matcher_accepts=host.accepts,
        matcher_rollbacks=host.rollbacks,
        host_nodes=Histogram(NODE_BOUNDS, host.nodes, host.node_ns / 1e9),
        longest_host_node_seconds=host.longest_node_ns / 1e9,
        exposed_wait_seconds=None if exposed_ns is None else exposed_ns / 1e9,
        grammars=grammars,
        saved_texts=states.saved if states else 0,
        unsaved_texts=states.unsaved if states else 0,
        saving_error=states.error if states else "",
        submitted=counters.submitted,
        finished=tuple((reason.value, counters.finished[reason]) for reason in FinishReason),
        running=len(rows),
        waiting=waiting,
        most_waiting=counters.most_waiting,
        queue_seconds=counters.queue_seconds.histogram,
        first_token_seconds=counters.first_token_seconds.histogram,
        pages=rows.num_pages,
        free_pages=rows.free_pages,
        most_used_pages=rows.most_used_pages,
        cached_pages=rows.cached_pages,
        evicted_pages=rows.evicted_pages,
        reused_tokens=rows.reused_tokens,
    )
