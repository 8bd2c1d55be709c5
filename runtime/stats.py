"""The frozen snapshot that `Engine.stats()` returns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.runtime.build import EngineParts
from stepgraph.runtime.device_grammars import INT_BYTES
from stepgraph.runtime.histogram import Histogram
from stepgraph.runtime.job import FinishReason
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

    rounds: int = field(metadata={"counter": "Rounds of a row for which drafts could be made.", "name": "drafting_rounds"})
    tokens: int = field(
        metadata={"counter": "Tokens emitted in these rounds; divided by drafting_rounds: the accepted length.", "name": "drafting_tokens"}
    )
    full: int = field(metadata={"counter": "Drafting rounds in which every draft was accepted.", "name": "full_chains"})
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
    arena_full: int = field(metadata={"counter": "Requests whose grammar found no room on the device."})
    grammars: int = field(metadata={"gauge": "Grammars on the device.", "name": "arena_grammars"})  # used by requests or not
    nbytes: int = field(metadata={"gauge": "Bytes of the grammars on the device.", "name": "arena_bytes"})
    evicted: int = field(metadata={"counter": "Grammars evicted from the device.", "name": "arena_evictions"})


@shows_fields
@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and its present state.

    Counts of jobs and pages are taken at one moment under the lock of the queue. The launched rounds include every round whose
    results are counted. Counts of the device and of the grammar compiler are read just before. A field with metadata, also of a part, is
    a metric of this kind and description, with the name of the field or `name`.
    """

    rounds: int = field(metadata={"counter": "Rounds launched."})
    replays: int = field(metadata={"counter": "Graphs replayed."})
    host_syncs: int = field(metadata={"counter": "Waits of the launching thread for the whole device; rounds make none."})
    event_waits: int = field(metadata={"counter": "Waits for results and for memory that is still being copied, also in captures."})
    eager_rounds: int  # rounds that replayed no graph
    eager_reason: str  # empty if all rounds are recorded
    graphs: tuple[GraphStats, ...]  # largest first; those that were used
    tokens: int = field(metadata={"counter": "Tokens emitted."})
    prompt_tokens: int = field(metadata={"counter": "Prompt tokens computed."})  # tokens found in the prefix cache are in reused_tokens
    drafts: DraftCounts
    drafting: DraftStats
    forced_looks: int  # queries of a grammar for its forced next tokens
    mask_fills: int = field(metadata={"counter": "Masks filled on the host."})
    matcher_accepts: int = field(metadata={"counter": "Tokens accepted by matchers."})
    matcher_rollbacks: int = field(metadata={"counter": "Rollbacks of matchers."})
    host_nodes: Histogram = field(metadata={"histogram": "Duration of host nodes.", "name": "host_node_seconds"})  # updates and masks
    longest_host_node_seconds: float = field(metadata={"gauge": "Duration of the longest host node."})
    # Seconds that the main stream waited for masks. Tape: measured. Eager engine: all of host_nodes, as nothing overlaps; if some
    # graphs could not be captured: of the recorded rounds only. CUDA: None, as only a profiler can measure it.
    exposed_wait_seconds: float | None = field(metadata={"counter": "Time that the main stream waited for masks."})
    grammars: CompileStats
    lanes: LaneStats
    saved_texts: int = field(metadata={"counter": "Texts whose hidden states were saved."})
    unsaved_texts: int = field(metadata={"counter": "Texts whose hidden states could not be saved."})  # the disk was too slow or failed
    saving_error: str  # why saving stopped; empty if it did not
    submitted: int = field(metadata={"counter": "Requests submitted."})
    # Jobs by finish reason; "refused" are those with the reason "error" whose constraint could not be compiled or exceeded a limit
    finished: tuple[tuple[str, int], ...]
    preemptions: int = field(metadata={"counter": "Requests that lost their row and continue, for another's priority or for pages."})
    running: int = field(metadata={"gauge": "Requests with a row."})
    waiting: int = field(metadata={"gauge": "Requests waiting for a row."})
    most_waiting: int = field(metadata={"gauge": "Maximum of waiting."})
    queue_seconds: Histogram = field(metadata={"histogram": "Time from submit to a row."})
    first_token_seconds: Histogram = field(metadata={"histogram": "Time from submit to the first token."})
    token_seconds: Histogram = field(metadata={"histogram": "Time per token after the first, of each finished request."})
    pages: int = field(metadata={"gauge": "Cache pages."})
    free_pages: int = field(metadata={"gauge": "Free pages, including pages kept only for their prefix."})
    most_used_pages: int = field(metadata={"gauge": "Maximum of pages in use, without pages kept only for their prefix."})
    cached_pages: int = field(metadata={"gauge": "Pages findable by prefix."})
    evicted_pages: int = field(metadata={"counter": "Cached pages evicted."})
    added_pages: int = field(metadata={"counter": "Pages added to requests that decode."})
    reused_tokens: int = field(metadata={"counter": "Prompt tokens found in the cache.", "name": "reused_prompt_tokens"})


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
            queue_seconds=counters.queue_seconds.snapshot(),
            first_token_seconds=counters.first_token_seconds.snapshot(),
            token_seconds=counters.token_seconds.snapshot(),
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


def _at_least(rounds: Sequence[int]) -> tuple[int, ...]:
    """Convert counts of rounds with exactly 0, 1, ... drafts to counts of rounds with at least 1, 2, ... drafts."""
    return tuple(itertools.accumulate(reversed(rounds[1:])))[::-1]
