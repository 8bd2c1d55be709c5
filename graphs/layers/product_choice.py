"""Products of many states with packed weights on a GPU: torch's product of dequantised weights, where a probe finds it faster.

The program for packed weights reads them again for each 16 states, which suits decode rounds; a chunk of a prompt has more. Kernels of
libraries for packed weights are not among the choices: they read other layouts, so weights would be kept twice.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from stepgraph.graphs.layers.quantised import TILE, has_packed_form, inner_size
from stepgraph.graphs.layers.rank_sums import RankExchange
from stepgraph.sampling.cuda_graphs import capture_replay, empty_cache, replay_us
from stepgraph.sampling.fields import error_summary
from stepgraph.sampling.kernels.triton import why_no_triton

PROBED_ROWS = (512, 256, 128)  # numbers of states; with fewer, the bits of a row never depend on the other rows
MAX_COLUMNS = 1 << 16  # wider weights are experts, which are not dequantised, and heads, which multiply few rows
TOLERANCE = 1e-2  # relative to the norm of the results: weights are rounded to 8 bits in bfloat16
REPEATS, NEVER = 7, sys.maxsize


def choose_products(dtype: torch.dtype, weights: Iterable[Tensor], ranks: RankExchange | None = None) -> str:
    """Choose for products of states of this type with each weight that is packed and on a GPU, and keep the choice for the process.
    Returns a note; empty if there is no such weight. Every rank calls this: all use the largest threshold of any rank."""
    packed = [each for each in weights if each.is_cuda and has_packed_form(each) and len(each) * TILE <= MAX_COLUMNS]
    if not packed or dtype is torch.float32 or why_no_triton(packed[0].device):
        return ""
    from stepgraph.graphs.layers.triton import quantised as programs

    thresholds, reasons = dict[tuple[object, ...], int](), list[str]()
    for weight in packed:
        key = programs.product_key(weight.new_empty(0, dtype=dtype), weight)
        if key in thresholds:
            continue
        try:
            with torch.cuda.device(weight.device):
                thresholds[key] = programs.library_min_rows[key] if key in programs.library_min_rows else _min_rows(weight, dtype)
        except Exception as error:  # from a compiler, the allocator or a capture, or for a wrong result
            thresholds[key] = NEVER
            reasons.append(f"not with {TILE * len(weight)} x {inner_size(weight)}: {error_summary(error)}")
    by_shape = {key[1:]: rows for key, rows in thresholds.items()}  # without the device
    for other in ranks.exchange(by_shape) if ranks else ():
        thresholds.update({key: max(rows, other.get(key[1:], rows)) for key, rows in thresholds.items()})
    programs.library_min_rows.update(thresholds)
    empty_cache()  # frees the results and graphs of the probe
    counts = Counter(thresholds.values())
    chosen = [f"from {rows} rows on for {counts[rows]} of {len(thresholds)} shapes" for rows in sorted(counts) if rows != NEVER]
    return "; ".join((f"products with dequantised weights: {', '.join(chosen) or 'none'}", *reasons))


def _min_rows(weight: Tensor, dtype: torch.dtype) -> int:
    """From how many rows on dequantised weights are faster. RuntimeError if their result is wrong."""
    from stepgraph.graphs.layers.triton import quantised as programs

    min_rows = NEVER
    for rows in PROBED_ROWS:
        generator = torch.Generator(weight.device).manual_seed(rows)  # leaves the user's generator unchanged
        states = torch.randn(rows, inner_size(weight), generator=generator, dtype=dtype, device=weight.device)
        results, times_us = list[Tensor](), list[float]()
        for multiply in (programs.multiply_packed, programs.multiply_dequantised):
            results.append(states.new_empty(rows, len(weight) * TILE))
            replay = capture_replay(functools.partial(multiply, states, weight, None, results[-1]), weight.device)
            times_us.append(replay_us(replay, REPEATS))
        packed, dequantised = (each.float() for each in results)
        if not float((dequantised - packed).norm()) <= TOLERANCE * float(packed.norm()):  # also for NaN
            raise RuntimeError(f"products of {rows} rows with dequantised weights are wrong")
        if times_us[1] >= times_us[0]:
            break
        min_rows = rows
    return min_rows
