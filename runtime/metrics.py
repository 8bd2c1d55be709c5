"""An engine's figures as Prometheus reads them: the text exposition format 0.0.4. Knows figures and names, and no engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from stepgraph.graphs.shapes import GraphKey
from stepgraph.runtime.stats import EngineStats, Histogram, Loss

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN = frozenset({"le", "cause", "position", "reason", "rows", "constrained", "sampled"})

Labels = Mapping[str, object]
Sample = tuple[Labels, float]  # the labels that tell the lines of one metric apart, and a value


class Metric(NamedTuple):
    name: str  # without the prefix
    kind: str  # counter or gauge
    told: str
    samples: Iterable[Sample]


class Distribution(NamedTuple):
    name: str
    told: str
    histogram: Histogram


def prometheus_text(stats: EngineStats, labels: Mapping[str, str] | None = None) -> str:
    """Every figure of `stats` that a serving loop graphs. ValueError for a label that is no label's name, or one of the metrics' own."""
    common = _checked(labels)
    lines = [line for metric in _metrics(stats) for line in _metric_lines(metric, common)]
    lines += [line for distribution in _distributions(stats) for line in _histogram_lines(distribution, common)]
    return "\n".join(lines) + "\n"


def _metrics(stats: EngineStats) -> Iterator[Metric]:
    yield from _jobs(stats)
    yield from _drafts(stats)
    yield from _rounds(stats)
    yield from _grammars(stats)
    yield from _pages(stats)


def _jobs(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("tokens", "Tokens emitted.", stats.tokens)
    yield _counter("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
    yield _counter("reused_prompt_tokens", "Prompt tokens found in the cache.", stats.reused_tokens)
    yield _counter("submitted", "Requests taken.", stats.submitted)
    ends = [({"reason": reason}, count) for reason, count in stats.finished]
    yield _counters("finished", "Requests ended, by finish reason.", ends)
    yield _gauge("running", "Requests that have a row.", stats.running)
    yield _gauge("waiting", "Requests that wait for a row.", stats.waiting)
    yield _gauge("most_waiting", "Most requests that waited at any time.", stats.most_waiting)
    yield _counter("saved_texts", "Texts whose hidden states are on disk.", stats.saved_texts)
    yield _counter("unsaved_texts", "Texts whose hidden states are not.", stats.unsaved_texts)


def _drafts(stats: EngineStats) -> Iterator[Metric]:
    drafting = stats.drafting
    yield _counter("accepted_drafts", "Drafts that held.", stats.drafts.accepted)
    yield _counter("drafting_rounds", "Rounds of a row that could have drafts.", drafting.rounds)
    yield _counter("drafting_tokens", "Tokens emitted in these; over drafting_rounds: the accepted length.", drafting.tokens)
    yield _counter("full_chains", "Drafting rounds in which every draft held.", drafting.full)
    lost = [({"cause": loss.value}, getattr(drafting, loss.value)) for loss in Loss]
    yield _counters("lost_chains", "Drafting rounds in which not every draft held, by what came first.", lost)
    yield _counters("position_offered", "Drafts offered, by their place in the chain.", _by_position(drafting.offered))
    yield _counters("position_accepted", "Drafts that held, by their place in the chain.", _by_position(drafting.accepted))
    yield _counter("forced_drafts", "Drafts that a grammar forced.", stats.drafts.forced)
    yield _counter("accepted_forced_drafts", "Those of them that held.", stats.drafts.accepted_forced)
    yield _counter("looked_up_drafts", "Drafts that a look-up found.", stats.drafts.looked_up)
    yield _counter("accepted_looked_up_drafts", "Those of them that held.", stats.drafts.accepted_looked_up)


def _rounds(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("rounds", "Rounds launched.", stats.rounds)
    yield _counter("replays", "Graphs replayed.", stats.replays)
    yield _counters(
        "eager_rounds",
        "Rounds that replayed no graph.",
        [({"reason": stats.eager_reason}, stats.eager_rounds)] if stats.eager_reason else [],
    )
    graphs = [(_key(graph.key), graph) for graph in stats.graphs]
    yield _counters("graph_rounds", "Rounds by the graph that served them.", [(key, graph.rounds) for key, graph in graphs])
    yield _counters(
        "graph_padded_rounds", "Rounds with fewer rows than their graph.", [(key, graph.padded_rounds) for key, graph in graphs]
    )
    yield _counters("graph_padded_rows", "Rows of graphs that no request sat in.", [(key, graph.padded_rows) for key, graph in graphs])
    yield _counter("host_syncs", "Waits of the launching thread for the whole device.", stats.host_syncs)
    yield _counter("event_waits", "Waits for a round's results, or for pinned memory that is still being copied.", stats.event_waits)


def _grammars(stats: EngineStats) -> Iterator[Metric]:
    grammars = stats.grammars
    yield _counter("mask_fills", "Masks filled.", stats.mask_fills)
    yield _counter("matcher_accepts", "Tokens that matchers were given.", stats.matcher_accepts)
    yield _counter("matcher_rollbacks", "Rollbacks of matchers.", stats.matcher_rollbacks)
    yield _gauge("longest_host_node_seconds", "The longest host node so far.", stats.longest_host_node_seconds)
    if stats.exposed_wait_seconds is not None:
        yield _counter("exposed_wait_seconds", "Time that the main stream stood waiting for masks.", stats.exposed_wait_seconds)
    yield _counter("grammar_cache_hits", "Grammars found compiled, or on their way.", grammars.hits)
    yield _counter("grammar_cache_misses", "Grammars that had to be compiled.", grammars.misses)
    yield _counter("grammar_cache_evictions", "Grammars given up to make room.", grammars.dropped)
    yield _gauge("grammar_cache_bytes", "Bytes of the grammars kept.", grammars.nbytes)
    yield _gauge("grammars", "Grammars kept.", grammars.grammars)
    yield _counter("compiles", "Compiles that ended with a grammar.", grammars.compiles)
    yield _counter("compile_failures", "Compiles that did not.", grammars.failures)
    yield _counter("compile_seconds", "Time that compiles took.", grammars.compile_seconds)
    yield _gauge("longest_compile_seconds", "The longest compile so far.", grammars.longest_compile_seconds)
    yield _gauge("compiles_running", "Compiles on their way.", grammars.running)
    yield _gauge("compiles_waiting", "Compiles that wait for a thread.", grammars.waiting)
    yield _counter("compile_workers_started", "Worker processes started.", grammars.workers_started)


def _pages(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("pages", "Cache pages there are.", stats.pages)
    yield _gauge("free_pages", "Pages that can be had, those kept for their prefix included.", stats.free_pages)
    yield _gauge("most_used_pages", "Most pages in use at any time.", stats.most_used_pages)
    yield _gauge("cached_pages", "Pages that a request may find its prefix in.", stats.cached_pages)
    yield _counter("evicted_pages", "Pages given up with their prefix.", stats.evicted_pages)


def _distributions(stats: EngineStats) -> Iterator[Distribution]:
    yield Distribution("host_node_seconds", "Time of each host node.", stats.host_nodes)
    yield Distribution("queue_seconds", "Time from a request's submit to its row.", stats.queue_seconds)
    yield Distribution("first_token_seconds", "Time from a request's submit until its first token was known.", stats.first_token_seconds)


def _counter(name: str, told: str, value: float) -> Metric:
    return _counters(name, told, [({}, value)])


def _gauge(name: str, told: str, value: float) -> Metric:
    return Metric(name, "gauge", told, [({}, value)])


def _counters(name: str, told: str, samples: Iterable[Sample]) -> Metric:
    return Metric(f"{name}_total", "counter", told, samples)


def _key(key: GraphKey) -> Labels:
    return {"rows": key.rows, "constrained": str(key.constrained).lower(), "sampled": str(key.sampled).lower()}


def _by_position(values: Iterable[int]) -> list[Sample]:
    return [({"position": place}, value) for place, value in enumerate(values, 1)]


def _metric_lines(metric: Metric, common: Labels) -> Iterator[str]:
    name = f"stepgraph_{metric.name}"
    yield from _head(name, metric.kind, metric.told)
    for labels, value in metric.samples:
        yield _line(name, {**common, **labels}, value)


def _histogram_lines(distribution: Distribution, common: Labels) -> Iterator[str]:
    name, histogram = f"stepgraph_{distribution.name}", distribution.histogram
    yield from _head(name, "histogram", distribution.told)
    bounds = [*(_number(bound) for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.cumulative, strict=True):
        yield _line(f"{name}_bucket", {**common, "le": bound}, count)
    yield _line(f"{name}_sum", common, histogram.total)
    yield _line(f"{name}_count", common, histogram.count)


def _head(name: str, kind: str, told: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    told = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
    return f"{name}{{{told}}} {_number(value)}" if told else f"{name} {_number(value)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _checked(labels: Mapping[str, str] | None) -> Mapping[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels: got {type(labels).__name__}, want a mapping of names to texts, or None")
    for name, text in labels.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in _OWN:
            raise ValueError(f"labels: got the name {name!r}, want letters, digits and _, and none of {', '.join(sorted(_OWN))}")
        if not isinstance(text, str):
            raise ValueError(f"labels[{name!r}]: got {type(text).__name__}, want a string")
    return labels
