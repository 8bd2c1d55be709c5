"""`check="twice"`: a second recording over other contents, and where the two differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import CaptureError
from stepgraph.graphs.tape.recorder import Node, Recorder
from stepgraph.graphs.tape.rules import fail


def record_perturbed(record: Callable[[], Recorder], buffers: StaticBuffers) -> Recorder:
    """Record over other buffer contents, so that a value read from them behind the recorder's back shows."""
    saved = {name: buffers[name].clone() for name in buffers}
    try:
        for name in saved:
            _perturb(buffers[name])
        return record()
    except CaptureError:
        raise
    except Exception:  # an operation refused the altered values, such as an index out of range
        for name, tensor in saved.items():
            buffers[name].copy_(tensor)
        return record()
    finally:
        for name, tensor in saved.items():
            buffers[name].copy_(tensor)


def _perturb(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(0.5).add_(0.25)
    else:
        tensor.bitwise_xor_(1)


def first_difference(first: Sequence[Node], second: Sequence[Node]) -> CaptureError | None:
    """Where two recordings of one step differ: host state was read while recording, and would be frozen into the graph."""
    for a, b in zip(first, second, strict=False):
        if (a.kind, a.name, a.stream, len(a.leaves)) != (b.kind, b.name, b.stream, len(b.leaves)):
            return fail("baked-branch", f"host state chose {a.actor} in one recording and {b.actor} in the other", b.site)
        changed = [(x, y) for x, y in zip(a.leaves, b.leaves, strict=True) if x != y]
        for x, y in sorted(changed):  # a scalar says more than the tensor shapes that follow from it
            rule, what = ("baked-scalar", "number") if x[0] == "scalar" else ("baked-branch", "tensor")
            return fail(rule, f"{a.name} got another {what} in each recording: {x[1]}, then {y[1]}", b.site)
    if len(first) != len(second):
        extra = max(first, second, key=len)[min(len(first), len(second))]
        return fail("baked-branch", f"host state decided whether {extra.actor} is recorded at all", extra.site)
    return None
