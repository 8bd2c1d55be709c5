"""Sampling cost: each operation of a sampled round per call and per row, and the accept stage over plain torch.

The plain pipeline is that of a decoding loop without this library: at every position it unpacks the mask, fills, divides by the
temperature, sorts for top-k and top-p, and draws with torch.multinomial or tests the ratio of a draft. The stage also computes
penalties, biases, log-probabilities, finish reasons and the next state of the rows.

All variants are interleaved; a ratio is of consecutive turns. Times on a shared machine are noise; compare the counts of
operations, each of which is at least one launch on a GPU. On a CPU every operation runs as its plain torch reference. Prints a
table and one JSON document last.

    python tools/bench_sampling.py --rows 1 8 --drafts 4 --vocabulary 32000
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.graphs import Limits, StaticBuffers, drafting, stages
from stepgraph.graphs.batch import read_batch
from stepgraph.graphs.round_specs import round_specs
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling import bitmask, kernels, sampler
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.kernels.operation import OPERATIONS
from stepgraph.sampling.sampler import Param
from tools.bench.plain_sampling import plain_sampling
from tools.gpu.checks.context import Context
from tools.gpu.checks.stopwatch import for_seconds, ratio_of, stopwatch, take_turns, wait_us

SHAPES = ((1, 4, 32_000), (8, 4, 32_000), (8, 0, 32_000), (1, 4, 151_936))  # rows, drafts, vocabulary
ROW_PARAMS = {Param.TEMPERATURE: 0.8, Param.TOP_K: 50, Param.TOP_P: 0.95, Param.REPETITION_PENALTY: 1.1, Param.FREQUENCY_PENALTY: 0.1}
SECONDS = 8.0  # time for the turns of one shape
LEGAL_SHARE = 0.3  # share of the vocabulary that a mask allows
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
Call = Callable[[], object]


class Operations(TorchDispatchMode):
    """Counts operations that do device work: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name.removeprefix("aten::") not in ALLOCATIONS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def stepgraph_calls(self) -> Iterator[tuple[str, Call]]:
        """Names of the library operations in a call, with a function that repeats each."""
        for func, args, kwargs in self.calls:
            if func.namespace == "stepgraph":
                yield func._schema.name.removeprefix("stepgraph::"), partial(func, *args, **kwargs)


def operations_of(call: Call) -> Operations:
    operations = Operations()
    with operations:
        call()
    return operations


class Scene:
    """Rows in mid-generation, each with a grammar, sampling settings and drafts near the target's distribution."""

    def __init__(self, device: torch.device, rows: int, k: int, width: int) -> None:
        rng = torch.Generator().manual_seed(width + k)
        limits = Limits(rows, k, max_length=1024, page_size=64, num_pages=16 * rows, vocab_size=width, num_tokens=width, feature_size=0)
        self.rows, self.k = rows, k
        self.buffers = b = StaticBuffers(round_specs(limits), device)
        logits = torch.randn(rows, k + 1, width, generator=rng) * 3
        allowed = torch.rand(rows, k + 1, width, generator=rng) < LEGAL_SHARE
        params = torch.zeros(rows, len(Param))
        params[:, list(ROW_PARAMS)] = torch.tensor(list(ROW_PARAMS.values()))
        near = (logits + torch.randn(logits.shape, generator=rng)).masked_fill(~allowed, float("-inf"))
        offered = sampler.distribution(near[:, :k], params)
        drafts = sampler.race(offered, torch.empty_like(offered).exponential_(generator=rng))
        state = {Column.GENERATED: 10, Column.FINISH: int(FinishCode.RUNNING), Column.LENGTH: 100, Column.MAX_LENGTH: 1000}
        state |= {Column.CONSTRAINED: 1, Column.DRAFT_COUNT: k, Column.DRAFT_LIMIT: k}
        for column, number in state.items():
            b.row_state[:rows, column] = number
        b.row_state[:rows, Column.OWNER] = b.row_state[:rows, Column.SEED] = torch.arange(1, rows + 1, device=device)
        b.batch_rows.copy_(torch.arange(rows))
        tags = torch.tensor([[[row + 1, 10, index, int(MaskStatus.OK)] for index in range(k + 1)] for row in range(rows)])
        for name, value in (("row_params", params), ("row_draft_probs", offered), ("row_drafts", drafts), ("row_tags", tags)):
            b[name][:rows].copy_(value)
        b.row_masks[:rows].copy_(bitmask.pack(allowed))
        b.batch_drafts.copy_(b.row_drafts[:rows].T)
        self.logits = logits.to(device=device, dtype=torch.bfloat16)
        self.batch = read_batch(b, rows)  # a copy: every run of a stage starts from the current state

    def accept(self, sampled: bool) -> Call:
        return partial(stages.accept, self.buffers, self.batch, self.logits, constrained=True, sampled=sampled)

    def choose_draft(self, sampled: bool) -> Call:
        """The last draft of a round."""
        alive = torch.ones_like(self.batch.rows, dtype=torch.bool)

        def choose() -> object:
            mask = drafting.grammar_mask_of(self.buffers, self.batch, self.k)
            return drafting.choose_draft(self.buffers, self.batch, self.k, self.logits[:, 0], alive, mask, sampled)

        return choose

    def plain(self) -> Call:
        """The plain pipeline on the same logits, masks and drafts."""
        b, size = self.buffers, self.rows
        temperature, top_k, top_p = (b.row_params[:size, column, None] for column in (Param.TEMPERATURE, Param.TOP_K, Param.TOP_P))
        offered = b.row_drafts[:size], b.row_draft_probs[:size]
        return partial(plain_sampling, self.logits, b.row_masks[:size], temperature, top_k, top_p, *offered)


