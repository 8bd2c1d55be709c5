"""What the kernels cost: bytes per call against the least possible and against plain torch, registers per GPU, times on a GPU.

Bytes are counted, not measured: for plain torch every operation's inputs and outputs, for a kernel what its programs load and
store when no cache helps. Prints one JSON document last, with times only on a GPU.

    python tools/bench_kernels.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.sampling import kernels
from tools.gpu.checks import operations
from tools.gpu.checks.context import Context
from tools.gpu.checks.operations import Call
from tools.gpu.checks.stopwatch import device_us

SHAPES = ((1, 1, 151_669), (8, 5, 151_669), (64, 5, 131_072))


class Traffic(TorchDispatchMode):
    """Counts operations, and the bytes of their inputs and outputs."""

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


def calls(device: torch.device) -> Iterator[Call]:
    for shape in SHAPES:
        yield operations.masked_argmax(device, *shape, all_masked=True)
    for (batch, _, width), setting in itertools.product(SHAPES[:2], (operations.UNFILTERED, operations.FILTERED)):
        yield operations.draw(device, batch, width, setting)
    for batch, k in ((1, 4), (64, 8)):
        yield operations.chain_accept(device, batch, k)
    for batch in (1, 64):
        yield operations.mask_status(device, batch, 5)
    for batch, neutral in ((1, True), (8, True), (8, False)):
        yield operations.process_all_masked(device, batch, 5, 151_669, neutral=neutral)
    for batch in (1, 8):
        yield operations.reject_sample(device, batch, 4, 151_669)


def figures(context: Context, call: Call) -> dict[str, object]:
    with Traffic() as traffic:
        call.reference()
    least, kernel_bytes = call.least_bytes, call.least_bytes + call.additional_bytes
    found: dict[str, object] = {
        "op": call.operation.name,
        "shape": call.shape,
        "least_bytes": least,
        "kernel_bytes": kernel_bytes,
        "torch_bytes": traffic.bytes,
        "torch_operations": traffic.operations,
        "kernel_over_least": round(kernel_bytes / least, 3),
        "torch_over_kernel": round(traffic.bytes / kernel_bytes, 1),
    }
    if not context.rehearsal:
        found |= {"kernel_us": device_us(context, call.kernel), "torch_us": device_us(context, call.reference)}
    return found


def registers() -> object:
    return _document_of("tools.aot_kernels")


def attention_bytes() -> object:
    return _document_of("tools.bench_attention", TRITON_INTERPRET="1")


def _document_of(tool: str, **settings: str) -> object:
    """The JSON document of another tool, run as a subprocess: Triton interprets or compiles for the whole life of a process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | settings
    command, root = [sys.executable, "-m", tool], Path(__file__).resolve().parent.parent
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=root, env=environment, check=False)
    return json.loads(result.stdout.splitlines()[-1]) if result.returncode == 0 else result.stderr.strip().splitlines()[-1:]


def report(context: Context) -> dict[str, object]:
    return {
        "device": platform.machine() if context.rehearsal else torch.cuda.get_device_name(),
        "implementation": kernels.describe(context.device),
        "torch": torch.__version__,
        "operations": [figures(context, call) for call in calls(context.device)],
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
