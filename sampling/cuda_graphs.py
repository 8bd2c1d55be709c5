"""CUDA graph captures: one at a time per process, streams and memory pools, and recovery from a failed capture."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

# "thread_local": only unsafe calls of the capturing thread break a capture. With "global", a cudaMalloc or an event query in any
# thread of the process would break it, and a server that embeds an engine has such threads.
_CAPTURE_ERROR_MODE = "thread_local"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, as torch's own streams
_failed_captures: list[torch.cuda.CUDAGraph] = []  # torch's allocators keep a pointer into the graph of a failed capture
capture_lock = threading.RLock()  # torch allows one capture per process; each includes its warm-up: see CudaBackend
_free_streams: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)  # by device
_free_capture_streams: defaultdict[tuple[int, int], list[torch.cuda.Stream]] = defaultdict(list)  # by device and cuBLAS handle
_workspaces: dict[int, _Workspaces] = {}  # by the handle of a capture stream
_first_workspaces: dict[int, _Workspaces] = {}  # by device: torch gives the handle of a thread together with a workspace for some stream


class GraphPool:
    """Memory of graphs captured on `stream`. A graph of one node keeps it alive: torch cannot capture into a pool without graphs."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.renew()

    def renew(self, generators: Sequence[torch.Generator] = ()) -> None:
        """Replace the pool by a new one; the old one is freed with its last graph."""
        anchor_graph, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device=self.stream.device)
        for generator in generators:
            anchor_graph.register_generator_state(generator)
        with _exclusive_capture(self.stream):
            anchor_graph.capture_begin(capture_error_mode=_CAPTURE_ERROR_MODE)
            scratch.zero_()
            anchor_graph.capture_end()
        self._anchor_graph = anchor_graph

    @property
    def handle(self) -> torch.cuda._POOL_HANDLE:
        return self._anchor_graph.pool()

    def release(self) -> None:
        self._anchor_graph.reset()


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: GraphPool, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Capture the operations of the block into `graph`. After a failure torch can capture again."""
    for generator in generators:
        graph.register_generator_state(generator)
    with _exclusive_capture(pool.stream):
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode=_CAPTURE_ERROR_MODE)
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is raised
                _end_capture(graph, pool, generators)
                graph.reset()
            raise
        _end_capture(graph, pool, generators)


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream, to be returned with `return_stream`. Streams are reused, because cuBLAS keeps a workspace for each.

    It is not from torch's pool, whose 32 streams torch.cuda.Stream() hands out in turn: work of other code on it would wait for rounds.
    """
    try:
        return _free_streams[torch.cuda.current_device() if device.index is None else device.index].pop()
    except IndexError:
        return _new_stream(device)


def take_capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for captures only, to be returned with `return_stream`. Eager matrix products of other code on it would use the cuBLAS
    workspace of a running graph.

    The stream is new, or was created with the cuBLAS handle of this thread: each further handle would need a further workspace.
    """
    with torch.cuda.device(device), capture_lock:
        index = torch.cuda.current_device()
        if index in _first_workspaces:
            free = _free_capture_streams[index, _first_workspaces[index].blas_handle()]
            if free:
                return free.pop()
        workspaces = _Workspaces(_new_stream(device))
        _first_workspaces.setdefault(index, workspaces)
        _workspaces[workspaces.stream.cuda_stream] = workspaces
        return workspaces.stream


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # creates a context for this thread; driver calls need one
        created = ctypes.c_void_p()
        if code := driver_library().cuStreamCreate(ctypes.byref(created), _NON_BLOCKING):
            raise RuntimeError(f"cuStreamCreate failed: error {code}")
        return torch.cuda.ExternalStream(created.value, device)


def return_stream(stream: torch.cuda.Stream) -> None:
    workspaces, device = _workspaces.get(stream.cuda_stream), stream.device_index
    (_free_streams[device] if workspaces is None else _free_capture_streams[device, workspaces.created_with_handle]).append(stream)


class Streams(dict[str, torch.cuda.Stream]):
    """The streams of one backend by name, taken on first use: those on which graphs run, or on which steps are captured."""

    def __init__(self, device: torch.device, take: Callable[[torch.device], torch.cuda.Stream] = take_stream) -> None:
        super().__init__()
        self._take = functools.partial(take, device)

    def __missing__(self, name: str) -> torch.cuda.Stream:
        return self.setdefault(name, self._take())

    def release(self) -> None:
        while self:
            return_stream(self.popitem()[1])


def hold_workspaces(streams: Iterable[torch.cuda.Stream]) -> None:
    """Make matrix products of the next capture by this thread on these streams use workspaces that are never freed."""
    with capture_lock:
        for stream in streams:
            _workspaces[stream.cuda_stream].hold()


class _Workspaces(GraphPool):
    """Memory of the cuBLAS workspaces of a capture stream. It is never freed.

    torch has one workspace per cuBLAS handle (one per thread) and stream, and allocates it in the first call. Any code may free all
    workspaces, as torch.compile does before and after its captures, but the kernels of a graph keep the address of their capture.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self.created_with_handle, self._graph = self.blas_handle(), torch.cuda.CUDAGraph()
        with self._allocating():
            self._bias, self._matrix, self._product = (
                torch.zeros(size, dtype=torch.float16, device=stream.device) for size in ((16,), (16, 16), (16, 16))
            )
            self._multiply()  # loads its kernel; only now, as later a graph that uses the workspace may be running
        stream.synchronize()

    def hold(self) -> None:
        """Make torch allocate the missing workspaces of the calling thread in this pool."""
        anchor_graph = self._anchor_graph
        self._graph.reset()  # first: newer versions of torch free the workspaces of a stream with each graph that was captured on it
        graph = torch.cuda.CUDAGraph()
        try:
            self.blas_handle()  # a handle cannot be created during a capture
            with capturing(graph, self):
                self._multiply()
        finally:
            if anchor_graph is not self._anchor_graph:
                _failed_captures.append(anchor_graph)  # graphs use the memory of this pool
        self._graph = graph

    def blas_handle(self) -> int:
        """The cuBLAS handle of this thread. torch has a workspace for it after this call."""
        with self._allocating():
            handle: int = torch.cuda.current_blas_handle()
        return handle

    def _multiply(self) -> None:
        """A product with a bias, which torch runs in cuBLASLt: only such a call allocates the separate workspace of cuBLASLt."""
        torch.addmm(self._bias, self._matrix, self._matrix, out=self._product)

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        """Allocations of this thread on the stream are made in this pool."""
        device, pool = self.stream.device_index, self.handle
        with torch.cuda.device(device), torch.cuda.stream(self.stream), torch.inference_mode(False):
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)