class Entry(NamedTuple):
    """One timed call."""

    stage: str
    name: str
    call: Call
    operations: int  # on this device
    plain_operations: int  # of its plain torch version
    reference: Call | None = None  # timed as well, if it differs from the call


@torch.no_grad()
def measure_shape(context: Context, rows: int, k: int, width: int, seconds: float) -> dict[str, object]:
    """All variants at one shape, interleaved."""
    scene = Scene(context.device, rows, k, width)
    steps = {"accept sampled": scene.accept(True), "accept greedy": scene.accept(False)}
    if k:
        steps |= {"draft sampled": scene.choose_draft(True), "draft greedy": scene.choose_draft(False)}
    entries: list[Entry] = []
    for stage, call in steps.items():
        operations = operations_of(call)
        inner = [_entry(context, stage, *named) for named in operations.stepgraph_calls()]
        total = len(operations.calls)
        entries += [Entry(stage, "whole stage", call, total, total - len(inner) + sum(each.plain_operations for each in inner)), *inner]
    plain = scene.plain()
    count = len(operations_of(plain).calls)
    # multinomial makes the host wait, so it cannot be captured; it runs eagerly, as in such a loop
    watches: dict[str, Callable[[], float]] = {"plain pipeline": partial(wait_us, context, plain)}
    for index, entry in enumerate(entries):
        watches[f"{index}"] = stopwatch(context, entry.call)
        if entry.reference is not None:
            watches[f"{index} reference"] = stopwatch(context, entry.reference)
    times = take_turns(watches, for_seconds(seconds), f"{rows} rows, {k} drafts, {width} tokens")
    return {
        "rows": rows,
        "drafts": k,
        "vocabulary": width,
        "turns": len(times["plain pipeline"]),
        "accept_over_plain": ratio_of(times["0"], times["plain pipeline"]),
        "plain_pipeline": {"operations": count, **_cost(times["plain pipeline"], rows)},
        "operations": [_figures(entry, f"{index}", times, rows) for index, entry in enumerate(entries)],
    }


def _entry(context: Context, stage: str, name: str, call: Call) -> Entry:
    """An operation and its reference with the same arguments."""
    assert isinstance(call, partial)
    plain = partial(OPERATIONS[f"stepgraph::{name}"].run_reference, *call.args, **call.keywords)
    return Entry(stage, name, call, 1, len(operations_of(plain).calls), None if context.rehearsal else plain)


def _cost(times: Sequence[float], rows: int) -> dict[str, float]:
    median = statistics.median(times)
    return {"us": round(median, 1), "us_per_row": round(median / rows, 1)}


def _figures(entry: Entry, key: str, times: Mapping[str, Sequence[float]], rows: int) -> dict[str, object]:
    figures: dict[str, object] = {"stage": entry.stage, "name": entry.name, **_cost(times[key], rows)}
    figures |= {"operations": entry.operations, "plain_operations": entry.plain_operations}
    if entry.reference is not None:
        figures["over_plain"] = ratio_of(times[key], times[f"{key} reference"])
    return figures


def report(context: Context, shapes: Sequence[tuple[int, int, int]], seconds: float) -> dict[str, object]:
    return {
        "device": platform.machine() if context.rehearsal else torch.cuda.get_device_name(),
        "implementation": kernels.describe(context.device),
        "torch": torch.__version__,
        "asked_of_every_row": {column.name.lower(): value for column, value in ROW_PARAMS.items()},
        "legal_share": LEGAL_SHARE,
        "shapes": [measure_shape(context, *shape, seconds) for shape in shapes],
    }


def table(found: Mapping[str, Any]) -> str:
    """Lines of the printed report."""
    lines = []
    for shape in found["shapes"]:
        plain, ratio = shape["plain_pipeline"], shape["accept_over_plain"]
        lines.append(f"{shape['rows']} rows, {shape['drafts']} drafts, {shape['vocabulary']} tokens ({shape['turns']} turns)")
        lines.append(f"  {'':<32}{'us':>12}{'us per row':>12}{'operations':>12}{'in torch':>10}")
        for entry in (*shape["operations"], {"stage": "plain pipeline", "name": "", **plain, "plain_operations": plain["operations"]}):
            name = f"{entry['stage']}" if entry["name"] in ("", "whole stage") else f"  {entry['name']}"
            lines.append(f"  {name:<32}{entry['us']:>12}{entry['us_per_row']:>12}{entry['operations']:>12}{entry['plain_operations']:>10}")
        lines.append(f"  accept sampled / plain pipeline: {ratio['p50']} (p25 {ratio['p25']}, p75 {ratio['p75']})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", help="batch sizes (default: a few typical shapes)")
    parser.add_argument("-k", "--drafts", type=int, nargs="+", default=[4], help="drafts per round, with --rows (default: 4)")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000], help="tokens, with --rows (default: 32000)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for the turns of one shape (default: {SECONDS:g})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    context = Context(rehearsal=not torch.cuda.is_available(), quick=False)
    shapes = list(itertools.product(options.rows, options.drafts, options.vocabulary)) if options.rows else SHAPES
    found = report(context, shapes, options.seconds)
    print(table(found))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
