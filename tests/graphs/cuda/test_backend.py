"""The parts of the CUDA backend that run without a GPU. tools/gpu_check.py checks the rest on a GPU."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch

from stepgraph.graphs import BufferSpec, CaptureError, HostNodeError, StaticBuffers, capture, make_backend
from stepgraph.graphs.context import FirstError
from stepgraph.graphs.cuda.context import HostCallback
from stepgraph.graphs.cuda.driver import Driver
from stepgraph.graphs.cuda.recorder import as_capture_error, first_node_difference
from stepgraph.graphs.cuda.resources import open_driver
from stepgraph.graphs.errors import Site, site_of
from stepgraph.graphs.spans import GraphNode
from stepgraph.sampling.cuda_graphs import gc_paused

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the messages on a machine without a GPU")
C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Caller = Callable[[HostCallback], None]


def call_as_c(callback: HostCallback) -> None:
    C_FUNCTION(callback.address)(callback.data)


def call_from_foreign_thread(callback: HostCallback) -> None:
    """Like the driver: from a thread that Python did not start."""
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(callback.address), ctypes.c_void_p(callback.data)) == 0
    assert libc.pthread_join(thread, None) == 0


@needs_no_gpu
def test_cuda_backend_without_a_gpu_raises_a_helpful_error() -> None:
    with pytest.raises(RuntimeError, match=r"backend 'cuda': torch .* has no CUDA device; use backend 'tape' on the CPU"):
        make_backend("cuda")


@needs_no_gpu
def test_auto_backend_is_the_tape_without_a_gpu() -> None:
    assert make_backend("auto").name == "tape"


@needs_no_gpu
def test_capture_on_cuda_fails_before_anything_is_recorded() -> None:
    buffers = StaticBuffers([BufferSpec("x", (2,), torch.float32)])
    calls: list[int] = []
    with pytest.raises(RuntimeError, match="backend 'cuda'"):
        capture(lambda b: calls.append(1), buffers, backend="cuda")
    assert not calls


def test_missing_driver_library_is_named() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(RuntimeError, match=r"no NVIDIA driver: libcuda\.so\.1.*backend 'tape'"):
            open_driver()
    else:
        open_driver()  # it has every declared call


def test_missing_driver_function_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"no cuGetErrorName: .*expected a driver for CUDA 12"):
        Driver(ctypes.CDLL(None))


@pytest.mark.parametrize("call", [call_as_c, call_from_foreign_thread])
def test_python_callback_runs_when_c_calls_its_address(call: Caller) -> None:
    threads: list[int] = []
    errors = FirstError()
    callback = HostCallback("node", lambda: threads.append(threading.get_ident()), errors)
    call(callback)
    assert len(threads) == 1
    assert (threads[0] == threading.get_ident()) == (call is call_as_c)
    errors.raise_first()


@pytest.mark.parametrize("call", [call_as_c, call_from_foreign_thread])
@pytest.mark.parametrize("cause", [ValueError("bad mask"), KeyboardInterrupt(), SystemExit(3)])
def test_error_of_a_python_callback_is_stored_and_raised_once(
    call: Caller, cause: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = FirstError()

    def function() -> None:
        raise cause

    call(HostCallback("commit", function, errors))
    with pytest.raises(HostNodeError, match=f"host node 'commit' failed: {type(cause).__name__}") as caught:
        errors.raise_first()
    assert caught.value.__cause__ is cause
    assert caught.value.node == "commit"
    errors.raise_first()
    assert capfd.readouterr().err == ""  # ctypes prints an exception that leaves the callback


def test_a_python_callback_collects_no_garbage() -> None:
    """A collection may free CUDA memory, and a host node must not call CUDA."""
    collections: list[tuple[str, int]] = []
    note = lambda phase, _: collections.append((phase, threading.get_ident()))  # noqa: E731
    ran: list[int] = []
    kept: list[list[int]] = []
    many = 10 * gc.get_threshold()[0]

    def function() -> None:
        ran.append(threading.get_ident())
        kept.extend([] for _ in range(many))

    errors = FirstError()
    callback = HostCallback("node", function, errors)
    gc.collect()
    gc.callbacks.append(note)
    try:
        call_from_foreign_thread(callback)
        kept.extend([] for _ in range(many))
    finally:
        gc.callbacks.remove(note)
    errors.raise_first()
    assert {thread for _, thread in collections} == {threading.get_ident()} != set(ran)


def test_collection_is_off_until_the_last_thread_ends_its_block() -> None:
    with gc_paused:
        call_from_foreign_thread(HostCallback("node", lambda: None, FirstError()))
        assert not gc.isenabled()
    assert gc.isenabled()


def test_first_host_error_is_kept_until_it_is_raised() -> None:
    errors = FirstError()
    for name in ("first", "second"):
        errors.store(HostNodeError(name, ValueError(name)))
    with pytest.raises(HostNodeError, match="'first'"):
        errors.raise_first()
    errors.store(HostNodeError("third", ValueError("third")))
    with pytest.raises(HostNodeError, match="'third'"):
        errors.raise_first()


def test_callback_survives_collection_and_a_thousand_calls() -> None:
    count = [0]

    def function() -> None:
        count[0] += 1

    callback = HostCallback("node", function, FirstError())
    del function
    for _ in range(1000):
        call_as_c(callback)
        if count[0] % 100 == 0:
            gc.collect()
    assert count == [1000]


def test_callback_keeps_its_function_alive_exactly_as_long_as_itself() -> None:
    class Function:
        def __call__(self) -> None:
            pass

    function = Function()
    alive = weakref.ref(function)
    callback = HostCallback("node", function, FirstError())
    del function
    gc.collect()
    assert alive() is not None
    del callback
    assert alive() is None  # no reference cycle: freed together with the recording


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_collection_in_a_callback(enabled: bool) -> None:
    seen: list[bool] = []
    callback = HostCallback("node", lambda: seen.append(gc.isenabled()), FirstError())
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        call_as_c(callback)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [False]


class NativeNode:
    """A native host node: a C function from ctypes, with a counter as its data."""

    def __init__(self) -> None:
        self.counter = ctypes.c_int(0)
        self._entry = C_FUNCTION(self._count)
        self.native_address = ctypes.cast(self._entry, ctypes.c_void_p).value
        self.native_data = ctypes.addressof(self.counter)

    @staticmethod
    def _count(data: int) -> None:
        ctypes.c_int.from_address(data).value += 1

    def __call__(self) -> None:
        raise AssertionError("the Python side of a native node must not be called")


@pytest.mark.parametrize("call", [call_as_c, call_from_foreign_thread])
def test_native_function_is_called_directly_with_its_data(call: Caller) -> None:
    node, errors = NativeNode(), FirstError()
    callback = HostCallback("native", node, errors)
    assert (callback.address, callback.data) == (node.native_address, node.native_data)
    counter = node.counter
    del node
    gc.collect()
    for _ in range(3):
        call(callback)
    assert counter.value == 3
    errors.raise_first()


def test_native_function_needs_address_and_data() -> None:
    function = NativeNode()
    del function.native_data
    with pytest.raises(ValueError, match="'half': got one of native_address and native_data, expected both or neither"):
        HostCallback("half", function, FirstError())


def test_two_captures_are_compared_node_by_node() -> None:
    kernel, other = GraphNode("kernel", (7, 1, 1, 1, 128, 1, 1, 0)), GraphNode("kernel", (7, 2, 1, 1, 128, 1, 1, 0))
    assert first_node_difference([kernel, GraphNode("host")], [kernel, GraphNode("host")]) is None
    for first, second, text in (
        ([kernel], [other], "node 0"),
        ([kernel, GraphNode("fill")], [kernel, GraphNode("copy")], "node 1"),
        ([kernel], [kernel, kernel], "1 nodes and the other 2"),
    ):
        found = first_node_difference(first, second)
        assert isinstance(found, CaptureError)
        assert found.rule == "baked-branch"
        assert text in str(found)


def test_failed_capture_names_the_line_of_the_step() -> None:
    model = torch.nn.Linear(3, 3)
    try:
        model(torch.zeros(2, 4))  # the line to blame
    except RuntimeError as error:
        found = as_capture_error(error)
    assert (found.rule, found.file) == ("cuda", __file__)
    assert found.source == "model(torch.zeros(2, 4))  # the line to blame"
    assert f"{__file__}:{found.line}" in str(found)


def test_failed_capture_inside_torch_has_no_line() -> None:
    assert site_of([]) == Site("", 0)
    assert site_of(traceback.walk_stack(sys._getframe())).file == __file__


def test_unjoined_stream_has_its_own_rule() -> None:
    assert as_capture_error(RuntimeError("CUDA error: capturing stream has unjoined work\nmore")).rule == "unjoined-fork"
