"""One torch.library.custom_op per kernel: plain torch on the CPU, a Triton program on a GPU, the same results.

The operations write tensors that the caller gives them, so that a tape repeats them in place. Where Triton cannot launch, a GPU
runs the plain torch version too. Some have a native version for the CPU.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload

Run = Callable[[], object]
Prepare = Callable[..., Run | None]  # an operation's arguments in, a call that does it again and again in their memory out
_natives: dict[str, Prepare] = {}
log = logging.getLogger(__name__)


@functools.cache
def why_no_triton(device: torch.device) -> str:
    """Why Triton programs cannot run on `device`; empty where they can. One is launched to find out: Triton needs a C compiler too."""
    try:
        importlib.import_module("stepgraph.sampling.kernels.triton.probe").launch(device)
    except Exception as error:  # of Triton, the C compiler, the loader or the driver
        log.warning("Triton cannot launch on %s, so kernels run as plain torch: %s", device, reason(error))
        return reason(error)
    return ""


def reason(error: Exception) -> str:
    """Type and first line, for a report."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def operation(
    programs: str | Callable[[torch.device], str], name: str, schema: str, reference: Callable[..., None], native: Prepare | None = None
) -> CustomOpDef:
    """Register `reference`, and for CUDA the function `name` of programs/`programs`.py, which takes the same arguments.

    The first argument is a tensor. What the schema marks as written is all that the operation gives: it returns nothing.
    `programs` is "", or a function of the device that gives "", where the reference is meant. `native` gives None for what it
    does not do on the CPU: that is the reference's.
    """

    def on_cpu(*arguments: Any) -> None:
        run = native(*arguments) if native is not None else None
        if run is None:
            return reference(*arguments)
        run()

    def on_cuda(first: torch.Tensor, *others: Any) -> None:
        module = programs(first.device) if callable(programs) else programs
        if not module or (not callable(programs) and why_no_triton(first.device)):
            return reference(first, *others)
        program = getattr(importlib.import_module(module if "." in module else f"stepgraph.sampling.kernels.triton.{module}"), name)
        with torch.cuda.device(first.device):
            program(first, *others)

    written = re.findall(r"\(\w!\) (\w+)", schema)
    made = torch.library.custom_op(f"stepgraph::{name}", on_cpu, mutates_args=written, device_types="cpu", schema=schema)
    made.register_kernel("cuda")(on_cuda)
    made.register_fake(lambda *_: None)  # shapes are the caller's
    if native is not None:
        _natives[f"stepgraph::{name}"] = native
    return made


def settled(func: OpOverload, arguments: Sequence[Any]) -> Run | None:
    """`func` over memory that stays where it is, past torch's dispatcher; None where it has no native version for these arguments."""
    native = _natives.get(func._schema.name)
    return None if native is None or arguments[0].device.type != "cpu" else native(*arguments)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Neighbours of the last dimension side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
