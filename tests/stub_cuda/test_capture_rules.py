"""The capture rules of the stubs themselves, by the CUDA programming guide: without torch and without stepgraph."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.stub_cuda import counters, device
from tests.stub_cuda.device import GLOBAL, RELAXED, SUCCESS, THREAD_LOCAL, Runtime


@pytest.fixture
def cuda() -> Iterator[Runtime]:
    runtime = device.runtime()
    counters.take_messages()
    yield runtime
    runtime.cudaDeviceSynchronize()


def on_another_thread(function: Callable[[], int]) -> int:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(function()))
    thread.start()
    thread.join()
    return codes[0]


def end(cuda: Runtime, stream: int) -> int:
    return cuda.end_capture(stream)[0]


def allocate(cuda: Runtime) -> int:
    pointer = ctypes.c_void_p()
    code = cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4096))
    if code == SUCCESS and pointer.value:
        cuda.cudaFree(pointer.value)
    return code


@pytest.mark.parametrize(
    ("mode", "own", "other"),
    [(GLOBAL, device.UNSUPPORTED, device.UNSUPPORTED), (THREAD_LOCAL, device.UNSUPPORTED, SUCCESS), (RELAXED, SUCCESS, SUCCESS)],
)
def test_capture_mode_decides_which_threads_may_allocate(cuda: Runtime, mode: int, own: int, other: int) -> None:
    for expected, call in ((own, lambda: allocate(cuda)), (other, lambda: on_another_thread(lambda: allocate(cuda)))):
        stream = cuda.stream()
        assert cuda.cudaStreamBeginCapture(stream, mode) == SUCCESS
        assert call() == expected
        code, graph = cuda.end_capture(stream)
        assert code == (device.INVALIDATED if expected else SUCCESS)
        assert bool(graph) == (not expected)
        assert bool(counters.take_messages()) == bool(expected)
        if graph:
            cuda.cudaGraphDestroy(graph)
        cuda.cudaStreamDestroy(stream)


def test_exchanged_mode_permits_an_unsafe_call_on_the_capturing_thread(cuda: Runtime) -> None:
    stream, mode = cuda.stream(), ctypes.c_int(RELAXED)
    assert cuda.cudaStreamBeginCapture(stream, GLOBAL) == SUCCESS
    cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == GLOBAL
    assert allocate(cuda) == SUCCESS
    cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == RELAXED
    assert cuda.end_capture(stream)[0] == SUCCESS


@pytest.mark.parametrize("call", ["cudaStreamSynchronize", "cudaStreamQuery"])
def test_capturing_stream_can_be_neither_queried_nor_waited_for(cuda: Runtime, call: str) -> None:
    stream = cuda.stream()
    cuda.cudaStreamBeginCapture(stream, RELAXED)
    assert getattr(cuda, call)(stream) == device.UNSUPPORTED
    assert cuda.end_capture(stream)[0] == device.INVALIDATED


def test_device_synchronization_ends_every_capture(cuda: Runtime) -> None:
    stream = cuda.stream()
    cuda.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    assert on_another_thread(cuda.cudaDeviceSynchronize) == device.UNSUPPORTED
    assert cuda.end_capture(stream)[0] == device.INVALIDATED


def test_event_of_a_capture_cannot_be_queried(cuda: Runtime) -> None:
    stream, event = cuda.stream(), cuda.event()
    cuda.cudaStreamBeginCapture(stream, RELAXED)
    cuda.cudaEventRecord(event, stream)
    assert cuda.cudaEventQuery(event) == device.CAPTURED_EVENT
    assert cuda.end_capture(stream)[0] == device.INVALIDATED
    assert cuda.cudaEventSynchronize(event) == device.CAPTURED_EVENT


def test_fork_without_join_is_refused_at_the_end(cuda: Runtime) -> None:
    main, side, event = cuda.stream(), cuda.stream(), cuda.event()
    memory = cuda.made("cudaHostAlloc", ctypes.c_size_t(64), 0)
    cuda.cudaStreamBeginCapture(main, GLOBAL)
    cuda.cudaEventRecord(event, main)
    assert cuda.cudaStreamWaitEvent(side, event, 0) == SUCCESS
    cuda.cudaMemsetAsync(memory, 1, ctypes.c_size_t(64), ctypes.c_void_p(side))
    assert cuda.end_capture(side)[0] == device.UNMATCHED
    assert cuda.end_capture(main)[0] == device.UNJOINED
    assert cuda.cudaStreamQuery(side) == SUCCESS  # no longer part of a capture
    cuda.cudaFreeHost(memory)


def test_captures_neither_merge_nor_depend_on_work_outside(cuda: Runtime) -> None:
    one, other, event = cuda.stream(), cuda.stream(), cuda.event()
    cuda.cudaStreamBeginCapture(one, RELAXED)
    cuda.cudaStreamBeginCapture(other, RELAXED)
    cuda.cudaEventRecord(event, one)
    assert cuda.cudaStreamWaitEvent(other, event, 0) == device.MERGE
    assert cuda.end_capture(one)[0] == cuda.end_capture(other)[0] == device.INVALIDATED

    cuda.cudaEventRecord(event, other)
    cuda.cudaStreamBeginCapture(one, RELAXED)
    assert cuda.cudaStreamWaitEvent(one, event, 0) == device.ISOLATION
    assert cuda.end_capture(one)[0] == device.INVALIDATED


def test_capture_ends_on_its_thread_unless_it_is_relaxed(cuda: Runtime) -> None:
    for mode, expected in ((THREAD_LOCAL, device.WRONG_THREAD), (RELAXED, SUCCESS)):
        stream = cuda.stream()
        cuda.cudaStreamBeginCapture(stream, mode)
        assert on_another_thread(functools.partial(end, cuda, stream)) == expected
        if expected:
            assert cuda.end_capture(stream)[0] == SUCCESS


def test_legacy_stream_is_closed_while_a_blocking_stream_captures(cuda: Runtime) -> None:
    memory = cuda.made("cudaHostAlloc", ctypes.c_size_t(64), 0)
    for flags, expected in ((device.NON_BLOCKING, SUCCESS), (0, device.IMPLICIT)):
        stream = cuda.stream(flags)
        cuda.cudaStreamBeginCapture(stream, RELAXED)
        assert cuda.cudaMemsetAsync(memory, 1, ctypes.c_size_t(64), None) == expected
        assert cuda.end_capture(stream)[0] == (device.INVALIDATED if expected else SUCCESS)
    assert cuda.cudaStreamBeginCapture(None, RELAXED) == device.UNSUPPORTED
    cuda.cudaFreeHost(memory)


def test_work_runs_asynchronously_and_events_report_its_end(cuda: Runtime) -> None:
    stream, event, gate = cuda.stream(), cuda.event(), threading.Event()
    block = device.HOST_FUNCTION(lambda _: gate.wait(10) and None)
    cuda.cudaLaunchHostFunc(ctypes.c_void_p(stream), block, None)
    cuda.cudaEventRecord(event, stream)
    assert cuda.cudaEventQuery(event) == cuda.cudaStreamQuery(stream) == device.NOT_READY
    gate.set()
    assert cuda.cudaEventSynchronize(event) == SUCCESS
    assert cuda.cudaEventQuery(event) == cuda.cudaStreamQuery(stream) == SUCCESS


def test_host_node_cannot_call_cuda(cuda: Runtime) -> None:
    stream, codes = cuda.stream(), list[int]()
    call = device.HOST_FUNCTION(lambda _: codes.append(cuda.cudaStreamQuery(stream)))
    cuda.cudaLaunchHostFunc(ctypes.c_void_p(stream), call, None)
    cuda.cudaStreamSynchronize(stream)
    assert codes == [device.NOT_PERMITTED]
    assert counters.take_messages() == ["cudaStreamQuery called from a host node"]


def test_live_objects_are_counted() -> None:
    cuda = device.runtime()
    with counters.counted() as counts:
        stream, event = cuda.stream(), cuda.event()
        cuda.cudaStreamBeginCapture(stream, RELAXED)
        _, graph = cuda.end_capture(stream)
        exec_ = cuda.made("cudaGraphInstantiateWithFlags", ctypes.c_void_p(graph), ctypes.c_ulonglong(0))
    assert counts.of(counters.LIVE) == {"live_graphs": 1, "live_graph_execs": 1, "live_streams": 1, "live_events": 1}
    with counters.counted() as counts:
        assert cuda.cudaGraphUpload(exec_, ctypes.c_void_p(stream)) == SUCCESS
        assert cuda.cudaGraphLaunch(exec_, ctypes.c_void_p(stream)) == SUCCESS
        cuda.cudaStreamSynchronize(stream)
        for call, handle in (("GraphExecDestroy", exec_), ("GraphDestroy", graph), ("StreamDestroy", stream), ("EventDestroy", event)):
            assert getattr(cuda, f"cuda{call}")(handle) == SUCCESS
            assert getattr(cuda, f"cuda{call}")(handle) != SUCCESS
    assert counts.of(counters.LIVE) == {"live_graphs": -1, "live_graph_execs": -1, "live_streams": -1, "live_events": -1}
    assert (counts["graph_uploads"], counts["graph_launches"], counts["graph_launches_that_upload"]) == (1, 1, 0)
