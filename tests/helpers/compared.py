"""Device operations against their references, on outputs with arbitrary content."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from stepgraph.sampling.kernels.operation import Operation
from tools.gpu.checks.operations import Call, Run


def call_of(operation: Operation[..., Any], *inputs: Any, tol: float = 0.0) -> Call:
    """Inputs are completed and arranged as by a call of the operation."""
    inputs = operation._complete(inputs, {})
    arranged = tuple(value if how is None or value is None else how(value) for how, value in zip(operation._arrange, inputs, strict=True))
    made = operation._outputs(*inputs)
    outputs = () if made is None else (made,) if isinstance(made, Tensor) else made
    aliases = [argument.alias_info for argument in operation.out._schema.arguments[: len(inputs)]]
    writes = tuple(index for index, alias in enumerate(aliases) if alias is not None and alias.is_write and inputs[index] is not None)
    return Call(operation, "", arranged, tuple(output.fill_(-9) for output in outputs), writes=writes, tol=tol)


def compare(call: Call, run: Run) -> list[Tensor]:
    """The results of `run`, which equal those of the reference; NaN equals NaN."""
    found, expected = call.results(run), call.results(call.operation.run_reference)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=call.tol, atol=call.tol, equal_nan=True)
    return found


def compare_c(operation: Operation[..., Any], *inputs: Any, tol: float = 0.0) -> list[Tensor]:
    """Outputs and changed inputs of the kernel in C."""
    call = call_of(operation, *inputs, tol=tol)
    assert operation.prepare(*call.inputs, *call.outputs) is not None, "C supports these inputs"
    return compare(call, operation.out)


def compare_program(operation: Operation[..., Any], *inputs: Any, tol: float = 0.0, **constants: int) -> list[Tensor]:
    """Outputs and changed inputs of the Triton program, with these constants."""
    call = call_of(operation, *inputs, tol=tol)
    return compare(call, functools.partial(call.triton, **constants))
