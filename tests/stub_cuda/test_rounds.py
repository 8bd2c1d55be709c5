"""Rounds of every key and drafter on the real torch: captured twice, the edges between their streams, and several engines at once."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph import Engine, SamplingParams
from stepgraph.graphs.graph_key import FULL, FULL_LENGTH, Drafting, GraphKey
from stepgraph.graphs.graph_set import graph_keys
from stepgraph.graphs.prefill import PromptKey
from stepgraph.graphs.publishing import FINISH_COLUMN
from stepgraph.sampling.grammar.link.native import available_processors
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.kernels.operation import OPERATIONS
from stepgraph.sampling.native import why_not
from tests.stub_cuda import counters
from tests.stub_cuda.subject import Backend, greedy_engine
from tools.gpu.checks.context import VOCABULARY
from tools.gpu.checks.engines import CONFIG, drafters_of

DEVICE = torch.device("cuda", 0)
DRAFTERS = [name for name, *_ in drafters_of(torch.device("cpu"))]
TURNS = 50


def make(name: str, backend: Backend | None = None, **changes: Any) -> Engine:
    """An engine that was not captured."""
    _, target, drafter, own = next(one for one in drafters_of(DEVICE) if one[0] == name)
    settings = {"grammar_lane": "host", **own, **changes}
    settings.setdefault("draft_length", settings.get("num_speculative_tokens", CONFIG.num_speculative_tokens))
    config = replace(CONFIG, filters="triton", **settings)
    return Engine(target, drafter, vocabulary=VOCABULARY, config=config, backend=backend)  # type: ignore[arg-type]


def replay_every_key_twice(engine: Engine, drafting: tuple[Drafting, ...] = (FULL,), device: bool = False) -> int:
    """Capture, replay, drop and capture every key again. Two recordings of a key have the same nodes."""
    graphs, backend = engine._graphs, engine.backend
    keys: list[GraphKey | PromptKey] = [*graph_keys(graphs.buckets, False, device, drafting), *graphs._prompt_keys]
    for key in keys:
        reports = []
        for _ in range(2):
            recorded = backend.capture(graphs.step(key), engine.buffers)
            reports.append((recorded.report.nodes, recorded.report.host_nodes, recorded.report.stages))
            with counters.counted() as counts:
                for _ in range(2):
                    if isinstance(key, GraphKey) and key.constrained and not key.device:
                        engine._in_flight._host_link.push_batch([None] * key.rows)
                    recorded.replay()
                    backend.synchronize()
            assert counts["graph_launches"] == 2, key
            assert not counts.of(counters.ALLOCATIONS) and not counts.of(counters.EAGER), key
            assert counts["executed_host_nodes"] == 2 * len(recorded.report.host_nodes), key
            del recorded
            gc.collect()
            backend.synchronize()
        assert reports[0] == reports[1], key
    return len(keys)


@pytest.mark.parametrize(
    ("name", "masked"), [(name, masked) for name in DRAFTERS for masked in (True, False) if masked or name != "forced"]
)
def test_every_key_of_every_drafter_is_captured_twice(backend: Backend, name: str, masked: bool) -> None:
    engine = make(name, backend, draft_masks=masked)
    assert replay_every_key_twice(engine) == 5
    engine.close()
    assert not counters.take_messages()


UNMASKED = {"max_top_logprobs": 3, "draft_masks": False}


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in DRAFTERS), ("own vocabulary", UNMASKED)])
def test_every_key_of_every_draft_length_is_captured_twice(backend: Backend, name: str, changes: dict[str, Any]) -> None:
    most = 3 if name == "MTP of 3" else 8  # each of several modules drafts one token
    engine = make(name, backend, num_speculative_tokens=most, draft_length="auto", **changes)
    shorter = [length for length in (0, 1, 3, 5) if length < most]
    assert replay_every_key_twice(engine, (*map(Drafting, shorter), Drafting(FULL_LENGTH))) == 4 * len(shorter) + 5
    engine.close()
    assert not counters.take_messages()


def test_every_key_with_grammars_on_the_device_is_captured_twice(backend: Backend) -> None:
    lane = {"grammar_backend": "automaton", "grammar_lane": "device", "grammar_arena_bytes": 1 << 20}
    engine = make("own vocabulary", backend, **lane)
    assert replay_every_key_twice(engine, device=True) == 7
    engine.close()
    assert not counters.take_messages()


def test_rounds_that_save_hidden_states_are_captured_twice(backend: Backend, tmp_path: Path) -> None:
    engine = make("EAGLE-3", backend, save_hidden_states=tmp_path)
    assert "results_states" in engine.buffers
    assert replay_every_key_twice(engine) == 5
    engine.close()


def test_every_key_is_captured_again_while_a_prompt_with_embeddings_is_decoded(backend: Backend) -> None:
    engine = make("EAGLE-3", backend)
    engine.capture()
    target: Any = engine._parts.models.target
    span = torch.ones(engine.limits.prefill_chunk + 2, target.embedding_size, dtype=target.feature_dtype)
    prompt = [index % 50 for index in range(2 * engine.limits.prefill_chunk + 9)]
    engine.buffers.results_ring_host[..., FINISH_COLUMN] = FinishCode.RUNNING
    with counters.counted() as prompts:
        engine.submit(prompt, prompt_embeddings={3: span}, max_new_tokens=20)
        while not engine.stats().rounds:
            engine.step()
    assert prompts["eager_copies"] and prompts["graph_launches"], "the prompt's chunks, and the first round"
    assert replay_every_key_twice(engine) == 5
    with counters.counted() as rounds:
        for _ in range(5):
            engine.step()
    assert rounds["graph_launches"] == 5 and not rounds.of(counters.EAGER) and not rounds.of(counters.ALLOCATIONS)
    engine.close()
    assert not counters.take_messages()


def edges_between_streams(engine: Engine, key: GraphKey) -> Counter[tuple[str, str]]:
    """The stages that an edge from one stream to the other connects."""
    recorded: Any = engine.backend.capture(engine._graphs.step(key), engine.buffers)
    graph = recorded._recording.graph.raw_cuda_graph()
    nodes, stages = counters.graph_nodes(graph), [run.name for run in recorded.report.stages for _ in range(run.nodes)]
    assert len(nodes) == len(stages)
    assert [node.kind for node in recorded.report.graph_nodes] == [node.type for node in nodes]
    assert len({node.stream for node in nodes}) == (2 if key.constrained else 1)
    return Counter((stages[a], stages[b]) for a, b in counters.graph_edges(graph) if nodes[a].stream != nodes[b].stream)


VERIFY = [("read_batch", "show verify"), ("check verify", "accept")]
COMMIT = [("accept", "show commit"), ("place commit", "choose_draft 1")]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [0, 1, 3, 5, 8])
def test_streams_wait_for_each_other_only_for_masks(backend: Backend, drafts: int, sampled: bool) -> None:
    """Each mask is filled after the previous stage, concurrently with the model; only the stage that reads the mask waits for it."""
    engine = make("own vocabulary", backend, num_speculative_tokens=max(drafts, 1), forced_drafts=False)
    key = GraphKey(2, True, sampled, draft_length=FULL_LENGTH if drafts else 0)
    rest = [(f"choose_draft {step}", f"show advance {step}") for step in range(1, drafts)]
    rest += [(f"place advance {step}", f"choose_draft {step + 1}") for step in range(1, drafts)]
    assert edges_between_streams(engine, key) == Counter([*VERIFY, *(COMMIT if drafts else []), *rest])
    assert not edges_between_streams(engine, GraphKey(2, False, sampled))
    engine.close()


def test_rounds_with_unmasked_drafts_wait_for_one_host_node(backend: Backend) -> None:
    engine = make("own vocabulary", backend, draft_masks=False)
    assert edges_between_streams(engine, GraphKey(2, True)) == Counter(VERIFY)
    engine.close()


def test_device_grammars_wait_in_the_same_places(backend: Backend) -> None:
    lane = {"grammar_backend": "automaton", "grammar_lane": "device", "grammar_arena_bytes": 1 << 20, "num_speculative_tokens": 1}
    engine = make("own vocabulary", backend, **lane)
    expected = [("read_batch", "fill verify"), ("check verify", "accept"), ("accept", "fill commit"), ("fill commit", "choose_draft 1")]
    assert edges_between_streams(engine, GraphKey(2, True, device=True)) == Counter(expected)
    engine.close()


@pytest.mark.parametrize("name", DRAFTERS)
def test_masks_of_host_nodes_reach_the_device_without_a_copy(backend: Backend, name: str) -> None:
    """A kernel reads the pinned memory that the host node wrote."""
    engine = make(name, backend)
    recorded: Any = backend.capture(engine._graphs.step(GraphKey(2, True)), engine.buffers)
    nodes = counters.graph_nodes(recorded._recording.graph.raw_cuda_graph())
    buffers = {each: engine.buffers[each] for each in engine.buffers}
    memory = {each: range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for each, tensor in buffers.items()}
    pinned = [addresses for each, addresses in memory.items() if each.endswith("_host")]
    copies = [node for node in nodes if node.type == "copy"]
    assert copies and not [node for node in copies if any(node.fields["source"] in addresses for addresses in pinned)]
    uploads = [node for node in nodes if node.name == "scatter_row"]
    assert len(uploads) == engine.limits.positions and len(recorded.report.host_nodes) <= len(uploads)
    assert all(node.pointer(1) in memory["tags_host"] and node.pointer(2) in memory["masks_host"] for node in uploads)
    engine.close()


class Taken(deque[object]):
    """A queue that records the items that are taken from it."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[object] = []

    def popleft(self) -> object:
        self.items.append(super().popleft())
        return self.items[-1]


