"""The checks that measure rounds of real sizes: each figure is a ratio of variants that took turns. Never a verdict by itself."""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import torch

from stepgraph.graphs.marks import OUTSIDE
from stepgraph.runtime.trace import Timeline
from tools.checks.cases import Case, Variant, case_of, close_all, ratio, take_turns
from tools.checks.context import Context, Figures, summary
from tools.checks.kernels import stopwatch
from tools.checks.shapes import shape_of

SIZES = ("1B", "8B")
FREE, AGAIN = Variant("free"), Variant("free again")
SCHEMA, RECURSIVE = Variant("schema", "schema"), Variant("recursive", "recursive")
PYTHON = Variant("schema, Python callbacks", "schema", host_link="python")
UNMASKED = Variant("schema, drafts not masked", "schema", draft_masks=False)


def _cells(context: Context) -> list[tuple[int, int, str]]:
    """Rows, drafts, size, what matters most in front: a budget that ends leaves the rest out."""
    if context.rehearsal:
        return [(1, 3, size) for size in SIZES]
    return [(rows, drafts, size) for drafts in (3, 5) for rows in (1, 16, 64, 4) for size in SIZES]


def constrained_rounds(context: Context) -> Figures:
    """A round under a schema, or a recursive grammar, against one without; native host nodes against Python, masked drafts or not."""
    found: Figures = {size: {} for size in SIZES}
    cut: list[str] = []
    worst: dict[str, list[dict[str, float]]] = {size: [] for size in SIZES}
    cells = _cells(context)
    for place, (rows, drafts, size) in enumerate(cells, 1):
        name = f"{size} batch {rows} K={drafts}"
        if context.spent > 1 and place > len(SIZES):
            cut.append(name)
            continue
        more = (PYTHON, UNMASKED) if (rows, drafts) == (16, 3) or context.rehearsal else ()
        variants = [_drafting(variant, drafts) for variant in (FREE, AGAIN, SCHEMA, RECURSIVE, *more)]
        cases = [case_of(context, shape_of(context, size), rows, variant) for variant in variants]
        blocks = take_turns(context, cases, 24, share=place / len(cells))
        by_name = {case.variant.name: case for case in cases}
        ratios = {each.name: ratio(blocks, each.name, "free") for each in variants[1:]}
        tails = {name: round(case.percentile(0.99) / by_name["free"].percentile(0.99), 4) for name, case in by_name.items()}
        found[name] = {"variants": {name: case.figures() for name, case in by_name.items()}, "over_free": ratios, "p99_over_free": tails}
        worst[size].append(
            {
                "p50": max(ratios["schema"]["median"], ratios["recursive"]["median"]),
                "noise": max(abs(ratios["free again"][edge] - 1) for edge in ("p25", "p75")),
                "p99": max(tails["schema"], tails["recursive"]),
                "noise_p99": abs(tails["free again"] - 1),
            }
        )
    for size in SIZES:
        found[size] = {name: max(cell[name] for cell in worst[size]) for name in ("p50", "noise", "p99", "noise_p99")}
    return {**found, "cut": cut}


def _drafting(variant: Variant, drafts: int) -> Variant:
    return Variant(variant.name, variant.grammar, drafts, variant.draft_masks, variant.host_link, variant.eager)


def captured_against_eager(context: Context) -> Figures:
    """Tokens a second of recorded rounds against the same rounds run op by op, at K = 3."""
    found: Figures = {}
    batches = (1,) if context.rehearsal else (1, 16)
    for place, (rows, size) in enumerate(itertools.product(batches, SIZES), 1):
        variants = (FREE, Variant("eager", eager=True), SCHEMA, Variant("schema, eager", "schema", eager=True))
        cases = [case_of(context, shape_of(context, size), rows, variant) for variant in variants]
        blocks = take_turns(context, cases, 12, share=place / (len(batches) * len(SIZES)))
        told = found.setdefault(size, {})
        assert isinstance(told, dict)
        told[f"batch {rows}"] = {
            "ratio": ratio(blocks, "eager", "free"),
            "ratio_constrained": ratio(blocks, "schema, eager", "schema"),
            "variants": {case.variant.name: case.figures() for case in cases},
        }
    return found


