"""Creates backends, captures single steps, and runs steps without recording them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, BackendName, Between, CaptureCheck, Generators, Recorded, Step, host_call
from stepgraph.graphs.context import NULL_CONTEXT, StreamEvent, use_context
from stepgraph.graphs.errors import CaptureError, HostNodeError
from stepgraph.graphs.spans import RangeFactory, RecordedReport, nvtx_range
from stepgraph.graphs.tape.backend import TapeBackend
from stepgraph.sampling import fields
from stepgraph.sampling.fields import BOOL, FUNCTION, callable_with, check_members, check_value, clip_repr, instance_of, optional

_STEP = fields.Check(callable_with(None), "a function of one argument, the buffers")
_GENERATORS = fields.Check(
    lambda value: isinstance(value, (tuple, list)) and all(isinstance(each, torch.Generator) for each in value), "torch.Generators"
)


def make_backend(name: BackendName = "auto", *, asynchronous: bool = False, nvtx: bool = False) -> Backend:
    """`name`: "tape" records on the CPU, "cuda" into a CUDA graph, "auto" chooses "cuda" if there is a device.

    asynchronous: the tape replays on a thread of its own, like a GPU. CUDA always replays asynchronously; there it means that the
    caller's stream does not wait for replays, and the caller uses events and `run` instead.
    nvtx: NVTX ranges for stages, in captures and eager runs, and for launches.
    """
    check_value("make_backend.asynchronous", asynchronous, BOOL)
    check_value("make_backend.nvtx", nvtx, BOOL)
    ranges = nvtx_range() if nvtx else None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "tape"
    if name == "tape":
        return TapeBackend(asynchronous=asynchronous, ranges=ranges)
    if name == "cuda":
        from stepgraph.graphs.cuda.backend import CudaBackend  # loads torch.profiler

        return CudaBackend(ordered=not asynchronous, ranges=ranges)
    raise ValueError(f"backend: got {clip_repr(name)}, expected 'auto', 'tape' or 'cuda'")


def capture(
    step: Step,
    buffers: StaticBuffers,
    backend: BackendName | Backend = "auto",
    *,
    check: CaptureCheck = "once",
    between: Between = None,
    generators: Generators = (),
) -> Recorded:
    """Record `step(buffers)` once. `.replay()` of the result runs it in place on the current contents of the buffers.

    The capture leaves the buffers unchanged. CaptureError, with file, line and source text, if the step cannot be replayed.

    backend: "tape", "cuda", an existing Backend, or "auto" for the device of the buffers.
    check: "twice" records a second time and compares. A scalar or a branch that differs depends on host state, which a graph would
        freeze. `between` is called between the two recordings, to change that state.
    generators: the random generators that the step uses.
    """
    check_value("capture.step", step, _STEP)
    check_value("capture.buffers", buffers, instance_of(StaticBuffers, "StaticBuffers"))
    check_value("capture.between", between, optional(FUNCTION))
    check_value("capture.generators", generators, _GENERATORS)
    if not isinstance(backend, str):
        check_members("capture.backend", backend, Backend)
    elif backend == "auto":
        backend = "cuda" if buffers.device.type == "cuda" else "tape"
    chosen = make_backend(backend) if isinstance(backend, str) else backend
    return chosen.capture(step, buffers, check=check, between=between, generators=generators)


class EagerContext:
    """Runs a step without recording: one stream, and a host node is a call."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None, ranges: RangeFactory | None = None) -> None:
        self._synchronize = synchronize
        self._ranges = ranges

    def stream(self, name: str) -> AbstractContextManager[None]:
        return NULL_CONTEXT

    def stage(self, name: str) -> AbstractContextManager[None]:
        return NULL_CONTEXT if self._ranges is None else self._ranges(name)

    def record(self) -> StreamEvent:
        return self

    def wait(self, event: StreamEvent) -> None:
        pass

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self._synchronize()  # device copies may still be writing the pinned memory that the node reads
        try:
            with self.stage(name):
                host_call(name, function)()
        except Exception as error:
            raise HostNodeError(name, error) from error


@torch.no_grad()
def run_eager(step: Step, buffers: StaticBuffers, ranges: RangeFactory | None = None) -> None:
    """Run a step once without recording it. Every replay must equal this bit for bit."""
    check_value("run_eager.step", step, _STEP)
    check_value("run_eager.buffers", buffers, instance_of(StaticBuffers, "StaticBuffers"))
    synchronize = torch.cuda.current_stream(buffers.device).synchronize if buffers.device.type == "cuda" else lambda: None
    with use_context(EagerContext(synchronize, ranges)):
        step(buffers)


class EagerStep:
    """Takes the place of a recording: `replay` runs the step eagerly."""

    report = RecordedReport(nodes={}, host_nodes=(), nbytes=0, seconds=0.0)
    rounds = 0

    def __init__(self, backend: Backend, step: Step, buffers: StaticBuffers) -> None:
        self._backend, self._step, self._buffers = backend, step, buffers

    def replay(self, *, until: Tensor | None = None, limit: int | None = None, is_round: bool = True) -> None:
        if until is not None or limit is not None:
            raise CaptureError("eager-in-loop", "a step that runs eagerly is launched by the host each time; replay it without until=")
        self._backend.run(lambda: run_eager(self._step, self._buffers, self._backend.ranges))
