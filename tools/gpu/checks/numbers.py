"""Measurements at real model sizes. Each figure is a ratio of variants that ran in turn."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph import SamplingParams
from stepgraph.graphs.context import MAIN
from stepgraph.graphs.layers import dense, quantised
from stepgraph.graphs.spans import BETWEEN_ROUNDS, NO_ROUND
from stepgraph.runtime.trace import Timeline
from tools.gpu.checks import grammar_rows, layers, operations
from tools.gpu.checks.cases import Case, Variant, case_of, cell, ratio, take_turns
from tools.gpu.checks.context import Context, Figures, summary
from tools.gpu.checks.layers import random_weight
from tools.gpu.checks.llama import attention_call
from tools.gpu.checks.operations import Call
from tools.gpu.checks.shapes import shape_of
from tools.gpu.checks.stopwatch import device_us, stopwatch

SIZES = ("1B", "8B")
MAX_NOISE = 0.05  # limit of the noise allowance of a share
FREE, AGAIN = Variant("free"), Variant("free again")
SCHEMA, RECURSIVE = Variant("schema", "schema"), Variant("recursive", "recursive")
HOST = Variant("schema, host nodes", "schema", grammar_lane="host")
PYTHON = Variant("schema, Python callbacks", "schema", grammar_lane="host", host_link="python")
ANYTHING = Variant("anything", "anything")
UNMASKED = Variant("schema, drafts not masked", "schema", draft_masks=False)
MORE = {(16, 3): (HOST, PYTHON, UNMASKED), (64, 3): (UNMASKED,)}  # further variants of rounds, by rows and drafts
SAMPLED = Variant("sampled", sampling=SamplingParams(temperature=0.8, top_k=0, top_p=1.0))
FILTERED = Variant("sampled, top-k and top-p", sampling=SamplingParams(temperature=0.8, top_k=50, top_p=0.9))


def _cells(context: Context) -> list[tuple[int, int, str]]:
    """Rows, drafts, size; the most important first, because the budget may not suffice for all."""
    if context.rehearsal:
        return [(1, 3, size) for size in SIZES]
    return [(rows, drafts, size) for drafts in (3, 5) for rows in (64, 1, 16, 4) for size in SIZES]


def constrained_rounds(context: Context) -> Figures:
    """Rounds with a schema or a recursive grammar over rounds without; grammars on the host, unmasked drafts; times of stages."""
    cells = _cells(context)
    figures: dict[str, list[Excess]] = {size: [] for size in SIZES}
    for index, (rows, drafts, size) in enumerate(cells, 1):
        name = f"{size} batch {rows} K={drafts}"
        if index > len(SIZES) and not context.fits(name):
            continue
        more = MORE.get((16, 3) if context.rehearsal else (rows, drafts), ())
        variants = [replace(variant, drafts=drafts) for variant in (FREE, AGAIN, SCHEMA, RECURSIVE, *more)]
        with cell(context, name):
            cases = [case_of(context, shape_of(context, size), rows, variant) for variant in variants]
            blocks = take_turns(context, cases, 24, share=index / len(cells))
            context.figures[name], excess = _over_free({case.variant.name: case for case in cases}, blocks)
            figures[size].append(excess)
            context.figures[size] = worst_of(figures[size])
            if (rows, drafts) == (64, 3) or context.rehearsal:
                context.figures[f"{name} stages"] = _stages_over_free([case for case in cases if case.variant.grammar_lane == "auto"])
    return context.figures


def _stages_over_free(cases: Sequence[Case], rounds: int = 16) -> Figures:
    """Median microseconds of each stage in a trace, and by how much those of the main stream exceed the first case's."""
    times = dict[str, dict[str, float]]()
    for case in cases:
        case.block(2)
        with case.engine.trace(rounds=rounds) as trace:
            case.block(rounds + 2)
        times[case.variant.name] = stage_us(trace.timeline)
    free, *others = times.items()
    over = {name: {at: round(us - free[1].get(at, 0.0), 2) for at, us in each.items() if "side" not in at} for name, each in others}
    return {"us": times, "over_free_us": over}


