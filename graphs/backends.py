"""Which device records a step: the choice of a backend, and `capture` for a single step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Check, Recorded, Step
from stepgraph.graphs.spans import nvtx_range
from stepgraph.graphs.tape.backend import TapeBackend


def make_backend(name: str = "auto", *, asynchronous: bool = False, nvtx: bool = False) -> Backend:
    """`tape` records on the CPU, `cuda` into a CUDA graph, `auto` takes cuda where a device is present.

    `asynchronous` lets the tape replay on a thread of its own, as a GPU does. CUDA always is: there it means that the
    caller orders its own work by events and `run`, instead of having its current stream wait for every replay. `nvtx`
    shows stages to nsys as ranges: while they are captured, in eager runs, and around whatever the caller launches.
    """
    ranges = nvtx_range() if nvtx else None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "tape"
    if name == "tape":
        return TapeBackend(asynchronous=asynchronous, ranges=ranges)
    if name == "cuda":
        from stepgraph.graphs.cuda.backend import CudaBackend  # loads torch.profiler

        return CudaBackend(ordered=not asynchronous, ranges=ranges)
    raise ValueError(f"backend: got {name!r}, want 'auto', 'tape' or 'cuda'")


def capture(
    step: Step,
    buffers: StaticBuffers,
    backend: str | Backend = "auto",
    *,
    check: Check = "once",
    between: Callable[[], None] | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Recorded:
    """Record `step(buffers)` once; `.replay()` of the result repeats it in place, over whatever the buffers then hold.

    `backend` is "tape", "cuda", a Backend to share, or "auto": where the buffers are. Capturing changes nothing in the
    buffers. `check="twice"` records a second time and compares: a scalar or a branch that differs was read from host state
    and would be frozen into the graph; `between` is called between the two recordings to change the host state that must
    not matter. `generators` are the random generators the step may use. Raises CaptureError with file, line and source
    text of what cannot be replayed.
    """
    if backend == "auto":
        backend = "cuda" if buffers.device.type == "cuda" else "tape"
    chosen = make_backend(backend) if isinstance(backend, str) else backend
    return chosen.capture(step, buffers, check=check, between=between, generators=generators)
