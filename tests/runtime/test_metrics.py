"""Prometheus metrics: parsed by a strict parser of the text format and compared with EngineStats."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, replace

import pytest

from stepgraph import Constraint, EngineStats
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.runtime.counters import Loss
from stepgraph.runtime.metrics import CONTENT_TYPE, prometheus_text
from stepgraph.runtime.stats import GraphStats, Histogram
from stepgraph.sampling.native import why_not
from tests.helpers.toy_engines import CONSTRAINTS, Setup, shared_engine

NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"[a-zA-Z_][a-zA-Z0-9_]*"
VALUE = r'"(?:[^"\\\n]|\\[\\"n])*"'
PAIR = rf"{LABEL}={VALUE}"
SAMPLE = re.compile(rf"({NAME})(?:\{{({PAIR}(?:,{PAIR})*)\}})? (\S+)")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?Inf|NaN")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
SUFFIXES = {"counter": {""}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}
Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass
class Family:
    kind: str
    description: str
    samples: dict[Key, float] = field(default_factory=dict)


def parsed(text: str) -> dict[str, Family]:
    """Format 0.0.4, with stricter rules: HELP and TYPE before every family, its samples in one block, no duplicates."""
    assert text.endswith("\n") and not text.endswith("\n\n"), "the last line ends, and is not empty"
    families: dict[str, Family] = {}
    name = description = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, description = line[len("# HELP ") :].split(" ", 1)
            assert re.fullmatch(NAME, name) and name not in families and description.strip(), line
        elif line.startswith("# TYPE "):
            typed, kind = line[len("# TYPE ") :].split(" ")
            assert typed == name and name not in families and kind in SUFFIXES, line
            families[name] = Family(kind, description)
        else:
            add_sample(families[name], name, line)
    for name, family in families.items():
        assert family.kind != "counter" or name.endswith("_total")
        assert family.kind == "counter" or not name.endswith("_total")
        if family.kind == "histogram":
            check_histogram(name, family)
    return families


def add_sample(family: Family, name: str, line: str) -> None:
    match = SAMPLE.fullmatch(line)
    assert match, f"no sample: {line!r}"
    sample, pairs, number = match.groups()
    assert sample.startswith(name) and sample[len(name) :] in SUFFIXES[family.kind], f"{line!r} is not of {name}"
    labels = [(pair[0], unescaped(pair[1])) for pair in re.findall(rf"({LABEL})=({VALUE})", pairs or "")]
    assert len(dict(labels)) == len(labels) and not any(label.startswith("__") for label, _ in labels), line
    assert NUMBER.fullmatch(number), line
    key = sample, frozenset(labels)
    assert key not in family.samples, f"twice: {line!r}"
    family.samples[key] = float(number)


def unescaped(value: str) -> str:
    return re.sub(r'\\[\\"n]', lambda match: ESCAPES[match[0]], value[1:-1])


def check_histogram(name: str, family: Family) -> None:
    buckets = sorted((float(dict(labels)["le"]), value) for (sample, labels), value in family.samples.items() if sample == f"{name}_bucket")
    bounds, values = [bound for bound, _ in buckets], [value for _, value in buckets]
    assert bounds[-1] == math.inf and values == sorted(values), "buckets are cumulative, up to +Inf"
    counts = [value for (sample, _), value in family.samples.items() if sample == f"{name}_count"]
    assert counts == [values[-1]], "the last bucket contains all values"
    assert sum(sample == f"{name}_sum" for sample, _ in family.samples) == 1


def value(families: dict[str, Family], name: str, **labels: object) -> float:
    key = f"stepgraph_{name}", frozenset((label, str(text)) for label, text in labels.items())
    family = next(families[known] for known in families if key in families[known].samples)
    return family.samples[key]


def run_once() -> EngineStats:
    engine = shared_engine(Setup(3))
    for index, constraint in enumerate((*CONSTRAINTS[:5], Constraint.regex("[ab]{4}", backend="xgrammar"))):
        engine.submit([1, 2, index], constraint=constraint, max_new_tokens=10)
    for _ in engine.stream():
        pass
    engine.step()  # reads the rounds still in flight
    return engine.stats()


def test_metrics_equal_stats() -> None:
    stats = run_once()
    read = parsed(prometheus_text(stats))
    drafting, grammars, lanes = stats.drafting, stats.grammars, stats.lanes
    for name, figure in {
        "tokens_total": stats.tokens,
        "prompt_tokens_total": stats.prompt_tokens,
        "reused_prompt_tokens_total": stats.reused_tokens,
        "submitted_total": stats.submitted,
        "running": stats.running,
        "waiting": stats.waiting,
        "most_waiting": stats.most_waiting,
        "accepted_drafts_total": stats.drafts.accepted,
        "forced_drafts_total": stats.drafts.forced,
        "accepted_forced_drafts_total": stats.drafts.accepted_forced,
        "looked_up_drafts_total": stats.drafts.looked_up,
        "accepted_looked_up_drafts_total": stats.drafts.accepted_looked_up,
        "drafting_rounds_total": drafting.rounds,
        "drafting_tokens_total": drafting.tokens,
        "full_chains_total": drafting.full,
        "rounds_total": stats.rounds,
        "replays_total": stats.replays,
        "host_syncs_total": stats.host_syncs,
        "event_waits_total": stats.event_waits,
        "mask_fills_total": stats.mask_fills,
        "matcher_accepts_total": stats.matcher_accepts,
        "matcher_rollbacks_total": stats.matcher_rollbacks,
        "longest_host_node_seconds": stats.longest_host_node_seconds,
        "exposed_wait_seconds_total": stats.exposed_wait_seconds,
        "grammar_cache_hits_total": grammars.hits,
        "grammar_cache_misses_total": grammars.misses,
        "grammar_cache_evictions_total": grammars.dropped,
        "grammar_cache_bytes": grammars.nbytes,
        "grammars": grammars.grammars,
        "compiles_total": grammars.compiles,
        "compile_failures_total": grammars.failures,
        "compile_seconds_total": grammars.compile_seconds,
        "longest_compile_seconds": grammars.longest_compile_seconds,
        "compiles_running": grammars.running,
        "compiles_waiting": grammars.waiting,
        "compile_workers_started_total": grammars.workers_started,
        "saved_texts_total": stats.saved_texts,
        "unsaved_texts_total": stats.unsaved_texts,
        "arena_full_total": lanes.arena_full,
        "arena_grammars": lanes.grammars,
        "arena_bytes": lanes.nbytes,
        "arena_evictions_total": lanes.evicted,
        "pages": stats.pages,
        "free_pages": stats.free_pages,
        "most_used_pages": stats.most_used_pages,
        "cached_pages": stats.cached_pages,
        "evicted_pages_total": stats.evicted_pages,
    }.items():
        assert value(read, name) == figure, name
    assert stats.tokens > 0 and stats.drafts.accepted > 0 and stats.mask_fills > 0
    assert all(value(read, "lane_requests_total", lane=lane) == getattr(lanes, lane) for lane in ("device", "host"))
    assert lanes.host > 0 and (lanes.device > 0 or why_not())
    assert all(value(read, "finished_total", reason=reason) == count for reason, count in stats.finished)
    assert all(value(read, "lost_chains_total", cause=loss.value) == getattr(drafting, loss.value) for loss in Loss)
    for position in (1, 2, 3):
        assert value(read, "position_offered_total", position=position) == drafting.offered[position - 1]
        assert value(read, "position_accepted_total", position=position) == drafting.accepted[position - 1]
    for name, histogram in {
        "host_node_seconds": stats.host_nodes,
        "queue_seconds": stats.queue_seconds,
        "first_token_seconds": stats.first_token_seconds,
    }.items():
        assert (value(read, f"{name}_sum"), value(read, f"{name}_count")) == (histogram.total, histogram.count)
        assert [value(read, f"{name}_bucket", le=bound) for bound in (*histogram.bounds, "+Inf")] == list(histogram.cumulative)
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
        for name, family in earlier.items():
            for key, count in family.samples.items():
                assert key in later[name].samples
                assert family.kind == "gauge" or later[name].samples[key] >= count, key


def test_common_labels_are_on_every_line_and_escaped() -> None:
    labels = {"model": 'a "quoted"\\name\nof two lines', "zone": "eu"}
    text = shared_engine(Setup(3)).metrics(labels)
    families = parsed(text)
    assert all(set(labels.items()) <= key[1] for family in families.values() for key in family.samples)
    assert len(families) == text.count("# TYPE") > 40
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_unknown_values_have_no_line_and_eager_rounds_have_a_reason() -> None:
    stats = run_once()
    assert "exposed_wait" not in prometheus_text(replace(stats, exposed_wait_seconds=None))
    assert not parsed(prometheus_text(stats))["stepgraph_eager_rounds_total"].samples
    eager = parsed(prometheus_text(replace(stats, eager_rounds=7, eager_reason="EngineConfig.eager")))
    assert value(eager, "eager_rounds_total", reason="EngineConfig.eager") == 7


def test_large_and_small_values_keep_their_digits() -> None:
    stats = run_once()
    large = replace(stats, tokens=10**18 + 1, longest_host_node_seconds=1e-7, host_nodes=Histogram((1e-5, 1.0), (1, 0, 2), 1e300))
    text = prometheus_text(replace(large, graphs=(GraphStats(GraphKey(4, True, True), 3, 2, 2),)))
    assert f"stepgraph_tokens_total {10**18 + 1}\n" in text, "integers keep all digits"
    assert value(parsed(text), "host_node_seconds_sum") == 1e300


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"le": "1"}, r"labels: got the name 'le'"),
        ({"cause": "x"}, "labels: got the name 'cause'"),
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


@pytest.mark.parametrize(
    "text",
    [
        "stepgraph_a 1\n",
        "# HELP a b\n# TYPE a gauge\na 1\na 1\n",
        "# HELP a b\n# TYPE a gauge\na 1",
        '# HELP a b\n# TYPE a gauge\na{b="c\nd"} 1\n',
        '# HELP a b\n# TYPE a gauge\na{b="c"d"} 1\n',
        "# HELP a b\n# TYPE a counter\na 1\n",
        "# HELP a b\n# TYPE a gauge\na one\n",
        '# HELP a b\n# TYPE a histogram\na_bucket{le="1"} 2\na_bucket{le="+Inf"} 1\na_sum 1\na_count 1\n',
        '# HELP a b\n# TYPE a histogram\na_bucket{le="1"} 1\na_sum 1\na_count 1\n',
    ],
)
def test_parser_rejects_malformed_text(text: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        parsed(text)