def stage_us(timeline: Timeline) -> dict[str, float]:
    """Median microseconds of each stage of a round, of the waits between stages of the main stream, and from a round to the next one."""
    summary = timeline.summary()
    stages = [stage for stage in summary.stages if stage.kind == "stage" and stage.name != BETWEEN_ROUNDS]
    times = {f"{stage.stream}: {stage.name}": stage.median_ns / 1000 for stage in stages}
    times["between stages"] = (summary.round_ns - sum(stage.median_ns for stage in stages if stage.stream == MAIN)) / 1000
    times["between rounds"] = statistics.median(gaps_between_rounds(timeline))
    return {name: round(us, 2) for name, us in times.items()}


class Excess(NamedTuple):
    """Ratio of constrained to unconstrained rounds in one cell, and the difference of two equal unconstrained engines."""

    p50: float
    noise: float
    p99: float
    noise_p99: float


def _over_free(cases: dict[str, Case], blocks: dict[str, list[float]]) -> tuple[Figures, Excess]:
    ratios = {name: ratio(blocks, name, "free") for name in cases if name != "free"}
    tails = {name: round(case.percentile(0.99) / cases["free"].percentile(0.99), 4) for name, case in cases.items()}
    figures: Figures = {"variants": {name: case.figures() for name, case in cases.items()}, "over_free": ratios, "p99_over_free": tails}
    return figures, Excess(
        p50=max(ratios["schema"]["median"], ratios["recursive"]["median"]),
        noise=max(abs(ratios["free again"][edge] - 1) for edge in ("p25", "p75")),
        p99=max(tails["schema"], tails["recursive"]),
        noise_p99=abs(tails["free again"] - 1),
    )


def worst_of(cells: Sequence[Excess]) -> Figures:
    """The worst cell; each cell is judged by its own noise."""
    middle, tail = max(cells, key=lambda cell: cell.p50 - cell.noise), max(cells, key=lambda cell: cell.p99 - cell.noise_p99)
    return {"p50": middle.p50, "noise": middle.noise, "p99": tail.p99, "noise_p99": tail.noise_p99}


def captured_against_eager(context: Context) -> Figures:
    """Tokens per second of captured over eager rounds, K = 3."""
    batches = (1,) if context.rehearsal else (1, 16)
    for index, (rows, size) in enumerate(itertools.product(batches, SIZES), 1):
        variants = (FREE, Variant("eager", eager=True), SCHEMA, Variant("schema, eager", "schema", eager=True))
        figures = context.figures.setdefault(size, {})
        assert isinstance(figures, dict)
        with cell(context, f"{size} batch {rows}"):
            cases = [case_of(context, shape_of(context, size), rows, variant) for variant in variants]
            blocks = take_turns(context, cases, 12, share=index / (len(batches) * len(SIZES)))
            figures[f"batch {rows}"] = {
                "ratio": ratio(blocks, "eager", "free"),
                "ratio_constrained": ratio(blocks, "schema, eager", "schema"),
                "variants": {case.variant.name: case.figures() for case in cases},
            }
    return context.figures


def sampled_rounds(context: Context) -> Figures:
    """Rounds that sample, without and with top-k and top-p, over greedy ones, K = 3."""
    cells = list(itertools.product((1,) if context.rehearsal else (1, 16), SIZES))
    for index, (rows, size) in enumerate(cells, 1):
        with cell(context, f"{size} batch {rows}"):
            cases = [case_of(context, shape_of(context, size), rows, variant) for variant in (FREE, SAMPLED, FILTERED)]
            blocks = take_turns(context, cases, 16, share=index / len(cells))
            ratios = {case.variant.name: ratio(blocks, case.variant.name, "free") for case in cases[1:]}
            figures = {case.variant.name: case.figures() for case in cases}
            context.figures[f"{size} batch {rows}"] = {"variants": figures, "over_greedy": ratios}
    return context.figures


def mask_time_is_hidden(context: Context) -> Figures:
    """Share of matcher time in host nodes that device work hides, relative to a grammar that allows everything."""
    variants = [replace(variant, grammar_lane="host") for variant in (ANYTHING, SCHEMA, RECURSIVE)]
    for rows, size in itertools.product((1,) if context.rehearsal else (1, 16), SIZES):
        with cell(context, f"{size} batch {rows}"):
            cases = [case_of(context, shape_of(context, size), rows, variant) for variant in variants]
            before = [_host_totals(case) for case in cases]
            blocks = take_turns(context, cases, 16)
            base, *host_us = (_host_us(case, then) for case, then in zip(cases, before, strict=True))
            for case, micros in zip(cases[1:], host_us, strict=True):
                figures = hidden(blocks[case.variant.name], blocks["anything"], micros - base)
                waited = case.engine.stats().exposed_wait_seconds
                figures |= {"host_us": round(micros, 2)} | ({} if waited is None else {"waited_seconds": round(waited, 6)})
                context.figures[f"{size} batch {rows} {case.variant.name}"] = figures
    low = min((each for each in context.figures.values() if isinstance(each, dict)), key=lambda each: each["share_hidden"] + each["noise"])
    return context.figures | {name: low[name] for name in ("share_hidden", "noise")}


