"""The cuBLAS workspaces of captured products: other code, such as torch.compile, may free all workspaces of torch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from stepgraph.graphs import BufferSpec, StaticBuffers, current_context
from stepgraph.graphs.cuda.backend import CudaBackend
from stepgraph.graphs.cuda.launcher import CudaGraph
from stepgraph.sampling.cuda_graphs import GraphPool, _workspaces, capture_replay
from tests.stub_cuda.counters import counted, graph_nodes

pytestmark = pytest.mark.stub_cuda
DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
IN_GRAPHS = torch.__version__.startswith("2.8.")  # this version allocates the workspace of cuBLASLt in each call, as any tensor
SIZES = (32 * MIB, 8 * MIB, MIB, MIB // 2)  # sizes of workspaces, and smaller ones


def buffers() -> StaticBuffers:
    return StaticBuffers([BufferSpec(name, (16, 16), torch.float32) for name in "xyz"], DEVICE)


def products(buffers: StaticBuffers) -> None:
    torch.mm(buffers.x, buffers.x, out=buffers.y)
    torch.addmm(buffers.x[0], buffers.x, buffers.y, out=buffers.z)  # by cuBLASLt, which has a workspace of its own


def products_on_two_streams(buffers: StaticBuffers) -> None:
    context = current_context()
    event = context.record()
    with context.stream("side"):
        context.wait(event)
        products(buffers)
        event = context.record()
    torch.addmm(buffers.x[0], buffers.x, buffers.x)
    torch.mm(buffers.x, buffers.x)
    context.wait(event)


def copies(buffers: StaticBuffers) -> None:
    buffers.y.copy_(buffers.x)


def clear() -> None:
    """Clear the workspaces, as torch.compile does before and after its captures, and free all memory that torch can free."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()


def captured(backend: CudaBackend, step: Callable[[StaticBuffers], None]) -> tuple[CudaGraph, set[int]]:
    """The graph, and the workspaces of its products outside its own pool. Each belongs to one stream; in newer versions of torch both
    functions share it."""
    graph = backend.capture(step, buffers())
    nodes = [node for node in graph_nodes(graph._recording.graph.raw_cuda_graph()) if node.name.startswith("cublas")]
    found = {(node.name, node.stream): node.fields["workspace"] for node in nodes}
    assert {name for name, _ in found} == {"cublasSgemm_v2", "cublasLtMatmul"}
    of_streams = {(stream, workspace) for (_, stream), workspace in found.items()}
    assert len({workspace for _, workspace in of_streams}) == len(of_streams)
    assert all(node.fields["workspace"] == found[node.name, node.stream] for node in nodes)
    in_graph = {name for (name, _), workspace in found.items() if in_pool(backend.resources.pool, workspace)}
    assert in_graph == ({"cublasLtMatmul"} if IN_GRAPHS else set())
    return graph, {workspace for (name, _), workspace in found.items() if name not in in_graph}


def in_pool(pool: GraphPool, address: int) -> bool:
    """Whether the address is in this pool, whose graphs keep its memory."""
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool.handle]
    return any(0 <= address - segment["address"] < segment["total_size"] for segment in segments)


def illegal_addresses(replay: Callable[[], object]) -> int:
    with counted() as counts:
        replay()
        torch.cuda.synchronize()
    assert counts["graph_launches"] == 1
    return counts["illegal_addresses"]


def handed_out(backend: CudaBackend) -> list[tuple[int, int]]:
    """Begin and end of new tensors of many sizes, on several streams and in a graph."""
    held: list[torch.Tensor] = []

    def allocate(buffers: StaticBuffers) -> None:
        held.extend(torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) for nbytes in SIZES for _ in range(4))
        buffers.x.zero_()

    static = buffers()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), *backend.resources.streams.values()):
        with torch.cuda.stream(stream):
            allocate(static)
    graph = backend.capture(allocate, static)
    graph.replay()
    return [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in held]


