"""The report: one JSON document, the same for every profiler. Schema: `tests/data/profile_report.schema.json`.

Idle: time without device work on the main stream. A host node is hidden while the main stream works and exposed otherwise; the two
add up to its time.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.profiling.spans import MAIN, NO_ROUND, Interval, Profile, Span, intersection, subtract, total_length, union

VERSION = 1
MASK_READERS = ("accept", "choose_draft")  # stages that wait for a mask; used if waits were not recorded
Document = dict[str, Any]


class Work:
    """An index of the device work of a profile."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(spans)
        self.stages = [span for span in self.spans if span.kind == "stage"]
        self.hosts = [span for span in self.spans if span.kind == "host"]
        self.waits = [span for span in self.spans if span.kind == "wait" and span.stream == MAIN]
        self.busy = union((span.start_ns, span.end_ns) for span in self.stages if span.stream == MAIN)
        self.windows = self._windows()
        self._begins = [start for start, _ in self.windows.values()]

    def _windows(self) -> dict[int, Interval]:
        """Start of the first and end of the last activity of a round on the main stream."""
        windows: dict[int, Interval] = {}
        for span in self.spans:
            if span.stream == MAIN and span.kind in ("stage", "wait") and span.round != NO_ROUND:
                start, end = windows.get(span.round, (span.start_ns, span.end_ns))
                windows[span.round] = (min(start, span.start_ns), max(end, span.end_ns))
        return dict(sorted(windows.items()))

    def round_of(self, span: Span) -> int:
        """The round before an activity between rounds."""
        if span.round != NO_ROUND:
            return span.round
        at = bisect.bisect_right(self._begins, span.start_ns) - 1
        return NO_ROUND if at < 0 else list(self.windows)[at]

    def idle_in(self, window: Interval) -> list[Interval]:
        return subtract(window, self.busy)

    def between(self) -> list[Interval]:
        """Time from the end of a round to the start of the next, if both were recorded."""
        pairs = itertools.pairwise(self.windows.items())
        return [(first[1], max(first[1], second[0])) for (number, first), (after, second) in pairs if after == number + 1]


def document(profile: Profile) -> Document:
    """The report; ValueError if the profile has no round."""
    work = Work(profile.spans)
    if not work.windows:
        sources = ", ".join(profile.sources) or "the profile"
        raise ValueError(f"{sources}: no round in it; expected a range of rounds that the engine reached, see --rounds of nsys_profile.py")
    return {
        "document": "stepgraph profile",
        "version": VERSION,
        "backend": profile.backend,
        "sources": list(profile.sources),
        "rounds": _rounds(work),
        "stages": _stages(work),
        "idle": _idle(work),
        "host_nodes": _host_nodes(work, profile.counters or {}, profile.without_host_nodes),
        "exposed_wait": _exposed_wait(work),
        "acceptance": _acceptance(profile.counters or {}),
        "notes": list(profile.notes),
    }


def _rounds(work: Work) -> Document:
    windows = list(work.windows.values())
    begins = [start for start, _ in windows]
    return {
        "first": min(work.windows),
        "last": max(work.windows),
        "count": len(windows),
        "window_ns": distribution([end - start for start, end in windows]),
        "period_ns": distribution([after - before for before, after in itertools.pairwise(begins)]),
    }


