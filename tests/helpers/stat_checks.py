"""What every snapshot of an engine's figures must satisfy, and runs to take some of."""

from __future__ import annotations

from typing import Any

from stepgraph import Engine, EngineStats
from tests.helpers.toy_engines import CONSTRAINTS


def holds(stats: EngineStats) -> None:
    """What is true of every snapshot, whenever it was taken."""
    drafting = stats.drafting
    assert drafting.full + drafting.illegal + drafting.improbable + drafting.ended + drafting.undrafted == drafting.rounds
    assert sum(drafting.accepted) == stats.drafts.accepted <= drafting.tokens <= min(stats.tokens, stats.drafts.accepted + drafting.rounds)
    for places in (drafting.offered, drafting.accepted):
        assert list(places) == sorted(places, reverse=True) and all(count <= drafting.rounds for count in places)
    assert all(accepted <= offered for accepted, offered in zip(drafting.accepted, drafting.offered, strict=True))
    assert stats.drafts.accepted_forced <= stats.drafts.forced and stats.drafts.accepted_looked_up <= stats.drafts.looked_up
    assert stats.drafts.forced + stats.drafts.looked_up <= sum(drafting.offered), "a draft has one origin"
    assert stats.drafts.accepted_forced + stats.drafts.accepted_looked_up <= stats.drafts.accepted
    assert sum(graph.rounds for graph in stats.graphs) == stats.rounds >= stats.eager_rounds
    assert all(graph.padded_rounds <= min(graph.rounds, graph.padded_rows) for graph in stats.graphs)
    ended = sum(count for _, count in stats.finished)
    assert stats.running + stats.waiting + ended <= stats.submitted and stats.most_waiting >= stats.waiting
    assert ended <= stats.submitted and stats.first_token_seconds.count <= stats.queue_seconds.count <= stats.submitted
    assert 0 <= stats.free_pages <= stats.pages and stats.pages - stats.free_pages <= stats.most_used_pages <= stats.pages
    for histogram in (stats.host_nodes, stats.queue_seconds, stats.first_token_seconds):
        assert histogram.total >= 0 and len(histogram.counts) == len(histogram.bounds) + 1


def run(engine: Engine, constraints: Any = CONSTRAINTS, tokens: int = 20, **options: Any) -> int:
    """Submit, step to the end, and return the tokens of all events."""
    for place, constraint in enumerate(constraints):
        engine.submit([1 + place, 2, 3], constraint=constraint, max_new_tokens=tokens, **options)
    return sum(len(event.tokens) for event in engine.stream())
