"""An engine's figures, gathered from those who count. For any thread."""

from __future__ import annotations

from collections.abc import Mapping

from stepgraph.graphs.capture import Backend
from stepgraph.graphs.shapes import GraphKey
from stepgraph.runtime.extras.hidden_states import HiddenStates
from stepgraph.runtime.grammar_queue import GrammarQueue
from stepgraph.runtime.in_flight import InFlight
from stepgraph.runtime.request import FinishReason
from stepgraph.runtime.scheduler import Scheduler
from stepgraph.runtime.stats import EngineStats, Histogram
from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS, HostLink

NODE_BOUNDS = tuple(bound / 1e9 for bound in NODE_BOUNDS_NS)


def take_stats(
    backend: Backend,
    host_link: HostLink,
    scheduler: Scheduler,
    in_flight: InFlight,
    grammars: GrammarQueue,
    states: HiddenStates | None,
    eager: Mapping[GraphKey, str],
) -> EngineStats:
    """`eager`: the keys whose rounds are not recorded, and why."""
    counts, host, compiles, counters, rows = backend.stats, host_link.stats, grammars.stats, scheduler.counters, scheduler.rows
    with scheduler.lock:  # the launches behind it: what a job was told of was launched
        graphs = in_flight.launches.graphs
        rounds = sum(graph.rounds for graph in graphs)
        eager_rounds = sum(graph.rounds for graph in graphs if graph.key in eager)
        waited = host.node_ns if eager_rounds == rounds else counts.wait_ns
        return EngineStats(
            rounds=rounds,
            replays=counts.replays,
            host_syncs=counts.syncs,
            event_waits=counts.event_waits,
            eager_rounds=eager_rounds,
            eager_reason="; ".join(dict.fromkeys(eager.values())),
            graphs=graphs,
            tokens=counters.tokens,
            prompt_tokens=counters.prompt_tokens,
            drafting=counters.drafting,
            **counters.drafts._asdict(),
            forced_looks=host.looks,
            mask_fills=host.fills,
            matcher_accepts=host.accepts,
            matcher_rollbacks=host.rollbacks,
            host_nodes=Histogram(NODE_BOUNDS, host.nodes, host.node_ns / 1e9),
            longest_host_node_seconds=host.longest_node_ns / 1e9,
            exposed_wait_seconds=None if waited is None else waited / 1e9,
            grammars=compiles,
            saved_texts=states.saved if states else 0,
            unsaved_texts=states.unsaved if states else 0,
            saving_error=states.error if states else "",
            submitted=counters.submitted,
            finished=tuple((reason.value, counters.finished[reason]) for reason in FinishReason),
            running=len(scheduler.active),
            waiting=scheduler.waiting,
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
