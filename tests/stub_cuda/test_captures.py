"""Captures beside other work: threads that allocate, captures that fail, and other captures."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from stepgraph.graphs import BufferSpec, CaptureError, StaticBuffers, current_context, run_eager
from stepgraph.graphs.capture import CaptureCheck
from stepgraph.graphs.cuda.backend import CudaBackend
from stepgraph.sampling.cuda_graphs import capture_replay
from tests.stub_cuda import device
from tests.stub_cuda.counters import counted, take_messages

pytestmark = pytest.mark.stub_cuda
DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def buffers() -> StaticBuffers:
    return StaticBuffers([BufferSpec(name, (4,), torch.float32) for name in "xy"], DEVICE)


def add(buffers: StaticBuffers) -> None:
    buffers.y.copy_(buffers.x + 1)


def synchronises(buffers: StaticBuffers) -> None:
    buffers.y.copy_(buffers.x * 2)
    buffers.x.sum().item()


def in_a_thread(function: Callable[[], object]) -> list[BaseException]:
    """Run `function` in a new thread, to the end. Returns the exceptions that it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


class Allocating:
    """A step during which another thread, such as that of a serving engine, allocates memory that torch has not cached."""

    def __init__(self) -> None:
        self.raised: list[BaseException] = []
        self.x = torch.zeros(4, device=DEVICE)

    def __call__(self, *_: object) -> None:
        taken = 64 * MIB
        self.raised += in_a_thread(lambda: torch.empty(taken + torch.cuda.memory_reserved(), dtype=torch.uint8, device=DEVICE))
        self.x.add_(1)


def test_a_probe_and_a_thread_that_allocates_do_not_disturb_each_other() -> None:
    step = Allocating()
    capture_replay(step, DEVICE)
    assert not step.raised


def test_an_eager_run_with_a_host_node_and_a_capture_do_not_disturb_each_other() -> None:
    static, x, raised = buffers(), torch.zeros(4, device=DEVICE), list[BaseException]()

    def look(_: StaticBuffers) -> None:
        current_context().host_node("look", lambda: None)

    def step() -> None:
        raised.extend(in_a_thread(lambda: run_eager(look, static)))
        x.add_(1)

    capture_replay(step, DEVICE)
    assert not raised


def test_captures_share_no_casts_of_autocast_with_other_code(backend: CudaBackend) -> None:
    static, layer, kernels = buffers(), torch.nn.Linear(4, 4, device=DEVICE), list[tuple[int, int]]()

    def step(b: StaticBuffers) -> None:
        b.y.copy_(layer(b.x))

    for cached in (True, False):
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cached):
            graph = backend.capture(step, static)
            with counted() as eager:
                run_eager(step, static)
        kernels.append((graph.report.nodes["kernel"], eager["eager_kernels"]))
    assert kernels[0] == kernels[1]


def test_new_threads_query_wait_and_close(backend: CudaBackend) -> None:
    backend.capture(add, buffers()).replay()
    event = backend.event()
    take_messages()
    for call in (event.query, event.wait, backend.active_work, backend.close):
        assert not in_a_thread(call)
    assert not take_messages()


def test_a_fork_leaves_the_device_to_its_parent(backend: CudaBackend) -> None:
    child = os.fork()
    if not child:
        with counted() as counts:
            backend.close()
        os._exit(bool(counts))
    assert os.waitpid(child, 0)[1] == 0


def test_a_probe_waits_for_the_end_of_another_capture(backend: CudaBackend) -> None:
    recording, probing, captured, calls = threading.Event(), threading.Event(), threading.Event(), list[bool]()
    x = torch.zeros(4, device=DEVICE)

    def probe_step() -> None:
        x.add_(1)
        calls.append(torch.cuda.is_current_stream_capturing())
        if calls[-1]:
            captured.set()
        else:
            probing.set()

    def step(buffers: StaticBuffers) -> None:
        if torch.cuda.is_current_stream_capturing():
            recording.set()
            assert probing.wait(60)
            assert not captured.wait(0.5), "two captures at once"
        add(buffers)

    def probe() -> None:
        assert recording.wait(60)
        capture_replay(probe_step, DEVICE)

    thread = threading.Thread(target=probe)
    thread.start()
    backend.capture(step, buffers())
    thread.join()
    assert calls == [False, True]


def test_a_probe_that_cannot_be_captured_leaves_torch_able_to_capture(backend: CudaBackend) -> None:
    x = torch.zeros(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="CUDA error"):
        capture_replay(lambda: x.sum().item(), DEVICE)
    capture_replay(lambda: x.add_(1), DEVICE)()
    assert backend.capture(add, buffers()).report.nodes == {"kernel": 1, "copy": 1}
    with pytest.raises(CaptureError, match="cuda"):
        backend.capture(synchronises, buffers())
    assert backend.capture(add, buffers()).report.nodes == {"kernel": 1, "copy": 1}


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_any_error_in_the_capture_is_a_capture_error(backend: CudaBackend, error: type[Exception]) -> None:
    def step(buffers: StaticBuffers) -> None:
        add(buffers)
        if torch.cuda.is_current_stream_capturing():
            raise error("as of a kernel launcher")

    with pytest.raises(CaptureError, match=rf"\[exception\] {error.__name__}: as of a kernel launcher\n.*test_captures.py") as caught:
        backend.capture(step, buffers())
    assert isinstance(caught.value.__cause__, error)
    assert backend.capture(add, buffers()).report.nodes == {"kernel": 1, "copy": 1}


@pytest.mark.parametrize("check", ["once", "twice"])
def test_captures_upload_their_graph_if_torch_supports_it(backend: CudaBackend, check: CaptureCheck) -> None:
    static = buffers()
    with counted() as capture:
        graph = backend.capture(add, static, check=check)
    uploads = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")  # not in torch 2.8
    assert capture["graph_uploads"] == uploads
    with counted() as replays:
        graph.replay()
        graph.replay()
        backend.synchronize()
    assert replays["graph_launches"] == 2
    assert replays.of(("graph_uploads", "graph_launches_that_upload")) == ({} if uploads else {"graph_launches_that_upload": 1})


def test_a_checked_capture_restores_pinned_buffers_after_their_copies(backend: CudaBackend) -> None:
    """The comparing run of the step waits on the device before its copy to the host."""
    buffers = StaticBuffers([BufferSpec("y", (4,), torch.float32), BufferSpec("y_host", (4,), torch.float32, "pinned")], DEVICE)
    buffers.y_host.fill_(5)
    wait, cuda = device.HOST_FUNCTION(lambda _: time.sleep(0.05)), device.runtime()

    def step(b: StaticBuffers) -> None:
        b.y.fill_(7)
        if not torch.cuda.is_current_stream_capturing():
            assert cuda.cudaLaunchHostFunc(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), wait, None) == 0
        b.y_host.copy_(b.y, non_blocking=True)

    backend.capture(step, buffers, check="twice")
    backend.synchronize()
    assert buffers.y_host.tolist() == [5, 5, 5, 5]