@functools.cache
def driver_library() -> ctypes.CDLL:
    """The library of the CUDA driver; OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def capture_replay(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Run `step` once and capture it, on streams of its own; returns the replay function. On the CPU, returns `step`."""
    if device.type != "cuda":
        return step
    graph, stream = torch.cuda.CUDAGraph(), take_stream(device)
    with torch.cuda.device(device), contextlib.ExitStack() as after:
        after.callback(return_stream, stream)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        with capture_lock:
            after.callback(return_stream, capture_stream := take_capture_stream(device))
            pool = GraphPool(capture_stream)
            hold_workspaces([capture_stream])
            with capturing(graph, pool):
                step()
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def replay_us(replay: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """The median time on the device, in microseconds. `before` is called before each replay."""
    times = list[float]()
    for _ in range(repeats):
        before()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        replay()
        ended.record()
        ended.synchronize()
        times.append(1e3 * begun.elapsed_time(ended))
    return statistics.median(times)


def empty_cache() -> None:
    """torch.cuda.empty_cache() after any running capture: during a capture it fails."""
    with capture_lock:
        torch.cuda.empty_cache()


def _end_capture(graph: torch.cuda.CUDAGraph, pool: GraphPool, generators: Sequence[torch.Generator]) -> None:
    """End the capture. If CUDA has invalidated it, reset torch's state: allocators that still use the pool, and random generators
    that are still in capture mode (only a successful capture resets those)."""
    try:
        graph.capture_end()
    except RuntimeError:
        device, handle = pool.stream.device_index, pool.handle
        try:
            torch._C._cuda_endAllocateToPool(device, handle)
        except RuntimeError:  # newer versions of torch have ended it already; the reset releases the pool
            graph.reset()
        else:
            _failed_captures.append(graph)
            torch._C._cuda_releasePool(device, handle)
        pool.renew(generators)  # the allocator of pinned memory still uses the old pool
        raise


@contextlib.contextmanager
def _exclusive_capture(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on `stream` while no other capture runs."""
    with capture_lock, torch.cuda.stream(stream), torch.no_grad(), gc_paused:
        torch.clear_autocast_cache()  # casts of weights, which are freed before the graph
        try:
            yield
        finally:
            torch.clear_autocast_cache()  # casts in the memory of the graph


class _GcPaused:
    """A context without garbage collection in any thread, which could free graphs and events. For captures, and for host nodes, which
    must not call CUDA.

    `__exit__` creates no object after it enables collection: a new object could start a collection, also in a host node."""

    def __init__(self) -> None:
        self._lock, self._depth, self._enabled = threading.Lock(), 0, False

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._depth:
            self._enabled = gc.isenabled()
            gc.disable()
        self._depth += 1
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self._lock.acquire()
        self._depth -= 1
        if self._enabled and not self._depth:
            gc.enable()
        self._lock.release()


gc_paused = _GcPaused()
