"""What the stubs keep of graphs that torch and Triton capture: order, edges, kernels with their arguments, memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch

from tests.stub_cuda import counters
from tests.stub_cuda.counters import Node
from tests.stub_cuda.device import device_array


def captured(step: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, list[Node]]:
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph.capture_begin()
        step()
        graph.capture_end()
    graph.instantiate()
    return graph, counters.graph_nodes(graph.raw_cuda_graph())


def test_kernels_of_torch_have_names_shapes_and_arguments() -> None:
    x, y = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
    _, nodes = captured(lambda: torch.add(x, 2.5, out=y))
    (node,) = nodes
    assert node.type == "kernel" and "elementwise_kernel" in node.name
    assert node.grid == (1, 1, 1) and node.block[0] > 1
    assert node.arguments is not None
    assert int.from_bytes(node.arguments[0], "little") == 5
    held = b"".join(node.arguments)
    assert x.data_ptr().to_bytes(8, "little") in held and y.data_ptr().to_bytes(8, "little") in held


def test_products_of_cublas_are_nodes_with_sizes_and_pointers() -> None:
    a, b = torch.zeros(3, 8, device="cuda"), torch.zeros(8, 16, device="cuda")
    out = torch.zeros(3, 16, device="cuda")
    _, nodes = captured(lambda: torch.mm(a, b, out=out))
    (node,) = [node for node in nodes if node.name.startswith("cublas")]
    assert sorted(node.pointer(index) for index in range(3)) == [3, 8, 16]
    assert {node.pointer(index) for index in range(3, 6)} == {a.data_ptr(), b.data_ptr(), out.data_ptr()}


def test_streams_make_the_edges() -> None:
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    others = [torch.zeros(4, device="cuda") for _ in range(2)]

    def fork_and_join() -> None:
        x.fill_(1.0)
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            others[0].fill_(2.0)
        others[1].fill_(3.0)
        main.wait_stream(side)
        x.fill_(4.0)

    graph, nodes = captured(fork_and_join)
    assert [node.type for node in nodes] == ["kernel"] * 4
    assert counters.graph_edges(graph.raw_cuda_graph()) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    assert nodes[0].stream == nodes[2].stream == nodes[3].stream != nodes[1].stream


def test_copies_and_fills_run_at_replay_in_order() -> None:
    source = torch.arange(4, dtype=torch.int32).pin_memory()
    middle, last = (torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2))
    result = torch.zeros(4, dtype=torch.int32).pin_memory()

    def step() -> None:
        middle.copy_(source, non_blocking=True)
        last.copy_(middle)
        result.copy_(last, non_blocking=True)

    graph, nodes = captured(step)
    assert [node.type for node in nodes] == ["copy"] * 3
    assert [node.fields["nbytes"] for node in nodes] == [16] * 3
    assert not any(node.fields["pageable"] for node in nodes)
    source.copy_(torch.tensor([7, 8, 9, 10], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert result.tolist() == device_array(last).tolist() == [7, 8, 9, 10]


def uncached() -> int:
    """A size for which torch has no memory in its cache, where other tests may have left some."""
    return (64 << 20) + torch.cuda.memory_reserved()


def test_memory_is_accounted_for() -> None:
    torch.cuda.empty_cache()
    before, nbytes = torch.cuda.mem_get_info()[0], uncached()
    with counters.counted() as counts:
        block = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    assert (counts["device_allocations"], counts["live_device_bytes"]) == (1, nbytes)
    assert before - torch.cuda.mem_get_info()[0] == nbytes
    with counters.counted() as counts:
        del block
        torch.cuda.empty_cache()
    assert (counts["device_frees"], counts["live_device_bytes"]) == (1, -nbytes)
    assert torch.cuda.mem_get_info()[0] == before


def test_launches_inside_and_outside_of_a_graph_are_distinguished() -> None:
    x = torch.zeros(4, device="cuda")
    graph, _ = captured(lambda: x.fill_(1.0))
    with counters.counted() as counts:
        x.fill_(2.0)
    assert counts.of((*counters.EAGER, "graph_launches")) == {"eager_kernels": 1}
    with counters.counted() as counts:
        graph.replay()
    assert counts["graph_launches"] == 1 and not counts.of(("eager_copies", "eager_fills", "eager_host_calls"))


def test_replay_over_freed_memory_is_counted() -> None:
    torch.cuda.empty_cache()
    source = torch.zeros(1024, dtype=torch.uint8).pin_memory()
    buffers = [torch.empty(uncached(), dtype=torch.uint8, device="cuda")]
    graph, _ = captured(lambda: buffers[0][:1024].copy_(source, non_blocking=True))
    graph.replay()
    torch.cuda.synchronize()
    buffers.clear()
    torch.cuda.empty_cache()
    counters.take_messages()
    with counters.counted() as counts:
        graph.replay()
        torch.cuda.synchronize()
    assert counts["illegal_addresses"] == 1
    assert "memory that was freed" in counters.take_messages()[0]


def test_child_processes_find_the_stubs() -> None:
    script = "import torch; print(torch.cuda.get_device_name(), torch.zeros(3, device='cuda').tolist())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "Stub CUDA device [0.0, 0.0, 0.0]\n", done.stderr