def _stages(work: Work) -> list[Document]:
    """Stages in the order of a round. Overlapping work on one stream counts once."""
    by_round: dict[tuple[str, str], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in work.stages:
        by_round[span.stream, span.name][work.round_of(span)].append(span)
    rows = []
    for (stream, name), rounds in by_round.items():
        times = {number: total_length(union((span.start_ns, span.end_ns) for span in spans)) for number, spans in rounds.items()}
        first = min(
            (min(span.start_ns for span in spans) - work.windows[number][0] for number, spans in rounds.items() if number in work.windows),
            default=1 << 62,
        )
        rows.append((first, stream, name, sum(map(len, rounds.values())), times))
    total = sum(sum(times.values()) for *_, times in rows)
    return [
        {
            "stream": stream,
            "name": name,
            "runs": runs,
            "rounds": len(times),
            "total_ns": sum(times.values()),
            "median_per_round_ns": median(list(times.values())),
            "share": ratio(sum(times.values()), total),
        }
        for _, stream, name, runs, times in sorted(rows, key=lambda row: row[:3])
    ]


def _idle(work: Work) -> Document:
    inside = [total_length(work.idle_in(window)) for window in work.windows.values()]
    between = [total_length(work.idle_in(gap)) for gap in work.between()]
    return {
        "inside_rounds_ns": distribution(inside),
        "inside_share": ratio(sum(inside), total_length(work.windows.values())),
        "between_rounds_ns": distribution(between),
    }


def _host_nodes(work: Work, counters: Mapping[str, Any], without_host_nodes: bool) -> Document:
    nodes: list[Document] = []
    all_hidden = 0
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in work.hosts:
        by_name[span.name].append(span)
    for name, spans in by_name.items():
        times = [span.nanoseconds for span in spans]
        hidden = sum(total_length(intersection([(span.start_ns, span.end_ns)], work.busy)) for span in spans)
        all_hidden += hidden
        nodes.append(
            {
                "name": name,
                "runs": len(spans),
                "time_ns": distribution(times),
                "hidden_ns": hidden,
                "exposed_ns": sum(times) - hidden,
                "hidden_share": ratio(hidden, sum(times)),
            }
        )
    total = sum(span.nanoseconds for span in work.hosts)
    counted = int(counters.get("host_node_ns", 0))
    return {
        "source": "recorded" if nodes else "counted" if counted else "none" if without_host_nodes else "unknown",
        "total_ns": total if nodes else counted or (0 if without_host_nodes else None),
        "hidden_ns": all_hidden if nodes else None,
        "exposed_ns": total - all_hidden if nodes else None,
        "hidden_share": ratio(all_hidden, total) if nodes else None,
        "nodes": nodes,
    }


def _exposed_wait(work: Work) -> Document:
    """Time that the main stream waited for masks, from the best available record; the third source is an upper bound."""
    if work.waits:
        source, found = "waits", union((span.start_ns, span.end_ns) for span in work.waits)
    elif work.hosts:
        side_stages = [span for span in work.stages if span.stream != MAIN and span.round != NO_ROUND]
        source = "idle before a mask is read, while host nodes or their copies ran"
        found = intersection(union((span.start_ns, span.end_ns) for span in (*work.hosts, *side_stages)), _before_mask_reads(work))
    elif any(span.stream != MAIN for span in work.stages):
        source, found = "idle before a mask is read", _before_mask_reads(work)
    else:
        source, found = "no round had host nodes", []
    waits = [total_length(intersection(work.idle_in(window), found)) for window in work.windows.values()]
    return {"source": source, "time_ns": distribution(waits), "share_of_rounds": ratio(sum(waits), total_length(work.windows.values()))}


def _before_mask_reads(work: Work) -> list[Interval]:
    begins = {span.start_ns for span in work.stages if span.stream == MAIN and span.name.startswith(MASK_READERS)}
    gaps = ((before[1], after[0]) for before, after in itertools.pairwise(work.busy))
    return [gap for gap in gaps if gap[1] in begins]


def _acceptance(counters: Mapping[str, Any]) -> Document | None:
    """Acceptance in the profiled rounds, per row."""
    rows = int(counters.get("row_rounds", 0))
    if not rows:
        return None
    tokens, accepted = int(counters["tokens"]), int(counters["accepted_drafts"])
    return {
        "row_rounds": rows,
        "tokens": tokens,
        "accepted_drafts": accepted,
        "tokens_per_row_and_round": ratio(tokens, rows),
        "accepted_per_row_and_round": ratio(accepted, rows),
    }


def distribution(values: Sequence[int]) -> Document:
    return {"total": sum(values), "median": median(values), "max": max(values, default=0), "count": len(values)}


def median(values: Sequence[int]) -> int:
    return round(statistics.median(values)) if values else 0


def ratio(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0
