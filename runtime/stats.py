"""The frozen snapshot that `Engine.stats()` returns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.runtime.build import EngineParts
from stepgraph.runtime.device_grammars import INT_BYTES
from stepgraph.runtime.finish_reason import FinishReason
from stepgraph.runtime.histogram import SECONDS_BOUNDS, HistogramBuilder
from stepgraph.runtime.request import DraftCounts
from stepgraph.runtime.scheduler import REFUSED_CONSTRAINT, Counters, LossCause
from stepgraph.sampling.fields import shows_fields
from stepgraph.sampling.grammar.compile.compiler import CompileStats
from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS

NODE_BOUNDS = tuple(bound / 1e9 for bound in NODE_BOUNDS_NS)


@dataclass(frozen=True)
class DraftStats:
    """Acceptance of drafts, counted once per row and round; `rounds` = full + illegal + improbable + ended + undrafted.

    The first round of a request counts only if it had drafts. Requests without speculation are not counted.
    """

    rounds: int
    tokens: int  # emitted in these rounds
    full: int  # rounds in which every requested draft was accepted
    illegal: int  # illegal to undrafted: the other rounds by LossCause
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
class LaneStats:
    """Counts of requests by grammar lane when they first had a row, and the arena."""

    off: str  # why all are followed on the host; empty if they can be on the device
    device: int  # requests
    host: int
    arena_full: int  # requests on the host because the arena was full
    grammars: int  # in the arena, used by requests or not
    nbytes: int  # of these grammars
    evicted: int


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


@shows_fields
@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and its present state.

    Counts of jobs and pages are taken at one moment under the lock of the queue. The launched rounds include every round whose
    results are counted. Counts of the device and of the grammar compiler are read just before.
    """

    rounds: int
    replays: int
    host_syncs: int  # waits of the launching thread for the whole device; rounds make none
    event_waits: int  # for the results of a round, or for a pinned slot that was still being copied
    eager_rounds: int  # rounds that replayed no graph
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
    lanes: LaneStats
    saved_texts: int  # hidden states written to disk
    unsaved_texts: int  # not written: the disk was too slow or failed
    saving_error: str  # why saving stopped; empty if it did not
    submitted: int
    # Jobs by finish reason; "refused" are those with the reason "error" whose constraint could not be compiled or exceeded a limit
    finished: tuple[tuple[str, int], ...]
    preemptions: int  # how often a request lost its row and continued, for another's priority or for pages
    running: int
    waiting: int
    most_waiting: int  # at any time
    queue_seconds: Histogram  # from submit to a row
    first_token_seconds: Histogram  # from submit to the first token
    token_seconds: Histogram  # per later token, of each finished request
    pages: int
    free_pages: int  # including pages that are kept only for their prefix
    most_used_pages: int  # at any time, without pages that are kept only for their prefix
    cached_pages: int  # findable by prefix
    evicted_pages: int
    added_pages: int  # to requests that decode
    reused_tokens: int  # prompt tokens found in the prefix cache


def take_stats(parts: EngineParts) -> EngineStats:
    device, host, graphs, rows, states = parts.backend.stats, parts.host_link.stats, parts.graphs, parts.scheduler.rows, parts.hidden_states
    lane, arena = parts.grammars, parts.grammars.arena
    grammars, counters, queue = parts.compiler.stats if parts.compiler else CompileStats(), parts.scheduler.counters, parts.queue
    with queue.lock:
        launches = graph_stats(parts)  # under the lock, so that every round counted in `counters` is among them
        rounds = sum(graph.rounds for graph in launches)
        eager_rounds = sum(graph.rounds for graph in launches if graph.key in graphs.eager)
        exposed_ns = host.node_ns if parts.config.eager else device.wait_ns
        return EngineStats(
            rounds=rounds,
            replays=device.replays,
            host_syncs=device.syncs,
            event_waits=device.event_waits,
            eager_rounds=eager_rounds,
            eager_reason="; ".join(dict.fromkeys(graphs.eager.values())),
            graphs=launches,
            tokens=counters.tokens,
            prompt_tokens=counters.prompt_tokens,
            drafts=counters.drafts,
            drafting=draft_stats(counters),
            forced_looks=host.looks,
            mask_fills=host.fills,
            matcher_accepts=host.accepts,
            matcher_rollbacks=host.rollbacks,
            host_nodes=Histogram(NODE_BOUNDS, host.nodes, host.node_ns / 1e9),
            longest_host_node_seconds=host.longest_node_ns / 1e9,
            exposed_wait_seconds=None if exposed_ns is None else exposed_ns / 1e9,
            grammars=grammars,
            lanes=LaneStats(lane.why_off, lane.on_device, lane.on_host, lane.arena_full, len(arena), arena.used * INT_BYTES, arena.evicted),
            saved_texts=states.writer.saved if states else 0,
            unsaved_texts=states.writer.unsaved if states else 0,
            saving_error=states.writer.error if states else "",
            submitted=queue.submitted,
            finished=tuple((reason, counters.finished[reason]) for reason in (*map(str, FinishReason), REFUSED_CONSTRAINT)),
            preemptions=counters.preemptions,
            running=len(rows),
            waiting=len(queue.waiting),
            most_waiting=queue.most_waiting,
            queue_seconds=histogram(counters.queue_seconds),
            first_token_seconds=histogram(counters.first_token_seconds),
            token_seconds=histogram(counters.token_seconds),
            pages=parts.limits.num_pages,
            free_pages=rows.page_cache.num_free,
            most_used_pages=rows.most_used_pages,
            cached_pages=len(rows.page_cache),
            evicted_pages=rows.page_cache.evicted,
            added_pages=rows.added_pages,
            reused_tokens=rows.reused_tokens,
        )


def graph_stats(parts: EngineParts) -> tuple[GraphStats, ...]:
    """Largest first."""
    by_key: dict[GraphKey, list[int]] = {}
    for (kind, drafting), rounds in tuple(parts.in_flight.rounds_by_kind.items()):
        rows, key = kind.rows, parts.graphs.key_for(*kind, drafting)
        sums = by_key.setdefault(key, [0, 0, 0])
        sums[0] += rounds
        sums[1] += rounds if rows < key.rows else 0
        sums[2] += rounds * (key.rows - rows)
    return tuple(GraphStats(key, *sums) for key, sums in sorted(by_key.items(), reverse=True))


def draft_stats(counters: Counters) -> DraftStats:
    return DraftStats(
        rounds=sum(counters.losses.values()),
        tokens=counters.drafting_tokens,
        full=counters.losses[None],
        offered=_at_least(counters.offered),
        accepted=_at_least(counters.accepted),
        **{loss.value: counters.losses[loss] for loss in LossCause},
    )


def histogram(builder: HistogramBuilder) -> Histogram:
    return Histogram(SECONDS_BOUNDS, tuple(builder.counts), builder.total)


def _at_least(rounds: Sequence[int]) -> tuple[int, ...]:
    """Convert counts of rounds with exactly 0, 1, ... drafts to counts of rounds with at least 1, 2, ... drafts."""
    return tuple(itertools.accumulate(reversed(rounds[1:])))[::-1]