def mask_time_is_hidden(context: Context) -> Figures:
    """How much of the host's mask time a constrained round is not longer for: 1 - (constrained - free) / host nodes."""
    found: Figures = {}
    shares = []
    for rows, size in itertools.product((1,) if context.rehearsal else (1, 16), SIZES):
        cases = [case_of(context, shape_of(context, size), rows, variant) for variant in (FREE, SCHEMA, RECURSIVE)]
        before = {case.variant.name: _host(case) for case in cases}
        blocks = take_turns(context, cases, 16)
        free = statistics.median(blocks["free"])
        for case in cases[1:]:
            total, rounds = (now - then for now, then in zip(_host(case), before[case.variant.name], strict=True))
            host_us = total / rounds * 1e6
            assert host_us > 0, "no host node was timed"
            exposed = max(0.0, statistics.median(blocks[case.variant.name]) - free)
            shares.append(round(1 - min(1.0, exposed / host_us), 4))
            told = {"host_us": round(host_us, 2), "exposed_us": round(exposed, 2), "share_hidden": shares[-1]}
            waited = case.engine.stats().exposed_wait_seconds
            found[f"{size} batch {rows} {case.variant.name}"] = told | ({} if waited is None else {"waited_seconds": round(waited, 6)})
    return {**found, "share_hidden": min(shares)}


def _host(case: Case) -> tuple[float, int]:
    """Seconds of host nodes, and rounds, so far."""
    stats = case.engine.stats()
    return stats.host_nodes.total, stats.rounds


def idle_between_rounds(context: Context) -> Figures:
    """What the device rests between the last that one round does and the first of the next, by the profiler's clock."""
    found: Figures = {}
    gaps: list[float] = []
    for size, variant in itertools.product(SIZES, (FREE, SCHEMA)):
        case = case_of(context, shape_of(context, size), 1, variant)
        case.block(2)
        rounds = 4 if context.rehearsal else 30
        with case.engine.trace(rounds=rounds) as trace:
            case.block(rounds + 2)
        between = gaps_between_rounds(trace.timeline)
        assert between, f"{variant}: no two rounds in the trace"
        found[f"{size} {variant.name}"] = summary(between)
        gaps.append(statistics.median(between))
    return {**found, "gap_us": {"median": round(max(gaps), 2)}}


def gaps_between_rounds(timeline: Timeline) -> list[float]:
    """Microseconds in which no stream does anything for either round."""
    extents: dict[int, tuple[int, int]] = {}
    for span in timeline.spans:
        if span.kind != "launch" and span.round != OUTSIDE:
            start, end = extents.get(span.round, (span.start_ns, span.end_ns))
            extents[span.round] = min(start, span.start_ns), max(end, span.end_ns)
    return [max(0, start - end) / 1000 for (_, end), (start, _) in itertools.pairwise(extents[each] for each in sorted(extents))]


def copy_bandwidth(context: Context) -> float:
    """Bytes read and written per second by a copy in device memory; the best of a few."""
    source = torch.empty(1 << (20 if context.rehearsal else 30), dtype=torch.uint8, device=context.device)
    other = torch.empty_like(source)
    watch = stopwatch(context, partial(other.copy_, source))
    return 2e6 * source.nbytes / min(watch() for _ in range(5))


def weights_per_second(context: Context) -> Figures:
    """Weights that a round of one row has to read, per second, over what a copy moves per second."""
    found: Figures = {}
    bandwidth = copy_bandwidth(context)
    for size, drafts in itertools.product(SIZES, (3,) if context.rehearsal else (5, 3, 0)):
        case = case_of(context, shape_of(context, size), 1, _drafting(FREE, drafts))
        blocks = take_turns(context, [case], 16)["free"]
        read = case.pair.round_bytes(drafts)
        share = read / (statistics.median(blocks) * 1e-6) / bandwidth
        told = {"bytes": read, "round_us": round(statistics.median(blocks), 2), "share": round(share, 4)}
        found[f"{size} K={drafts}"] = told
        if drafts == 3:
            found[size] = told
    close_all()
    return {"copy_gigabytes_per_second": round(bandwidth / 1e9, 1), **found}
