"""What the kernels cost: bytes per call against the least possible and against plain torch, registers per GPU, times on a GPU.

Bytes are counted, not measured: for plain torch every operation's inputs and outputs, for a kernel what its programs load and
store when no cache helps. Prints one JSON document last; times are there only where a GPU is.

    python tools/bench_kernels.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.sampling import kernels
from stepgraph.sampling.bitmask import WORD
from stepgraph.sampling.kernels import chain, choice, filters, processors, rejection
from stepgraph.sampling.rng import Purpose
from stepgraph.sampling.sampler import Param
from tools.gpu.checks.context import Context
from tools.gpu.checks.kernels import SETTINGS, choice_inputs, device_us, filter_inputs, judgement
from tools.gpu.checks.masks import MAX_BIASES, make_case, tag_inputs

CHOICE_TILE, RACE_TILE, REJECTION_TILE, PROCESS_TILE = 4096, 1024, 1024, 512  # as in sampling/kernels/triton, which needs triton
FILTER_TILE, FILTER_DIGIT_BITS, FILTER_PASSES = 2048, 3, 10
SHAPES = ((1, 1, 151_669), (8, 5, 151_669), (64, 5, 131_072))


class Traffic(TorchDispatchMode):
    """Bytes that go in and out of operations, and how many operations there are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations += 1
            outputs = [] if func._schema.is_mutable else _tensors(result)
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in (*_tensors(args), *outputs))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def choice_figures(context: Context, batch: int, positions: int, width: int) -> dict[str, object]:
    """masked_argmax in bfloat16 where every row has a mask."""
    logits, masks, rows, _ = choice_inputs(context.device, batch, positions, width, torch.bfloat16)
    ruled = torch.ones(batch, dtype=torch.bool, device=context.device)
    best = torch.empty(batch, positions, device=context.device)
    token = torch.empty(batch, positions, dtype=torch.int64, device=context.device)
    lines, words = batch * positions, -(-width // WORD)
    marked = int((masks != 0).sum())  # a word without a bit spares its 32 logits
    least = lines * (words * 4 + 12) + marked * WORD * 2
    scratch = lines * -(-width // CHOICE_TILE) * 16
    arguments = (logits, masks, rows, ruled, None, None, best, token)
    return {
        "op": "masked_argmax",
        "shape": f"B={batch} Q={positions} V={width} bfloat16",
        **_figures(
            context,
            least,
            least + scratch,
            partial(choice.masked_argmax.out, *arguments),
            partial(choice.masked_argmax.run_reference, *arguments),
        ),
    }


def race_figures(context: Context, rows: int, width: int) -> dict[str, object]:
    weights = torch.softmax(torch.randn(rows, width, generator=torch.Generator().manual_seed(1)), -1).to(context.device)
    seed = position = torch.arange(rows, device=context.device)
    token = torch.empty(rows, dtype=torch.int64, device=context.device)
    least = weights.numel() * 4 + rows * 24
    scratch = rows * -(-width // RACE_TILE) * 16
    kernel = partial(filters.race.out, weights, seed, position, int(Purpose.DRAFT), token)
    plain = partial(filters.race.run_reference, weights, seed, position, Purpose.DRAFT, token)
    return {"op": "race", "shape": f"N={rows} V={width}", **_figures(context, least, least + scratch, kernel, plain)}


def filter_figures(context: Context, rows: int, width: int, filtered: bool) -> dict[str, object]:
    """The draw of a token, by temperature alone or with top-k and top-p as well; tiles that a pass may skip are counted as read."""
    logits = filter_inputs(rows, width)[0].to(context.device)
    params = torch.tensor([SETTINGS[0 if filtered else 1]] * rows, device=context.device)
    seed = position = torch.arange(rows, device=context.device)
    probs, token = torch.empty_like(logits), torch.empty(rows, dtype=torch.int64, device=context.device)
    arguments = (logits, params, seed, position, int(Purpose.DRAFT), None, None, probs, token)
    least = logits.numel() * 8 + rows * 40
    reads = 2 * FILTER_PASSES if filtered else 1
    scratch = rows * -(-width // FILTER_TILE) * (16 + reads * 2**FILTER_DIGIT_BITS * 16)
    kernel, plain = partial(filters.draw.out, *arguments), partial(filters.draw.run_reference, *arguments)
    return {
        "op": "draw",
        "shape": f"N={rows} V={width}{' top-k top-p' if filtered else ''}",
        **_figures(context, least, least + logits.numel() * 4 * (1 + reads) + scratch, kernel, plain),
    }


def chain_figures(context: Context, batch: int, k: int) -> dict[str, object]:
    device = context.device
    sampled = torch.zeros(batch, k + 1, dtype=torch.int64, device=device)
    finite, stops = torch.ones_like(sampled, dtype=torch.bool), torch.full((batch, 8), -1, device=device)
    room = torch.full((batch,), 9, device=device)
    outputs = [torch.empty_like(room) for _ in range(3)]
    arguments: Any = (sampled, finite, sampled[:, :k].contiguous(), room, sampled, stops, room, None, *outputs)
    least = batch * ((k + 1) * 17 + k * 8 + 8 * 8 + 5 * 8)
    kernel, plain = partial(chain.chain_accept.out, *arguments), partial(chain.chain_accept.run_reference, *arguments)
    return {"op": "chain_accept", "shape": f"B={batch} K={k}", **_figures(context, least, least + batch * k * 8, kernel, plain)}


def rejection_figures(context: Context, batch: int, k: int, width: int) -> dict[str, object]:
    """Of all places only the one behind the drafts that hold is read, and what a draft there was drawn from."""
    inputs = judgement(context.device, batch, k, width)
    tokens, accepted = kernels.reject_sample(*inputs)
    drawn = torch.nn.functional.pad(~inputs.certain, (0, 1)).gather(1, accepted[:, None]).squeeze(1)  # what a refused draft came from
    lines = batch + int(drawn.sum())
    facts = k * (8 + 4 + 4 + 1 + 1 + 8) + 8 + 5 * 8  # of a row: drafts, p and q of each, certain, finite, status; settings
    tiles = -(-width // REJECTION_TILE)
    least = lines * width * 4 + batch * (facts + (k + 2) * 8)
    scratch = batch * (tiles * 16 + (tiles - 1) * facts)
    kernel = partial(rejection.reject_sample.out, *inputs, tokens, accepted)
    plain = partial(rejection.reject_sample.run_reference, *inputs, tokens, accepted)
    return {"op": "reject_sample", "shape": f"B={batch} K={k} V={width}", **_figures(context, least, least + scratch, kernel, plain)}


def tag_figures(context: Context, batch: int, places: int) -> dict[str, object]:
    tags, owner, generated, ruled, rows = tag_inputs(batch, places, context.device)
    arguments: Any = (tags, owner, generated, ruled, 2, rows, torch.empty(batch, places, dtype=torch.int64, device=context.device))
    least = batch * (places * 5 * 8 + 3 * 8 + 1)
    kernel, plain = partial(chain.mask_status.out, *arguments), partial(chain.mask_status.run_reference, *arguments)
    return {"op": "mask_status", "shape": f"B={batch} N={places}", **_figures(context, least, least, kernel, plain)}


def process_figures(context: Context, batch: int, positions: int, width: int, asking: bool) -> dict[str, object]:
    """bfloat16, every row with a mask that counts; `asking`: of every four rows three ask for biases, penalties or more stop tokens."""
    case = make_case(batch, positions, width, torch.bfloat16).on(context.device)
    assert case.ruling is not None and case.rows is not None
    ruling = case.ruling._replace(constrained=torch.ones_like(case.ruling.constrained), status=torch.ones_like(case.ruling.status))
    rows = case.rows if asking else case.rows[:1].expand(batch).contiguous()  # the first row asks for nothing
    arguments = case._replace(ruling=ruling, rows=rows).arguments(case.outputs())
    lines, words, row = batch * positions, -(-width // WORD), case.settings.params[rows]
    penalised = (row[:, Param.PRESENCE_PENALTY] != 0).sum().item()
    repeated = (row[:, Param.REPETITION_PENALTY] != 1).sum().item()
    biased = (case.settings.bias_ids[rows, 0] >= 0).sum().item()
    marked = int((ruling.masks != 0).sum())  # a word without a bit spares its 32 logits
    wishes = width * (4 * penalised + repeated)  # counts and what the prompt has, once for all places of a row
    facts = biased * MAX_BIASES * 12 + batch * (len(Param) * 4 + 24)
    least = lines * (words * 4 + 33) + marked * WORD * 2 + lines * width * 4 + wishes + facts
    tiles = -(-width // PROCESS_TILE)
    again = (positions - 1) * wishes + (lines * tiles - batch) * facts // batch + lines * tiles * 16
    return {
        "op": "process",
        "shape": f"B={batch} Q={positions} V={width} {'asking' if asking else 'neutral'}",
        **_figures(
            context,
            int(least),
            int(least + again),
            partial(processors.process_logits.out, *arguments),
            partial(processors.process_logits.run_reference, *arguments),
        ),
    }


def _figures(
    context: Context, least: int, kernel_bytes: int, kernel: Callable[[], object], plain: Callable[[], object]
) -> dict[str, object]:
    with Traffic() as traffic:
        plain()
    found: dict[str, object] = {
        "least_bytes": least,
        "kernel_bytes": kernel_bytes,
        "torch_bytes": traffic.bytes,
        "torch_operations": traffic.operations,
        "kernel_over_least": round(kernel_bytes / least, 3),
        "torch_over_kernel": round(traffic.bytes / kernel_bytes, 1),
    }
    if not context.rehearsal or context.quick:  # a rehearsal of gpu_check takes the times of next to nothing
        found |= {"kernel_us": device_us(context, kernel), "torch_us": device_us(context, plain)}
    return found


def registers() -> object:
    return _told_by("tools.aot_kernels")


def attention_bytes() -> object:
    return _told_by("tools.bench_attention", TRITON_INTERPRET="1")


def _told_by(tool: str, **settings: str) -> object:
    """In a process of its own: from its import on, a program is either interpreted or compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | settings
    command, root = [sys.executable, "-m", tool], Path(__file__).resolve().parent.parent
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=root, env=environment, check=False)
    return json.loads(result.stdout.splitlines()[-1]) if result.returncode == 0 else result.stderr.strip().splitlines()[-1:]


def report(context: Context) -> dict[str, object]:
    found = [choice_figures(context, *shape) for shape in SHAPES]
    found += [race_figures(context, batch, width) for batch, _, width in SHAPES]
    found += [filter_figures(context, batch, width, asks) for batch, _, width in SHAPES[:2] for asks in (False, True)]
    found += [chain_figures(context, batch, k) for batch, k in ((1, 4), (64, 8))]
    found += [tag_figures(context, batch, 5) for batch in (1, 64)]
    found += [process_figures(context, batch, 5, 151_669, asking) for batch, asking in ((1, False), (8, False), (8, True))]
    found += [rejection_figures(context, batch, k, 151_669) for batch, k in ((1, 4), (8, 4))]
    return {
        "device": platform.machine() if context.rehearsal else torch.cuda.get_device_name(),
        "implementation": kernels.describe(context.device),
        "torch": torch.__version__,
        "operations": found,
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = report(Context(rehearsal=not torch.cuda.is_available(), quick=False))
    operations: Any = found["operations"]
    for entry in operations:
        print(f"{entry['op']:<15}{entry['shape']:<32}", *(f"{name}={value}" for name, value in list(entry.items())[2:]))
    print(json.dumps({**found, "ahead_of_time": registers()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
