"""Writes EngineStats in the Prometheus text exposition format 0.0.4.

Written here and not by prometheus_client, which prints counts as floats (10**18 + 1 as 1e+18).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import NamedTuple

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.runtime.counters import Loss
from stepgraph.runtime.stats import EngineStats, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN = frozenset({"le", "cause", "position", "reason", "rows", "constrained", "sampled", "device", "lane"})

Labels = Mapping[str, object]
Sample = tuple[Labels, float]  # labels beyond the common ones, value


class Metric(NamedTuple):
    name: str  # without the prefix
    kind: str  # counter, gauge or histogram
    description: str
    samples: Iterable[Sample]
    suffixes: Iterable[str] = itertools.repeat("")  # of the name, by sample


def prometheus_text(stats: EngineStats, labels: Mapping[str, str] | None = None) -> str:
    """All metrics, with `labels` on every line. ValueError for a label name that is malformed or used by a metric itself."""
    common = _checked_labels(labels)
    return "".join(f"{line}\n" for metric in _metrics(stats) for line in _lines(metric, common))


def _metrics(stats: EngineStats) -> list[Metric]:
    drafts, drafting, grammars, exposed = stats.drafts, stats.drafting, stats.grammars, stats.exposed_wait_seconds
    lanes = stats.lanes
    by_lane = [({"lane": lane}, getattr(lanes, lane)) for lane in ("device", "host")]
    losses = [({"cause": loss.value}, getattr(drafting, loss.value)) for loss in Loss]
    graphs = [(_key(graph.key), graph) for graph in stats.graphs]
    return [
        _counter("tokens", "Tokens emitted.", stats.tokens),
        _counter("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        _counter("reused_prompt_tokens", "Prompt tokens found in the cache.", stats.reused_tokens),
        _counter("submitted", "Requests submitted.", stats.submitted),
        _counters("finished", "Requests finished, by finish reason.", [({"reason": reason}, count) for reason, count in stats.finished]),
        _gauge("running", "Requests with a row.", stats.running),
        _gauge("waiting", "Requests waiting for a row.", stats.waiting),
        _gauge("most_waiting", "Maximum of waiting.", stats.most_waiting),
        _counter("saved_texts", "Texts whose hidden states were saved.", stats.saved_texts),
        _counter("unsaved_texts", "Texts whose hidden states could not be saved.", stats.unsaved_texts),
        _counter("accepted_drafts", "Drafts accepted.", drafts.accepted),
        _counter("drafting_rounds", "Rounds of a row for which drafts could be made.", drafting.rounds),
        _counter("drafting_tokens", "Tokens emitted in these rounds; divided by drafting_rounds: the accepted length.", drafting.tokens),
        _counter("full_chains", "Drafting rounds in which every draft was accepted.", drafting.full),
        _counters("lost_chains", "The other drafting rounds, by the first cause in the chain.", losses),
        _counters("position_offered", "Drafts offered, by position in the chain.", _by_position(drafting.offered)),
        _counters("position_accepted", "Drafts accepted, by position in the chain.", _by_position(drafting.accepted)),
        _counter("forced_drafts", "Drafts forced by a grammar.", drafts.forced),
        _counter("accepted_forced_drafts", "Forced drafts accepted.", drafts.accepted_forced),
        _counter("looked_up_drafts", "Drafts found by look-up.", drafts.looked_up),
        _counter("accepted_looked_up_drafts", "Looked-up drafts accepted.", drafts.accepted_looked_up),
        _counter("relaxed_drafts", "Drafts accepted by relaxed acceptance: not the target's choice.", drafts.accepted_relaxed),
        _counter("rounds", "Rounds launched.", stats.rounds),
        _counter("replays", "Graphs replayed.", stats.replays),
        _counters(
            "eager_rounds",
            "Rounds that replayed no graph.",
            [({"reason": stats.eager_reason}, stats.eager_rounds)] if stats.eager_reason else [],
        ),
        _counters(
            "graph_rounds", "Rounds, by graph; draft_length -1: num_speculative_tokens.", [(key, graph.rounds) for key, graph in graphs]
        ),
        _counters("graph_padded_rounds", "Rounds with fewer rows than their graph.", [(key, graph.padded_rounds) for key, graph in graphs]),
        _counters("graph_padded_rows", "Rows of graphs without a request.", [(key, graph.padded_rows) for key, graph in graphs]),
        _counter("host_syncs", "Waits of the launching thread for the whole device.", stats.host_syncs),
        _counter("event_waits", "Waits for the results of a round, or for pinned memory that is still being copied.", stats.event_waits),
        _counter("mask_fills", "Masks filled on the host.", stats.mask_fills),
        _counter("matcher_accepts", "Tokens accepted by matchers.", stats.matcher_accepts),
        _counter("matcher_rollbacks", "Rollbacks of matchers.", stats.matcher_rollbacks),
        _gauge("longest_host_node_seconds", "Duration of the longest host node.", stats.longest_host_node_seconds),
        *([] if exposed is None else [_counter("exposed_wait_seconds", "Time that the main stream waited for masks.", exposed)]),
        _counter("grammar_cache_hits", "Grammars found compiled or being compiled.", grammars.hits),
        _counter("grammar_cache_misses", "Grammars that had to be compiled.", grammars.misses),
        _counter("grammar_cache_evictions", "Grammars evicted.", grammars.dropped),
        _gauge("grammar_cache_bytes", "Bytes of the cached grammars.", grammars.nbytes),
        _gauge("grammars", "Cached grammars.", grammars.grammars),
        _counter("compiles", "Successful compiles.", grammars.compiles),
        _counter("compile_failures", "Failed compiles.", grammars.failures),
        _counter("compile_seconds", "Total compile time.", grammars.compile_seconds),
        _gauge("longest_compile_seconds", "Duration of the longest compile.", grammars.longest_compile_seconds),
        _gauge("compiles_running", "Compiles in progress.", grammars.running),
        _gauge("compiles_waiting", "Compiles waiting for a thread.", grammars.waiting),
        _counter("compile_workers_started", "Worker processes started.", grammars.workers_started),
        _counters("lane_requests", "Constrained requests, by where their grammar is followed.", by_lane),
        _counter("arena_full", "Requests whose grammar found no room on the device.", lanes.arena_full),
        _gauge("arena_grammars", "Grammars on the device.", lanes.grammars),
        _gauge("arena_bytes", "Bytes of the grammars on the device.", lanes.nbytes),
        _counter("arena_evictions", "Grammars evicted from the device.", lanes.evicted),
        _gauge("pages", "Cache pages.", stats.pages),
        _gauge("free_pages", "Free pages, including pages kept only for their prefix.", stats.free_pages),
        _gauge("most_used_pages", "Maximum of pages in use.", stats.most_used_pages),
        _gauge("cached_pages", "Pages findable by prefix.", stats.cached_pages),
        _counter("evicted_pages", "Cached pages evicted.", stats.evicted_pages),
        _histogram("host_node_seconds", "Duration of host nodes.", stats.host_nodes),
        _histogram("queue_seconds", "Time from submit to a row.", stats.queue_seconds),
        _histogram("first_token_seconds", "Time from submit to the first token.", stats.first_token_seconds),
    ]


def _counter(name: str, description: str, value: float) -> Metric:
    return _counters(name, description, [({}, value)])


def _gauge(name: str, description: str, value: float) -> Metric:
    return Metric(name, "gauge", description, [({}, value)])


def _counters(name: str, description: str, samples: Iterable[Sample]) -> Metric:
    return Metric(f"{name}_total", "counter", description, samples)


def _histogram(name: str, description: str, histogram: Histogram) -> Metric:
    bounds = [*map(_number, histogram.bounds), "+Inf"]
    buckets = [({"le": bound}, count) for bound, count in zip(bounds, histogram.cumulative, strict=True)]
    suffixes = [*["_bucket"] * len(buckets), "_sum", "_count"]
    return Metric(name, "histogram", description, [*buckets, ({}, histogram.total), ({}, histogram.count)], suffixes)


def _key(key: GraphKey) -> Labels:
    return {name: str(value).lower() for name, value in asdict(key).items()}


def _by_position(values: Iterable[int]) -> list[Sample]:
    return [({"position": position}, value) for position, value in enumerate(values, 1)]


def _lines(metric: Metric, common: Labels) -> Iterator[str]:
    name = f"stepgraph_{metric.name}"
    yield f"# HELP {name} {metric.description}"
    yield f"# TYPE {name} {metric.kind}"
    for suffix, (labels, value) in zip(metric.suffixes, metric.samples, strict=False):
        yield _line(name + suffix, {**common, **labels}, value)


def _line(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _checked_labels(labels: Mapping[str, str] | None) -> Mapping[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels: got {type(labels).__name__}, expected a mapping of names to strings, or None")
    for name, text in labels.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in _OWN:
            raise ValueError(f"labels: got the name {name!r}, expected letters, digits and _, and none of {', '.join(sorted(_OWN))}")
        if not isinstance(text, str):
            raise ValueError(f"labels[{name!r}]: got {type(text).__name__}, expected a string")
    return labels
