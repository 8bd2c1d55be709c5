"""Messages between ranks in captured graphs: all-gathers of NCCL, on a communicator of their own. This process is rank 0 of two."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.graphs import BufferSpec, StaticBuffers, run_eager
from stepgraph.graphs.cuda.backend import CudaBackend
from stepgraph.graphs.graph_set import CaptureReport
from stepgraph.graphs.layers.parallel import RankGroups, register_group, sum_over_ranks
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.parallel.llama import ShardedLlama
from stepgraph.runtime.parallel.ranks import Ranks, process_group
from stepgraph.sampling.cuda_graphs import capture_replay
from tests.stub_cuda.counters import Node, counted, graph_nodes, live_graphs, take_messages

pytestmark = pytest.mark.stub_cuda
FOLDER, NUMBERS = tempfile.TemporaryDirectory(), itertools.count()
DEVICE, SIZE, SECONDS, LAYERS = torch.device("cuda", 0), 2, 30.0, 3


def group() -> dist.ProcessGroup:
    return process_group(f"{FOLDER.name}/{next(NUMBERS)}", 0, SIZE, SECONDS, on_cuda=True)


def added(record: Callable[[], object]) -> list[list[Node]]:
    """The nodes of each graph that a function captures."""
    before = {*live_graphs()}
    record()
    return [graph_nodes(graph) for graph in live_graphs() if graph not in before]


def messages(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.name == "ncclAllGather"]


def communicator(node: Node) -> int:
    return node.pointer(0)


def test_a_captured_sum_is_one_message_of_the_communicator_of_graphs(backend: CudaBackend) -> None:
    buffers = StaticBuffers([BufferSpec("x", (4, 8), torch.float32)], DEVICE)
    groups = RankGroups(*(register_group(group(), SECONDS) for _ in range(2)))

    def step(buffers: StaticBuffers) -> None:
        sum_over_ranks.out(buffers.x, groups.current)

    with counted() as counts:
        (nodes,) = added(lambda: backend.capture(step, buffers))
    assert counts["ncclCommInitRankConfig"] == 1, "the warm-up creates the communicator of graphs"
    (gathered, sums) = nodes
    assert messages(nodes) == [gathered] and sums.dependencies == (0,) and sums.stream == gathered.stream
    assert gathered.pointer(1) == buffers.x.data_ptr() and gathered.pointer(3) == buffers.x.numel()
    with counted() as counts:
        run_eager(step, buffers)
    assert (counts["ncclCommInitRankConfig"], counts["ncclAllGather"]) == (1, 1), "eager work uses another communicator"
    (again,) = added(lambda: backend.capture(step, buffers))
    assert communicator(messages(again)[0]) == communicator(gathered)


def test_a_communicator_that_is_first_used_in_a_capture_breaks_it() -> None:
    """Therefore a step must run on the communicator of graphs before it is captured."""
    number, x, calls = register_group(group(), SECONDS), torch.zeros(4, device=DEVICE), list[int]()

    def step() -> None:
        calls.append(1)
        if len(calls) > 1:  # not in the run before the capture
            sum_over_ranks.out(x, number)

    with pytest.raises(RuntimeError, match="NCCL"):
        capture_replay(step, DEVICE)
    assert any("ncclCommInitRankConfig" in message for message in take_messages())


def test_every_graph_of_a_divided_model_has_its_messages() -> None:
    """Two sums per layer, one of the embeddings, and the most probable token."""
    ranks = Ranks(0, [group() for _ in range(3)], SECONDS)
    vocabulary = Vocabulary.printable()
    whole = LlamaConfig(
        vocab_size=len(vocabulary.tokens),
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        windows=(None,) * LAYERS,
    )
    local = replace(whole, num_heads=2, num_kv_heads=1, intermediate_size=64)
    with torch.no_grad():
        target = ShardedLlama(local, ranks, len(vocabulary.tokens), (), DEVICE)
    config = EngineConfig(max_rows=2, max_length=64, num_speculative_tokens=0, draft_length=0, greedy_only=True, compile_isolation="none")
    reports = list[CaptureReport]()
    with Engine(target, None, vocabulary=vocabulary, config=config) as engine:
        graphs = [nodes for nodes in added(lambda: reports.append(engine.capture())) if messages(nodes)]
    found = Counter(len(messages(nodes)) for nodes in graphs)
    assert found == {2 * LAYERS + 2: len(reports[0].keys), 2 * LAYERS + 1: len(reports[0].prompts)}
    assert len({communicator(node) for nodes in graphs for node in messages(nodes)}) == 1


def test_an_abort_ends_the_communicators() -> None:
    """It also ends kernels that wait for a lost rank."""
    ranks, x = Ranks(0, [group() for _ in range(3)], SECONDS), torch.zeros(4, device=DEVICE)
    for number in (ranks.groups.graph, ranks.groups.eager):
        sum_over_ranks.out(x, number)
    with counted() as counts:
        ranks.abort()
    assert counts["ncclCommAbort"] == 2 and counts["live_nccl_communicators"] == -2
