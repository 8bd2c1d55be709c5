"""The check of kernels against their memory floor: the least bytes that a call must move, at the speed of a copy on this device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from stepgraph.graphs.attention.paged import paged_attention
from tools import bench_kernels
from tools.gpu.checks.context import Context, Figures
from tools.gpu.checks.kernels import device_us
from tools.gpu.checks.llama import PAGE, attention_inputs
from tools.gpu.checks.numbers import copy_bandwidth


def kernels_against_floor(context: Context) -> Figures:
    """Attention, masks, samplers and acceptance at 128k tokens: time, the floor of their bytes, and how many times the floor that is."""
    bandwidth = copy_bandwidth(context)
    found: Figures = {"copy_gigabytes_per_second": round(bandwidth / 1e9, 1)}
    cut: list[str] = []
    for name, measure in _measured(context):
        if context.spent > 1:
            cut.append(name)
            continue
        least, micros = measure()
        floor = least / bandwidth * 1e6
        found[name] = {"least_bytes": least, "floor_us": round(floor, 3), "us": micros, "over_floor": round(micros / floor, 3)}
    return {**found, "cut": cut}


def _measured(context: Context) -> Iterator[tuple[str, Any]]:
    """Names, and what measures each: least bytes and microseconds."""
    width = 1_000 if context.rehearsal else 128_256
    batches = (1,) if context.rehearsal else (1, 16, 64)
    for batch in batches:
        yield f"masked_argmax B={batch} Q=4", partial(_of_bench, bench_kernels.choice_figures, context, batch, 4, width)
        yield f"draw N={batch}", partial(_of_bench, bench_kernels.filter_figures, context, batch, width, False)
        yield f"draw, top-k and top-p N={batch}", partial(_of_bench, bench_kernels.filter_figures, context, batch, width, True)
        yield f"race N={batch}", partial(_of_bench, bench_kernels.race_figures, context, batch, width)
        yield f"process B={batch} Q=4", partial(_of_bench, bench_kernels.process_figures, context, batch, 4, width, True)
        yield f"reject_sample B={batch} K=3", partial(_of_bench, bench_kernels.rejection_figures, context, batch, 3, width)
        yield f"chain_accept B={batch} K=3", partial(_of_bench, bench_kernels.chain_figures, context, batch, 3)
        yield f"mask_status B={batch} N=4", partial(_of_bench, bench_kernels.tag_figures, context, batch, 4)
        for length in (60,) if context.rehearsal else (1000, 8000):
            yield f"attention B={batch} Q=4 keys={length} size=128", partial(_attention, context, batch, 4, length, 128)


def _of_bench(measure: Any, context: Context, *sizes: Any) -> tuple[int, float]:
    told = measure(context, *sizes)
    return int(told["least_bytes"]), float(told["kernel_us"]["median"])


def _attention(context: Context, batch: int, count: int, length: int, size: int) -> tuple[int, float]:
    """Every key and value of a row once, queries once, results once."""
    query, keys, values, inputs = attention_inputs(context.device, batch, count, length, size)
    held = int((length - torch.arange(batch) * 13 % (length // 2)).sum())
    least = 2 * held * keys[0].nbytes + 2 * query.nbytes
    output = torch.empty_like(query)
    arguments = (inputs.positions, inputs.slots, inputs.block_tables, PAGE, 0, size**-0.5, output)
    return least, device_us(context, partial(paged_attention.out, query, keys, values, *arguments))["median"]
