"""Prometheus text of several replicas as one."""

from __future__ import annotations

from collections.abc import Iterable

from stepgraph.runtime.replicas.streams import Counts


def merged_text(texts: Iterable[str]) -> str:
    """Each metric once, with the samples of all texts, whose labels differ."""
    groups: dict[str, list[str]] = {}  # of samples, by the lines that describe the metric
    for text in texts:
        for block in text.split("# HELP ")[1:]:
            helped, typed, *samples = block.splitlines()
            groups.setdefault(f"# HELP {helped}\n{typed}", []).extend(samples)
    return "".join(f"{header}\n" + "".join(f"{sample}\n" for sample in samples) for header, samples in groups.items())


def counts_text(counts: Counts) -> str:
    described = {
        "retried": (counts.retried, "Requests sent to another replica before their first token."),
        "continued": (counts.continued, "Times that a stream was continued on another replica."),
        "refused": (counts.refused, "Streams that could not be continued."),
        "recomputed_tokens": (counts.skipped, "Tokens that another replica computed again."),
    }
    lines = []
    for name, (value, description) in described.items():
        full = f"stepgraph_streams_{name}_total"
        lines += [f"# HELP {full} {description}", f"# TYPE {full} counter", f"{full} {value}"]
    return "".join(f"{line}\n" for line in lines)
