"""Prometheus metrics, parsed and compared with EngineStats."""

from __future__ import annotations

import itertools
import pickle
import sys
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepgraph import Constraint, EngineStats
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.runtime.histogram import Histogram
from stepgraph.runtime.metrics import engine_metrics, prometheus_text
from stepgraph.runtime.scheduler import LossCause
from stepgraph.runtime.stats import GraphStats
from stepgraph.sampling.native import why_not
from tests.helpers.toy_engines import CONSTRAINTS, Setup, finish, shared_engine

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]  # by name and labels


def parsed(text: str) -> Samples:
    """Parses with prometheus_client. No metric and no sample occurs twice."""
    families = [*text_string_to_metric_families(text)]
    found = [((sample.name, frozenset(sample.labels.items())), sample.value) for family in families for sample in family.samples]
    assert len({family.name for family in families}) == len(families) and len(dict(found)) == len(found)
    return dict(found)


def text_of(stats: EngineStats) -> str:
    return prometheus_text(engine_metrics([({}, stats)]))


def value(samples: Samples, name: str, **labels: object) -> float:
    return samples[f"stepgraph_{name}", frozenset((label, str(text)) for label, text in labels.items())]


def run_once() -> EngineStats:
    engine = shared_engine(Setup(3))
    for index, constraint in enumerate((*CONSTRAINTS[:5], Constraint.regex("[ab]{4}", backend="xgrammar"))):
        engine.submit([1, 2, index], constraint=constraint, max_new_tokens=10)
    finish(engine)
    engine.step()  # reads the rounds still in flight
    return engine.stats()


def test_metrics_equal_stats() -> None:
    stats = run_once()
    read = parsed(text_of(stats))
    drafting, grammars, lanes = stats.drafting, stats.grammars, stats.lanes
    for source, suffix, names in (
        (stats, "_total", "tokens prompt_tokens submitted rounds replays host_syncs event_waits exposed_wait_seconds"),
        (stats, "_total", "mask_fills matcher_accepts matcher_rollbacks saved_texts unsaved_texts evicted_pages added_pages preemptions"),
        (stats, "", "running waiting most_waiting longest_host_node_seconds pages free_pages most_used_pages cached_pages"),
        (grammars, "_total", "compiles compile_seconds"),
        (grammars, "", "grammars longest_compile_seconds"),
        (lanes, "_total", "arena_full"),
    ):
        for name in names.split():
            assert value(read, name + suffix) == getattr(source, name), name
    for name, figure in {
        "reused_prompt_tokens_total": stats.reused_tokens,
        "accepted_drafts_total": stats.drafts.accepted,
        "forced_drafts_total": stats.drafts.forced,
        "accepted_forced_drafts_total": stats.drafts.accepted_forced,
        "looked_up_drafts_total": stats.drafts.looked_up,
        "accepted_looked_up_drafts_total": stats.drafts.accepted_looked_up,
        "drafting_rounds_total": drafting.rounds,
        "drafting_tokens_total": drafting.tokens,
        "full_chains_total": drafting.full,
        "grammar_cache_hits_total": grammars.hits,
        "grammar_cache_misses_total": grammars.misses,
        "grammar_cache_evictions_total": grammars.dropped,
        "grammar_cache_bytes": grammars.nbytes,
        "compile_failures_total": grammars.failures,
        "compiles_running": grammars.running,
        "compiles_waiting": grammars.waiting,
        "compile_workers_started_total": grammars.workers_started,
        "arena_grammars": lanes.grammars,
        "arena_bytes": lanes.nbytes,
        "arena_evictions_total": lanes.evicted,
    }.items():
        assert value(read, name) == figure, name
    assert stats.tokens > 0 and stats.drafts.accepted > 0 and stats.mask_fills > 0
    assert all(value(read, "lane_requests_total", lane=lane) == getattr(lanes, lane) for lane in ("device", "host"))
    assert lanes.host > 0 and (lanes.device > 0 or why_not())
    assert all(value(read, "finished_total", reason=reason) == count for reason, count in stats.finished)
    assert all(value(read, "lost_chains_total", cause=loss.value) == getattr(drafting, loss.value) for loss in LossCause)
    for position in (1, 2, 3):
        assert value(read, "position_offered_total", position=position) == drafting.offered[position - 1]
        assert value(read, "position_accepted_total", position=position) == drafting.accepted[position - 1]
    for name, histogram in {
        "host_node_seconds": stats.host_nodes,
        "queue_seconds": stats.queue_seconds,
        "first_token_seconds": stats.first_token_seconds,
        "token_seconds": stats.token_seconds,
    }.items():
        assert (value(read, f"{name}_sum"), value(read, f"{name}_count")) == (histogram.total, histogram.count)
        assert [value(read, f"{name}_bucket", le=bound) for bound in (*histogram.bounds, "+Inf")] == list(
            itertools.accumulate(histogram.counts)
        )
    for graph in stats.graphs:
        flags = {name: str(getattr(graph.key, name)).lower() for name in ("constrained", "sampled", "device", "draft_model")}
        key = {"rows": graph.key.rows, **flags, "draft_length": graph.key.draft_length}
        figures = [value(read, f"graph_{name}_total", **key) for name in ("rounds", "padded_rounds", "padded_rows")]
        assert figures == [graph.rounds, graph.padded_rounds, graph.padded_rows]