def test_host_nodes_take_pushed_batches_in_order(backend: Backend) -> None:
    """Six rounds are launched before the host waits for one; each takes its own batch."""
    engine = make("own vocabulary", backend, host_link="python")
    recorded = backend.capture(engine._graphs.step(GraphKey(2, True)), engine.buffers)
    link: Any = engine._in_flight._host_link
    link._pushed = taken = Taken()
    for _ in range(6):
        link.push_batch([None] * 2)
    announced = list(taken)
    assert len({id(batch) for batch in announced}) == 6
    with counters.counted() as counts:
        for _ in range(6):
            recorded.replay()
        backend.synchronize()
    assert [id(batch) for batch in taken.items] == [id(batch) for batch in announced]
    assert counts["executed_host_nodes"] == 6 * len(recorded.report.host_nodes)
    engine.close()


def test_operations_are_launched_without_the_dispatcher(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager prompts and in captures of rounds. The dispatcher takes several times as long as the launch of a program."""
    dispatched = Counter[str]()
    first = make("EAGLE-3", backend, prompt_graphs=False)
    first.capture()  # the first warm-up of a process takes workspaces, and so runs again on the tape

    def counted(name: str, out: Any) -> Any:
        return lambda *arguments: (dispatched.update([name]), out(*arguments))

    for name, operation in OPERATIONS.items():
        monkeypatch.setattr(operation, "out", counted(name, operation.out))
    engine = make("EAGLE-3", backend, prompt_graphs=False)
    with counters.counted() as counts:
        engine.capture()
        engine.buffers.results_ring_host[..., FINISH_COLUMN] = FinishCode.RUNNING
        engine.submit([1, 2, 3, 4, 5], max_new_tokens=20)
        while engine.stats().rounds < 3:
            engine.step()
    assert counts["eager_kernels"] and counts["graph_launches"] >= 3 and not dispatched
    engine.close()


def threads_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_threads_that_fill_masks_are_started_before_the_capture(backend: Backend) -> None:
    before = threads_of_this_process()
    engine = make("own vocabulary", backend, host_link="native")
    started = threads_of_this_process() - before
    assert len(started) >= min(2, available_processors()) - 1
    recorded = backend.capture(engine._graphs.step(GraphKey(2, True)), engine.buffers)
    captured = threads_of_this_process()
    for _ in range(3):
        engine._in_flight._host_link.push_batch([None] * 2)
        recorded.replay()
    backend.synchronize()
    assert started <= captured == threads_of_this_process(), "neither the capture nor a replay starts or ends a thread"
    engine.close()
    assert not started & threads_of_this_process()


class Together:
    """Engines that are made, captured, used in threads of their own at once, and closed in any order."""

    def __init__(self, order: random.Random, count: int = 2) -> None:
        self.raised: list[BaseException] = []
        self.engines: list[Engine] = []
        self._used = threading.Barrier(
            count
        )  # no thread ends before another begins: each has a cuBLAS handle, and so workspaces, of its own
        threads = [threading.Thread(target=self._serve, args=(turn,)) for turn in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        order.shuffle(self.engines)
        for engine in self.engines:
            engine.close()

    def _serve(self, turn: int) -> None:
        try:
            engine = greedy_engine(buckets=(2,), num_speculative_tokens=1, look_up=0)
            self.engines.append(engine)
            engine.capture()
            engine.buffers.results_ring_host[..., FINISH_COLUMN] = FinishCode.RUNNING
            engine.submit([turn + 1, 5, 9], max_new_tokens=50)
            while engine.stats().rounds < 5:
                engine.step()
            assert engine.stats().running == 1
        except BaseException as error:
            self.raised.append(error)
        self._used.wait(600)


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_engines_in_threads_are_closed_in_any_order_without_a_leak() -> None:
    order = random.Random(5)
    for _ in range(2):  # objects that torch and Triton create once
        assert not Together(order).raised
    settle()
    counters.take_messages()
    with counters.counted() as counts:
        for _ in range(TURNS):
            assert not Together(order).raised
        settle()
    assert not counts.of(counters.LIVE)
    assert counts["invalidated_captures"] == 0 and not counters.take_messages()


@pytest.mark.parametrize("name", ["EAGLE-3", "own vocabulary"])
def test_a_chunk_of_a_prompt_is_a_copy_and_a_replay(name: str) -> None:
    """Launches of the stepping thread per prompt token, in graphs and without."""
    launches = {}
    for in_graphs in (False, True):
        engine = make(name, prefill_chunk=128, max_length=640, prompt_graphs=in_graphs, greedy_only=True)
        engine.capture()
        engine.buffers.results_ring_host[..., FINISH_COLUMN] = FinishCode.RUNNING
        engine.submit([1, 2, 3], max_new_tokens=500)
        while not engine.stats().rounds:
            engine.step()
        engine.submit([index % 50 for index in range(1 + 4 * 128)], max_new_tokens=50)
        engine.step()  # assigns a row and processes the first chunk
        with counters.counted() as counts:
            for _ in range(2):
                engine.step()
        assert engine.stats().prompt_tokens == 2 + 3 * 128, "one chunk per step"
        assert not counts.of(counters.ALLOCATIONS) or not in_graphs
        rounds = 2  # of the row that decodes between the chunks
        launches[in_graphs] = (counts["graph_launches"] - rounds + sum(counts.of(counters.EAGER).values())) / (2 * 128)
        engine.close()
    print(f"{name}: {launches[False]:.3f} launches per prompt token without graphs, {launches[True]:.3f} with them")
    assert launches[True] == 2 / 128 and launches[False] >= 10 * launches[True]
    assert not counters.take_messages()


def test_chunks_whose_log_probabilities_are_reported_wait_for_nothing() -> None:
    """The stepping thread waits for the results of rounds alone, as it does beside other prompts."""
    waits = {}
    for asked in (None, SamplingParams(temperature=0, prompt_logprobs=2)):
        engine = make("EAGLE-3", prefill_chunk=32, max_length=320, greedy_only=True, max_top_logprobs=2, prompt_graphs=asked is None)
        engine.capture()
        engine.buffers.results_ring_host[..., FINISH_COLUMN] = FinishCode.RUNNING
        engine.submit([1, 2, 3], max_new_tokens=300)
        while not engine.stats().rounds:
            engine.step()
        job = engine.submit([index % 50 for index in range(1 + 4 * 32)], max_new_tokens=9, sampling=asked)
        engine.step()
        with counters.counted() as counts:
            for _ in range(3):
                engine.step()
        assert engine.stats().prompt_tokens == 2 + 4 * 32 and (job.prompt_scores is None) == (asked is None)
        assert job.prompt_scores is None or job.prompt_scores.is_pinned()
        waits[asked is None] = counts.of(counters.SYNCS)
        engine.close()
    assert waits[True] == waits[False] == {"cuEventSynchronize": 3}
    assert not counters.take_messages()


def test_several_long_prompts_delay_a_decoding_row_by_one_chunk_a_round() -> None:
    chunk, prompts = 64, 3
    engine = make("own vocabulary", max_rows=4, buckets=(4,), prefill_chunk=chunk, max_length=640, greedy_only=True)
    engine.capture()
    engine.buffers.results_ring_host[..., FINISH_COLUMN] = FinishCode.RUNNING
    engine.submit([1, 2, 3], max_new_tokens=500)
    while not engine.stats().rounds:
        engine.step()
    for start in range(prompts):
        engine.submit([(start + index) % 50 for index in range(1 + 3 * chunk)], max_new_tokens=50)
    for _ in range(3 * prompts):
        before = engine.stats()
        with counters.counted() as counts:
            engine.step()
        after = engine.stats()
        assert after.rounds == before.rounds + 1, "the row decodes in each step"
        assert after.prompt_tokens == before.prompt_tokens + chunk and counts["graph_launches"] == 2, "one chunk of one prompt per step"
    assert engine.stats().prompt_tokens == 2 + 3 * prompts * chunk, "all prompts are processed"
    engine.close()
    assert not counters.take_messages()
