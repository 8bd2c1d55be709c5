"""What the stub libraries counted, and the graphs that they hold. See README.md for the names of the counters."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

ALLOCATIONS = ("device_allocations", "pinned_allocations")
SYNCS = (
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMemset", "cudaFree", "cudaFreeHost"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
)
EAGER = ("eager_kernels", "eager_copies", "eager_fills", "eager_host_calls")  # work outside graphs
LIVE = ("live_graphs", "live_graph_execs", "live_streams", "live_events", "live_device_bytes", "live_pinned_bytes", "live_cublas_handles")

NODE_TYPES = {0: "kernel", 1: "copy", 2: "fill", 3: "host", 4: "graph", 5: "empty", 6: "event_wait", 7: "event_record", 13: "conditional"}


class Node(NamedTuple):
    """One node of a graph. `fields` depends on the type: a copy has source, destination, nbytes, pageable; a graph or conditional body."""

    type: str
    stream: int  # number of the stream that it was captured from
    dependencies: tuple[int, ...]  # indices of other nodes in the graph
    name: str  # of a kernel, demangled
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[bytes, ...] | None  # of a kernel, in order; None: not known
    fields: dict[str, Any]

    def pointer(self, index: int) -> int:
        """Argument `index`, which is 8 bytes wide."""
        assert self.arguments is not None and len(self.arguments[index]) == 8
        return int.from_bytes(self.arguments[index], "little")


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")  # loaded by preload.py
    for name in ("stub_counters", "stub_take_messages", "stub_describe_graph", "stub_live_graphs", "stub_take_issued"):
        getattr(library, name).restype = ctypes.c_size_t
    library.stub_describe_graph.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    return library


def counters() -> Counter[str]:
    """Every counter by name: calls of each CUDA function, and the sums that README.md lists. Absent means 0."""
    room = 1 << 16
    text = ctypes.create_string_buffer(room)
    while (size := _library().stub_counters(text, ctypes.c_size_t(room))) > room:
        room = size
        text = ctypes.create_string_buffer(room)
    return Counter({name: int(value) for name, value in (line.split() for line in text.value.decode().splitlines())})


class Counts(Counter[str]):
    """Differences of the counters over a `counted()` block, without those that did not change."""

    def of(self, names: tuple[str, ...]) -> dict[str, int]:
        return {name: self[name] for name in names if self[name]}


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """The counts of the block, complete at its end. Does not synchronise."""
    counts, before = Counts(), counters()
    try:
        yield counts
    finally:
        after = counters()
        counts.update({name: after[name] - before[name] for name in after if after[name] != before[name]})


def take_messages() -> list[str]:
    """Messages about refused and unknown calls since the last call of this function. Only the newest 1,000 are kept."""
    text = ctypes.create_string_buffer(1 << 20)
    _library().stub_take_messages(text, ctypes.c_size_t(len(text)))
    return text.value.decode(errors="replace").splitlines()


class Issued(NamedTuple):
    """Work outside captures, or an event that a stream recorded or waits for, in the order of the calls."""

    kind: str  # graph, eager_copies, eager_fills, eager_kernels, eager_host_calls, record, wait
    stream: int  # its number
    subject: int  # the exec of a graph, the destination of a copy or fill, the event

    @property
    def is_work(self) -> bool:
        return self.kind not in ("record", "wait")


def take_issued(more: bool) -> list[Issued]:
    """What was issued since the last call with more=True. more: record what is issued from now on."""
    text = ctypes.create_string_buffer(1 << 22)
    assert _library().stub_take_issued(text, ctypes.c_size_t(len(text)), more) <= len(text)
    return [Issued(kind, int(stream), int(subject)) for kind, stream, subject in map(str.split, text.value.decode().splitlines())]


def before(issued: list[Issued]) -> list[set[int]]:
    """For each item, the indices of the work that ends before it begins, by the order of streams and by events."""
    streams: dict[int, set[int]] = {}
    events: dict[int, set[int]] = {}
    found = []
    for index, (item, stream) in enumerate((each, streams.setdefault(each.stream, set())) for each in issued):
        found.append(set(stream))
        if item.kind == "record":
            events[item.subject] = set(stream)
        elif item.kind == "wait":
            stream |= events.get(item.subject, set())
        else:
            stream.add(index)
    return found


def live_graphs() -> list[int]:
    """Handles of the graphs that were captured and not destroyed."""
    handles = (ctypes.c_void_p * 65536)()
    count = _library().stub_live_graphs(handles, ctypes.c_size_t(len(handles)))
    return [handle or 0 for handle in handles[:count]]


def graph_nodes(graph: int) -> list[Node]:
    """The nodes of a cudaGraph_t, in the order of capture: `torch.cuda.CUDAGraph.raw_cuda_graph()` gives the handle."""
    room = _library().stub_describe_graph(graph, None, 0)
    if not room:
        raise ValueError(f"graph: got {graph:#x}, expected the handle of a graph that was not destroyed")
    text = ctypes.create_string_buffer(room)
    _library().stub_describe_graph(graph, text, room)
    return [_node(fields) for fields in json.loads(text.value.decode(errors="replace"))]


def graph_edges(graph: int) -> set[tuple[int, int]]:
    """(before, after) for every edge, as indices in `graph_nodes(graph)`."""
    return {(before, after) for after, node in enumerate(graph_nodes(graph)) for before in node.dependencies}


def _node(fields: dict[str, Any]) -> Node:
    if "body" in fields:
        fields["body"] = [_node(inner) for inner in fields["body"]]
    shape = fields.pop("shape", [0] * 7)
    arguments = fields.pop("arguments", None)
    return Node(
        type=NODE_TYPES[fields.pop("type")],
        stream=fields.pop("stream"),
        dependencies=tuple(fields.pop("dependencies")),
        name=fields.pop("name", ""),
        grid=tuple(shape[:3]),
        block=tuple(shape[3:6]),
        arguments=None if arguments is None else tuple(bytes.fromhex(text) for text in arguments),
        fields=fields,
    )