def test_counters_never_decrease_and_no_line_disappears() -> None:
    engine = shared_engine(Setup(3))
    snapshots = [parsed(engine.metrics())]
    for index, constraint in enumerate(CONSTRAINTS):
        job = engine.submit([1, 2, index], constraint=constraint, max_new_tokens=4 + index)
        snapshots.append(parsed(engine.metrics()))
        if index == 3:
            engine.cancel(job)
    for _ in engine.stream():
        snapshots.append(parsed(engine.metrics()))
    assert len(snapshots) > 20
    for earlier, later in itertools.pairwise(snapshots):
        for key, count in earlier.items():
            assert later[key] >= count or not key[0].endswith(("_total", "_bucket", "_sum", "_count")), key


def test_common_labels_are_on_every_line_and_escaped() -> None:
    labels = {"model": 'a "quoted"\\name\nof two lines', "zone": "eu"}
    text = shared_engine(Setup(3)).metrics(labels)
    assert all(set(labels.items()) <= key[1] for key in parsed(text)) and text.count("# TYPE") > 40


def test_metrics_of_several_engines_are_one_text_without_losses() -> None:
    """Replicas send their statistics by pickle."""
    stats = run_once()
    other = pickle.loads(pickle.dumps(replace(stats, tokens=7)))
    samples = parsed(prometheus_text(engine_metrics([({"replica": "a"}, stats), ({"replica": "b"}, other)])))
    assert (value(samples, "tokens_total", replica="a"), value(samples, "tokens_total", replica="b")) == (stats.tokens, 7)
    assert len(samples) == 2 * len(parsed(text_of(stats)))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "stepgraph.runtime.metrics")
    with pytest.raises(ValueError, match=r"metrics: prometheus_client is not installed: pip install 'stepgraph\[serve\]'"):
        shared_engine(Setup(3)).metrics()


def test_unknown_values_have_no_line_and_eager_rounds_have_a_reason() -> None:
    stats = run_once()
    assert "exposed_wait" not in text_of(replace(stats, exposed_wait_seconds=None))
    assert "eager_rounds_total{" not in text_of(stats)
    eager = parsed(text_of(replace(stats, eager_rounds=7, eager_reason="EngineConfig.eager")))
    assert value(eager, "eager_rounds_total", reason="EngineConfig.eager") == 7


def test_large_and_small_values() -> None:
    large = replace(run_once(), tokens=10**18, longest_host_node_seconds=1e-7, host_nodes=Histogram((1e-5, 1.0), (1, 0, 2), 1e300))
    samples = parsed(text_of(replace(large, graphs=(GraphStats(GraphKey(4, True, True), 3, 2, 2),))))
    found = [value(samples, name) for name in ("tokens_total", "longest_host_node_seconds", "host_node_seconds_sum")]
    assert found == [1e18, 1e-7, 1e300]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"le": "1"}, r"labels: got the name 'le'"),
        ({"cause": "x"}, "labels: got the name 'cause'"),
        ({"draft_length": "x"}, "labels: got the name 'draft_length'"),
        ({"draft_model": "x"}, "labels: got the name 'draft_model'"),
        ({"a-b": "x"}, "labels: got the name 'a-b', expected letters, digits and _"),
        ({"1a": "x"}, "labels: got the name '1a'"),
        ({"__name": "x"}, "labels: got the name '__name'"),
        ({"a\n": "x"}, "labels: got the name"),
        ({"model": 7}, r"labels\['model'\]: got int, expected a string"),
        (["model"], "labels: got list, expected a mapping"),
    ],
)
def test_invalid_labels_raise(labels: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared_engine(Setup(3)).metrics(labels)  # type: ignore[arg-type]
