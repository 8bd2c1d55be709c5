"""EngineStats as metrics of prometheus_client, which writes them in its text exposition format."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, fields
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

from stepgraph.runtime.histogram import Histogram
from stepgraph.runtime.scheduler import LossCause
from stepgraph.runtime.stats import EngineStats

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_GRAPH_LABELS = ("rows", "constrained", "sampled", "device", "draft_length", "draft_model")
_RESERVED = frozenset({"le", "cause", "position", "reason", "lane", *_GRAPH_LABELS})

Labels = Mapping[str, object]
Sample = tuple[Labels, float]


def prometheus_text(metrics: Iterable[Metric]) -> str:
    collector: Any = SimpleNamespace(collect=lambda: metrics)
    return generate_latest(collector).decode()


def engine_metrics(engines: Iterable[tuple[Labels, EngineStats]]) -> list[Metric]:
    """Each metric once, with the samples of all engines. ValueError for a label name that is malformed or used by a metric itself."""
    by_name: dict[str, Metric] = {}
    for labels, stats in engines:
        common = _checked_labels(labels)
        for metric in _metrics(stats):
            merged = by_name.setdefault(metric.name, metric)
            samples = [sample._replace(labels={**common, **sample.labels}) for sample in metric.samples]
            merged.samples = samples if merged is metric else merged.samples + samples
    return list(by_name.values())


def _metrics(stats: EngineStats) -> list[Metric]:
    drafts, drafting, lanes = stats.drafts, stats.drafting, stats.lanes
    described = [(part, each) for part in (stats, drafting, stats.grammars, lanes) for each in fields(part) if each.metadata]
    by_lane = [({"lane": lane}, getattr(lanes, lane)) for lane in ("device", "host")]
    by_reason = [({"reason": reason}, count) for reason, count in stats.finished]
    losses = [({"cause": loss.value}, getattr(drafting, loss.value)) for loss in LossCause]
    graphs = [({name: str(value).lower() for name, value in asdict(graph.key).items()}, graph) for graph in stats.graphs]
    return [
        *(_described(part, each) for part, each in described if getattr(part, each.name) is not None),
        counters("finished", "Requests finished, by finish reason; refused: by a constraint or its limits.", by_reason),
        counter("accepted_drafts", "Drafts accepted.", drafts.accepted),
        counters("lost_chains", "Drafting rounds in which not every draft was accepted, by the first cause.", losses),
        counters("position_offered", "Drafts offered, by position in the chain.", _by_position(drafting.offered)),
        counters("position_accepted", "Drafts accepted, by position in the chain.", _by_position(drafting.accepted)),
        counter("forced_drafts", "Drafts forced by a grammar.", drafts.forced),
        counter("accepted_forced_drafts", "Forced drafts accepted.", drafts.accepted_forced),
        counter("looked_up_drafts", "Drafts found by look-up.", drafts.looked_up),
        counter("accepted_looked_up_drafts", "Looked-up drafts accepted.", drafts.accepted_looked_up),
        counter("relaxed_drafts", "Drafts accepted by relaxed acceptance: not the target's choice.", drafts.accepted_relaxed),
        counters(
            "eager_rounds",
            "Rounds that replayed no graph.",
            [({"reason": stats.eager_reason}, stats.eager_rounds)] if stats.eager_reason else [],
        ),
        counters(
            "graph_rounds", "Rounds, by graph; draft_length -1: num_speculative_tokens.", [(key, graph.rounds) for key, graph in graphs]
        ),
        counters("graph_padded_rounds", "Rounds with fewer rows than their graph.", [(key, graph.padded_rounds) for key, graph in graphs]),
        counters("graph_padded_rows", "Rows of graphs without a request.", [(key, graph.padded_rows) for key, graph in graphs]),
        counters("lane_requests", "Constrained requests, by where their grammar is followed.", by_lane),
    ]


def counter(name: str, description: str, value: float) -> Metric:
    return counters(name, description, [({}, value)])


def gauge(name: str, description: str, value: float) -> Metric:
    return _metric(name, "gauge", description, [("", {}, value)])


def counters(name: str, description: str, samples: Iterable[Sample]) -> Metric:
    return _metric(name, "counter", description, [("_total", *sample) for sample in samples])


def histogram(name: str, description: str, histogram: Histogram) -> Metric:
    bounds = zip([*histogram.bounds, "+Inf"], itertools.accumulate(histogram.counts), strict=True)
    buckets = [("_bucket", {"le": bound}, count) for bound, count in bounds]
    return _metric(name, "histogram", description, [*buckets, ("_sum", {}, histogram.total), ("_count", {}, histogram.count)])


def _metric(name: str, kind: str, description: str, samples: Iterable[tuple[str, Labels, float]]) -> Metric:
    metric = Metric(f"stepgraph_{name}", description, kind)
    for suffix, labels, value in samples:
        metric.add_sample(metric.name + suffix, {label: str(text) for label, text in labels.items()}, value)
    return metric


_KINDS: dict[str, Callable[..., Metric]] = {"counter": counter, "gauge": gauge, "histogram": histogram}


def _described(part: object, each: Field[Any]) -> Metric:
    kind = next(kind for kind in _KINDS if kind in each.metadata)
    return _KINDS[kind](each.metadata.get("name", each.name), each.metadata[kind], getattr(part, each.name))


def _by_position(values: Iterable[int]) -> list[Sample]:
    return [({"position": position}, value) for position, value in enumerate(values, 1)]


def _checked_labels(labels: object) -> Mapping[str, str]:
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels: got {type(labels).__name__}, expected a mapping of names to strings, or None")
    for name, text in labels.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in _RESERVED:
            raise ValueError(f"labels: got the name {name!r}, expected letters, digits and _, and none of {', '.join(sorted(_RESERVED))}")
        if not isinstance(text, str):
            raise ValueError(f"labels[{name!r}]: got {type(text).__name__}, expected a string")
    return labels
