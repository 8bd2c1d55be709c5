"""Creates backends, and captures single steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Check, Recorded, Step
from stepgraph.graphs.spans import nvtx_range
from stepgraph.graphs.tape.backend import TapeBackend


def make_backend(name: str = "auto", *, asynchronous: bool = False, nvtx: bool = False) -> Backend:
    """`name`: "tape" records on the CPU, "cuda" into a CUDA graph, "auto" chooses "cuda" if there is a device.

    asynchronous: the tape replays on a thread of its own, like a GPU. CUDA always replays asynchronously; there it means that the
    caller's stream does not wait for replays, and the caller uses events and `run` instead.
    nvtx: NVTX ranges for stages, in captures and eager runs, and for launches.
    """
    ranges = nvtx_range() if nvtx else None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "tape"
    if name == "tape":
        return TapeBackend(asynchronous=asynchronous, ranges=ranges)
    if name == "cuda":
        from stepgraph.graphs.cuda.backend import CudaBackend  # loads torch.profiler

        return CudaBackend(ordered=not asynchronous, ranges=ranges)
    raise ValueError(f"backend: got {name!r}, expected 'auto', 'tape' or 'cuda'")


def capture(
    step: Step,
    buffers: StaticBuffers,
    backend: str | Backend = "auto",
    *,
    check: Check = "once",
    between: Callable[[], None] | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Recorded:
    """Record `step(buffers)` once. `.replay()` of the result runs it in place on the current contents of the buffers.

    The capture leaves the buffers unchanged. CaptureError, with file, line and source text, if the step cannot be replayed.

    backend: "tape", "cuda", an existing Backend, or "auto" for the device of the buffers.
    check: "twice" records a second time and compares. A scalar or a branch that differs depends on host state, which a graph would
        freeze. `between` is called between the two recordings, to change that state.
    generators: the random generators that the step uses.
    """
    if backend == "auto":
        backend = "cuda" if buffers.device.type == "cuda" else "tape"
    chosen = make_backend(backend) if isinstance(backend, str) else backend
    return chosen.capture(step, buffers, check=check, between=between, generators=generators)