@pytest.mark.parametrize("step", [products, products_on_two_streams])
def test_captured_workspaces_outlive_those_that_other_code_frees(backend: CudaBackend, step: Callable[[StaticBuffers], None]) -> None:
    first, used = captured(backend, step)
    clear()
    assert illegal_addresses(first.replay) == 0
    tensors = handed_out(backend)
    assert not [address for address in used for begin, end in tensors if begin <= address < end]
    second, used_next = captured(backend, step)
    clear()
    # A pool has a workspace for each thread, in which it may find that of another: graphs of a backend run one after the other.
    pools = [_workspaces[stream.cuda_stream] for stream in backend.resources.capture_streams.values()]
    assert all(any(in_pool(pool, address) for pool in pools) for address in used | used_next)
    assert illegal_addresses(first.replay) == illegal_addresses(second.replay) == 0


def test_a_second_backend_reuses_the_workspaces_of_the_first() -> None:
    used = []
    for _ in range(2):
        backend = CudaBackend()
        graph, addresses = captured(backend, products_on_two_streams)
        clear()
        assert illegal_addresses(graph.replay) == 0
        used.append(addresses)
        del graph
        backend.close()
    assert used[0] == used[1]


def test_backends_side_by_side_share_no_workspace() -> None:
    backends = [CudaBackend() for _ in range(3)]
    used = [captured(backend, products)[1] for backend in backends]
    assert len(set().union(*used)) == sum(map(len, used))
    for backend in backends:
        backend.close()


def test_no_other_code_gets_a_stream_of_captures(backend: CudaBackend) -> None:
    """Eager products of other code would write to the workspaces while a graph runs. torch hands out 32 streams in turn."""
    captured(backend, products_on_two_streams)
    theirs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    used = {stream.cuda_stream for stream in backend.resources.capture_streams.values()}
    ours = {stream.cuda_stream for stream in backend.resources.streams.values()}
    assert len(used) == len(ours) == 2 and not used & (theirs | ours) and not ours & theirs


def test_workspaces_do_not_grow_with_the_number_of_backends() -> None:
    reserved = list[int]()
    for _ in range(50):
        backend = CudaBackend()
        captured(backend, products_on_two_streams)
        backend.close()
        del backend
        clear()
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved)) == 1


def test_workspaces_outlive_the_thread_that_captured(backend: CudaBackend) -> None:
    graphs: list[CudaGraph] = []
    thread = threading.Thread(target=lambda: graphs.append(captured(backend, products)[0]))
    thread.start()
    thread.join()
    graphs.append(captured(backend, products)[0])
    clear()
    assert [illegal_addresses(graph.replay) for graph in graphs] == [0, 0]


def test_a_replayed_probe_outlives_a_clear() -> None:
    static = buffers()
    replay = capture_replay(lambda: products(static), DEVICE)
    clear()
    assert illegal_addresses(replay) == 0


def test_a_failure_to_hold_workspaces_leaves_those_of_earlier_graphs(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = captured(backend, products)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "addmm", lambda *_, **__: torch.cuda.synchronize())
        with pytest.raises(RuntimeError, match="CUDA error"):
            backend.capture(copies, buffers())
    clear()
    assert illegal_addresses(graph.replay) == 0
    later, _ = captured(backend, products)
    clear()
    assert illegal_addresses(graph.replay) == illegal_addresses(later.replay) == 0


def test_a_thread_without_a_cublas_handle_captures(backend: CudaBackend) -> None:
    """torch reuses the handles of threads that have ended, so several threads that live at once need new ones."""
    graphs, all_captured = list[CudaGraph](), threading.Barrier(8)

    def capture() -> None:
        try:
            graphs.append(backend.capture(copies, buffers()))
        finally:
            all_captured.wait(60)

    threads = [threading.Thread(target=capture) for _ in range(all_captured.parties)]
    with counted() as counts:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts["live_cublas_handles"] > 0
    assert [graph.report.nodes for graph in graphs] == [{"copy": 1}] * len(threads)
