"""Invariants of EngineStats, and a run that produces statistics."""

from __future__ import annotations

from typing import Any

from stepgraph import Engine, EngineStats
from tests.helpers.toy_engines import CONSTRAINTS


def check_invariants(stats: EngineStats) -> None:
    """Check the invariants of a snapshot taken at any time."""
    drafting = stats.drafting
    assert drafting.full + drafting.illegal + drafting.improbable + drafting.ended + drafting.undrafted == drafting.rounds
    assert sum(drafting.accepted) == stats.drafts.accepted <= drafting.tokens <= min(stats.tokens, stats.drafts.accepted + drafting.rounds)
    for positions in (drafting.offered, drafting.accepted):
        assert list(positions) == sorted(positions, reverse=True) and all(count <= drafting.rounds for count in positions)
    assert all(accepted <= offered for accepted, offered in zip(drafting.accepted, drafting.offered, strict=True))
    assert stats.drafts.accepted_forced <= stats.drafts.forced and stats.drafts.accepted_looked_up <= stats.drafts.looked_up
    assert stats.drafts.forced + stats.drafts.looked_up <= sum(drafting.offered), "forced and looked up are disjoint"
    assert stats.drafts.accepted_forced + stats.drafts.accepted_looked_up <= stats.drafts.accepted
    assert sum(graph.rounds for graph in stats.graphs) == stats.rounds >= stats.eager_rounds
    assert all(graph.padded_rounds <= min(graph.rounds, graph.padded_rows) for graph in stats.graphs)
    ended = sum(count for _, count in stats.finished)
    assert stats.running + stats.waiting + ended <= stats.submitted and stats.most_waiting >= stats.waiting
    assert ended <= stats.submitted and stats.first_token_seconds.count <= stats.queue_seconds.count <= stats.submitted
    assert 0 <= stats.free_pages <= stats.pages and stats.pages - stats.free_pages <= stats.most_used_pages <= stats.pages
    for histogram in (stats.host_nodes, stats.queue_seconds, stats.first_token_seconds, stats.token_seconds):
        assert histogram.total >= 0 and len(histogram.counts) == len(histogram.bounds) + 1


def run(engine: Engine, constraints: Any = CONSTRAINTS, tokens: int = 20, **options: Any) -> int:
    """Submit, step to the end, and return the tokens of all events."""
    for index, constraint in enumerate(constraints):
        engine.submit([1 + index, 2, 3], constraint=constraint, max_new_tokens=tokens, **options)
    return sum(len(event.tokens) for event in engine.stream())