def hidden(constrained: Sequence[float], loose: Sequence[float], host_us: float) -> Figures:
    """Compare blocks of the same turn with equal device work; `host_us`: additional host-node time of `constrained`."""
    longer = sorted(one - other for one, other in zip(constrained, loose, strict=True))
    low, high = longer[len(longer) // 4], longer[(3 * len(longer)) // 4]
    exposed, host_us = max(0.0, statistics.median(longer)), max(host_us, 0.1)
    share, noise = 1 - min(1.0, exposed / host_us), min(MAX_NOISE, (high - low) / 2 / host_us)
    return {"exposed_us": round(exposed, 2), "share_hidden": round(share, 4), "noise": round(noise, 4)}


def _host_us(case: Case, before: tuple[float, int]) -> float:
    """Host-node time per round since `before`, in microseconds."""
    total, rounds = (now - then for now, then in zip(_host_totals(case), before, strict=True))
    assert total > 0, "no host node was timed"
    return total / rounds * 1e6


def _host_totals(case: Case) -> tuple[float, int]:
    """Host-node seconds and rounds so far."""
    stats = case.engine.stats()
    return stats.host_nodes.total, stats.rounds


def idle_between_rounds(context: Context) -> Figures:
    """Idle time of the device between consecutive rounds, by the profiler's clock."""
    gaps: list[float] = []
    for size, variant in itertools.product(SIZES, (FREE, SCHEMA)):
        with cell(context, f"{size} {variant.name}"):
            case = case_of(context, shape_of(context, size), 1, variant)
            case.block(2)
            rounds = 4 if context.rehearsal else 30
            with case.engine.trace(rounds=rounds) as trace:
                case.block(rounds + 2)
            between = gaps_between_rounds(trace.timeline)
            assert between, f"{variant}: no two rounds in the trace"
            context.figures[f"{size} {variant.name}"] = summary(between)
            gaps.append(statistics.median(between))
            context.figures["gap_us"] = {"median": round(max(gaps), 2)}
    return context.figures


def gaps_between_rounds(timeline: Timeline) -> list[float]:
    """Microseconds between the end of a round on all streams and the start of the next."""
    extents: dict[int, tuple[int, int]] = {}
    for span in timeline.spans:
        if span.kind != "launch" and span.round != NO_ROUND:
            start, end = extents.get(span.round, (span.start_ns, span.end_ns))
            extents[span.round] = min(start, span.start_ns), max(end, span.end_ns)
    return [max(0, start - end) / 1000 for (_, end), (start, _) in itertools.pairwise(extents[each] for each in sorted(extents))]


def copy_bandwidth(context: Context) -> float:
    """Bytes read and written per second by a device copy; best of five."""
    source = torch.empty(1 << (20 if context.rehearsal else 30), dtype=torch.int32, device=context.device)
    other = torch.empty_like(source)
    watch = stopwatch(context, partial(other.copy_, source))
    return 2e6 * source.nbytes / min(watch() for _ in range(5))


def weights_per_second(context: Context) -> Figures:
    """Weight bytes read per second by a round of one row, over copy bandwidth."""
    found, bandwidth = context.figures, copy_bandwidth(context)
    found["copy_gigabytes_per_second"] = round(bandwidth / 1e9, 1)
    for size, drafts in itertools.product(SIZES, (3,) if context.rehearsal else (5, 3, 0)):
        with cell(context, f"{size} K={drafts}"):
            case = case_of(context, shape_of(context, size), 1, replace(FREE, drafts=drafts))
            blocks = take_turns(context, [case], 16)["free"]
            read = case.pair.round_bytes(drafts)
            share = read / (statistics.median(blocks) * 1e-6) / bandwidth
            figures = {"bytes": read, "round_us": round(statistics.median(blocks), 2), "share": round(share, 4)}
            found[f"{size} K={drafts}"] = figures
            if drafts == 3:
                found[size] = figures
    return found


def kernels_against_floor(context: Context) -> Figures:
    """Attention, masks, samplers and acceptance at 128k tokens: time, time floor of the bytes moved, and their ratio."""
    bandwidth = copy_bandwidth(context)
    found: Figures = {"copy_gigabytes_per_second": round(bandwidth / 1e9, 1)}
    cut: list[str] = []
    for call in _measured(context):
        if context.budget_used > 1:
            cut.append(call.name)
            continue
        floor, micros = call.least_bytes / bandwidth * 1e6, device_us(context, call.kernel)["median"]
        figures = {"least_bytes": call.least_bytes, "floor_us": round(floor, 3), "us": micros}
        found[call.name] = {**figures, "over_floor": round(micros / floor, 3)}
    return {**found, "cut": cut}


def packed_products(context: Context) -> Figures:
    """Products with packed weights, which come from memory, over those of torch with bfloat16 weights. Also measured: torch's own product
    with four-bit weights and, for many rows, products with dequantised weights."""
    outer, inner = (48, 256) if context.rehearsal else (4096, 14336)
    copies = 1 if context.rehearsal else 4  # more than caches hold
    found: Figures = {}
    wide = [torch.randn(outer, inner, device=context.device, dtype=torch.bfloat16) for _ in range(copies)]
    kinds = {name: [random_weight(context.device, name, outer, inner) for _ in range(copies)] for name in ("INT4_128", "FP8", "Q8_0")}
    four = [] if context.on_tape else [_four_bits(context.device, outer, inner) for _ in range(copies)]
    zeros = torch.zeros(inner // 128, outer, 2, device=context.device, dtype=torch.bfloat16)
    for rows in (1, 4, 16, 128, 512):
        states = torch.randn(rows, inner, device=context.device, dtype=torch.bfloat16)
        calls: dict[str, Sequence[Callable[[], object]]] = {
            name: [partial(dense.product, states, weight) for weight in weights] for name, weights in kinds.items()
        }
        calls["torch, four bits"] = [partial(torch.ops.aten._weight_int4pack_mm, states, weight, 128, zeros) for weight in four]
        if rows > 16 and not context.on_tape:
            calls |= {f"{name}, dequantised": _dequantised_calls(states, weights) for name, weights in kinds.items()}
        base = _shared_us(context, [partial(functional.linear, states, weight) for weight in wide])
        for name, each in calls.items():
            if each and context.fits(f"{name}, {rows} rows"):
                micros = _shared_us(context, each)
                found[f"{name}, {rows} rows"] = {"us": micros, "bfloat16_us": base, "over_bfloat16": round(micros / base, 3)}
    return found


def _dequantised_calls(states: Tensor, weights: Sequence[Tensor]) -> list[partial[None]]:
    from stepgraph.graphs.layers.triton.quantised import multiply_dequantised

    output = states.new_empty(len(states), len(weights[0]) * quantised.TILE)
    return [partial(multiply_dequantised, states, weight, None, output) for weight in weights]


def _four_bits(device: torch.device, outer: int, inner: int) -> Tensor:
    numbers = torch.randint(0, 256, (outer, inner // 2), device=device, dtype=torch.uint8)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(numbers, 8)
    return packed


def _shared_us(context: Context, calls: Sequence[Callable[[], object]]) -> float:
    """Time of one of these calls: the mean of one sequence of all."""
    return round(device_us(context, lambda: [call() for call in calls])["median"] / len(calls), 2)


def _measured(context: Context) -> Iterator[Call]:
    """A call of every kernel."""
    device, width = context.device, 1_000 if context.rehearsal else 128_256
    for batch in (1,) if context.rehearsal else (1, 16, 64):
        yield operations.masked_argmax(device, batch, 4, width, all_masked=True)
        yield operations.free_argmax(device, batch, 4, width)
        yield operations.draw(device, batch, width, operations.UNFILTERED)
        yield operations.draw(device, batch, width, operations.FILTERED)
        yield operations.process_all_masked(device, batch, 4, width)
        yield operations.reject_sample(device, batch, 3, width)
        yield operations.chain_accept(device, batch, 3)
        yield operations.mask_status(device, batch, 4)
        yield grammar_rows.call_of(device, batch, width)
        yield from (call for call in layers.calls(device, 4 * batch, 4096) if call.least_bytes)
        for length in (60,) if context.rehearsal else (1000, 8000):
            yield attention_call(device, batch, 4, length, 128)[0]
