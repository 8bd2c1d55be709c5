"""What every capture into a CUDA graph has in common: one at a time in a process, and the way back from one that failed."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

# "thread_local": a capture fails for unsafe calls of its own thread only. Under "global" a cudaMalloc or an event query of
# any thread of the process would break it, and an embedding server has such threads.
_MODE = "thread_local"
_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocators keep a filter that points into the graph of a failed capture
_one_at_a_time = threading.Lock()  # torch allows one capture in a process


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    pool: torch.cuda._POOL_HANDLE | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[None]:
    """Capture what the block issues on `stream` into `graph`. Where the block or the capture fails, torch can capture again."""
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    for generator in generators:
        graph.register_generator_state(generator)
    with _one_at_a_time, _no_collection(), torch.cuda.stream(stream), torch.no_grad():
        try:
            graph.capture_begin(pool=pool, capture_error_mode=_MODE)
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one to raise
                _end(graph, stream, pool, generators)
                graph.reset()
            raise
        _end(graph, stream, pool, generators)


def replayed(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Run `step` once and capture it, on a stream of its own: what replays it. On the CPU, `step` itself."""
    if device.type != "cuda":
        return step
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        with capturing(graph, stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def _end(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: torch.cuda._POOL_HANDLE, generators: Sequence[torch.Generator]) -> None:
    """Where CUDA has given the capture up, undo what torch leaves: an allocator that still records into the pool, and random
    generators that still believe in a capture (a capture that succeeds puts these right)."""
    try:
        graph.capture_end()
    except RuntimeError:
        _failed.append(graph)
        with contextlib.suppress(RuntimeError):  # torch itself got this far
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
        cure, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device=stream.device)
        for generator in generators:
            cure.register_generator_state(generator)
        cure.capture_begin(capture_error_mode=_MODE)
        scratch.zero_()
        cure.capture_end()
        cure.reset()
        raise


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collection during a capture could free graphs and events in the midst of it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
