"""Products with quantised weights on the CPU, one thread: bytes of weights per second of processor time over those of a copy.

A copy counts the bytes that it reads and those that it writes. Each kind has as many matrices as fill `--cache` MiB, which take turns, so
that weights come from memory. Kinds, rows and the copy alternate; a figure is the median of the rounds. Prints one JSON document:

    python -m tools.bench_weights --rows 1 5 8
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import product
from stepgraph.graphs.layers.quantised import KINDS, QuantKind, empty_packed
from stepgraph.sampling.native import why_not
from tools.origin import origin

PLAIN = "bfloat16"
BY_NAME: dict[str, QuantKind | None] = {PLAIN: None} | {
    name: kind for kind, name in {kind: name for name, kind in KINDS.items()}.items()
}  # one name per kind


def weights_of(kind: QuantKind | None, outer: int, inner: int, nbytes: int) -> list[Tensor]:
    """Equal random weights, at least `nbytes` of them."""
    weight = torch.randn(outer, inner).bfloat16()
    if kind is not None:
        weight = torch.randint(0, 120, empty_packed(kind, weight).shape, dtype=torch.uint8)  # no NaN in any of the types
    return [weight.clone() for _ in range(-(-nbytes // weight.nbytes))]


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(kinds: Sequence[str], rows: Sequence[int], shape: tuple[int, int], cache: int, rounds: int) -> dict[str, object]:
    outer, inner = shape
    weights = {name: weights_of(BY_NAME[name], outer, inner, cache) for name in kinds}
    states = {count: torch.randn(count, inner).bfloat16() for count in rows}
    source = torch.zeros(cache, dtype=torch.uint8)
    target = source.clone()

    def multiply(name: str, count: int) -> None:
        for weight in weights[name]:
            product(states[count], weight)

    runs: dict[tuple[str, int], Callable[[], object]] = {("copy", 0): lambda: target.copy_(source)}
    for name, count in itertools.product(kinds, rows):
        runs[name, count] = lambda name=name, count=count: multiply(name, count)  # type: ignore[misc]
    for run in runs.values():
        run()
    found = {key: statistics.median(times) for key, times in _by_turns(runs, rounds).items()}
    copied = 2 * cache / found["copy", 0]
    table = {}
    for name in kinds:
        nbytes = sum(weight.nbytes for weight in weights[name])
        table[name] = {
            "bits_per_weight": 8 * weights[name][0].nbytes / (outer * inner),
            **{
                f"rows {count}": {
                    "microseconds": 1e6 * found[name, count] / len(weights[name]),
                    "bytes_over_copy": nbytes / found[name, count] / copied,
                }
                for count in rows
            },
        }
    return {"shape": shape, "copy_gigabytes_per_second": copied / 1e9, "rounds": rounds, "kinds": table}


def _by_turns(runs: dict[tuple[str, int], Callable[[], object]], rounds: int) -> dict[tuple[str, int], list[float]]:
    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(seconds(run))
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 5, 8], metavar="N")
    parser.add_argument("--shape", nargs=2, type=int, default=(8192, 2048), metavar=("OUT", "IN"))
    parser.add_argument("--cache", type=int, default=128, metavar="MIB", help="size of the weights of each kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    options = parser.parse_args(arguments)
    if why := why_not():
        raise SystemExit(f"bench_weights: the kernels in C are not available: {why}")
    torch.set_num_threads(1)
    found = measure(options.kinds, options.rows, tuple(options.shape), options.cache << 20, options.rounds)
    print(json.dumps({**origin(), **found}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
