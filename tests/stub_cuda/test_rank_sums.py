"""The probe of sums over ranks, on stub libraries: NCCL's collectives assume that the other rank has the values of this one, and the tests
set the times. FlashInfer's Python code is the real one; its memory of several GPUs and its compiled kernel are replaced."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

if not hasattr(interpreter, "_LangPatchScope"):
    pytest.skip("values of kernels need a newer Triton than 3.4: see test_numerics.py", allow_module_level=True)

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.graphs import BufferSpec, StaticBuffers
from stepgraph.graphs.capture import Recorded
from stepgraph.graphs.cuda.backend import CudaBackend
from stepgraph.graphs.layers import rank_sums
from stepgraph.graphs.layers.dense import add_rms_norm
from stepgraph.graphs.layers.parallel import GatherSum, RankGroups, register_group, sum_over_ranks
from stepgraph.graphs.layers.rank_sums import IMPLEMENTATIONS, NcclSum, choose_sums
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.parallel.llama import ShardedLlama
from stepgraph.runtime.parallel.ranks import Ranks
from tests.stub_cuda.numerics import Numerics
from tests.stub_cuda.test_ranks import added, group, messages

pytestmark = pytest.mark.stub_cuda
DEVICE, SIZE, SECONDS, LAYERS, HIDDEN, ROWS = torch.device("cuda", 0), 2, 30.0, 3, 64, 6
LIKE = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta")


class Twins:
    """Rank 0 of two; rank 1 sends the same values. other: what rank 1 sends instead, as a function of the value of rank 0."""

    rank, size = 0, SIZE

    def __init__(self) -> None:
        self.other: Any = lambda value: value

    def exchange(self, value: object) -> list[Any]:
        return [value, self.other(value)]


@pytest.fixture(autouse=True)
def values(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numerics]:
    """Both ranks have the same values, as the stub's collectives assume."""
    made = rank_sums._rank_values
    monkeypatch.setattr(rank_sums, "_rank_values", lambda rank, like: made(rank if rank >= SIZE else 0, like))
    with Numerics().computing() as computing:
        yield computing


@pytest.fixture
def groups() -> RankGroups:
    return RankGroups(*(register_group(group(), SECONDS) for _ in range(2)))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds that the device takes for the graph of each implementation."""
    given, current = dict[str, float](), [""]
    real = rank_sums._create_and_measure

    def measured(kind: type[GatherSum], *others: Any) -> Any:
        current[0] = next(name for name, each in IMPLEMENTATIONS.items() if each is kind)
        return real(kind, *others)

    monkeypatch.setattr(rank_sums, "_create_and_measure", measured)
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: given.get(current[0], 1.6))
    return given


def like(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(ROWS, HIDDEN, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("slow", "chosen", "kernel"), [("nccl", "gather", "ncclAllGather"), ("gather", "nccl", "ncclAllReduce")])
def test_the_fastest_sum_is_used_in_graphs(
    slow: str, chosen: str, kernel: str, groups: RankGroups, times: dict[str, float], backend: CudaBackend
) -> None:
    """FlashInfer is not used, because the GPUs share no memory here."""
    times[slow] = 3.2
    note = choose_sums(Twins(), groups, like())
    gather, nccl = (200.0 if name == slow else 100.0 for name in ("gather", "nccl"))
    assert re.fullmatch(rf"{chosen}; gather {gather} us; nccl {nccl} us; no flashinfer: rank 0: .*cuGetProcAddress.*", note, re.DOTALL), (
        note
    )
    cases = [
        ((ROWS, HIDDEN), torch.bfloat16, kernel),
        ((ROWS, HIDDEN), torch.float32, "ncclAllGather"),
        ((ROWS, 8), torch.bfloat16, "ncclAllGather"),
    ]
    kept = list[Recorded]()  # kept alive, as a later graph could have the address of a freed one
    for (shape, dtype, name), number in itertools.product(cases, (groups.graph, groups.eager)):  # other shapes and dtypes are gathered
        require_captured(backend, number, StaticBuffers([BufferSpec("x", shape, dtype)], DEVICE), name, kept)


def require_captured(backend: CudaBackend, number: int, buffers: StaticBuffers, name: str, captured: list[Recorded]) -> None:
    """Capture a sum of `x`, which must be one message of this name."""

    def step(buffers: StaticBuffers) -> None:
        sum_over_ranks.out(buffers.x, number)

    (nodes,) = added(lambda: captured.append(backend.capture(step, buffers)))
    assert name in [node.name for node in nodes]
    buffers.x.fill_(1.5)
    captured[-1].replay()
    assert torch.equal(buffers.x.cpu(), torch.full_like(buffers.x, 1.5 * SIZE, device="cpu"))


def test_times_of_the_slowest_rank_are_compared(groups: RankGroups, times: dict[str, float]) -> None:
    twins, times["gather"] = Twins(), 3.2
    twins.other = lambda sent: (sent[0], 1e4) if sent[1] == 100.0 else sent  # rank 1 is slow where rank 0 is fast
    assert choose_sums(twins, groups, like()).startswith("gather; gather 200.0 us; nccl 10000.0 us; no flashinfer: ")


class Doubled(NcclSum):
    def add(self, states: Tensor) -> None:
        super().add(states)
        states[-1, 3] *= 2


class Waiting(NcclSum):
    def add(self, states: Tensor) -> None:
        super().add(states)
        torch.cuda.synchronize()


class Refusing(NcclSum):
    def __init__(self, *others: Any) -> None:
        raise RuntimeError("no link between the GPUs")


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (Doubled, "rank 0: a sum is wrong in 1 of 64 values"),
        (Waiting, "rank 0: .*captur"),
        (Refusing, "rank 0: no link between the GPUs"),
    ],
)
def test_a_sum_that_does_not_work_is_passed_over(
    planted: type[GatherSum], expected: str, groups: RankGroups, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "nccl", planted)
    times["nccl"] = 0.1
    assert re.search(rf"^gather; gather 100.0 us; no nccl: {expected}", choose_sums(Twins(), groups, like()), re.DOTALL)


def test_a_sum_that_fails_or_differs_on_another_rank_is_passed_over(groups: RankGroups, times: dict[str, float]) -> None:
    twins, times["nccl"] = Twins(), 0.1
    kinds = list[str]()
    twins.other = lambda sent: ("out of memory", None) if len(kinds) == 1 else sent
    real = rank_sums._create_and_measure

    def noted(kind: type[GatherSum], *others: Any) -> Any:
        kinds.append(kind.__name__)
        return real(kind, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sums, "_create_and_measure", noted)
        assert choose_sums(twins, groups, like()).startswith("nccl; nccl 6.2 us; no gather: rank 1: out of memory; no flashinfer: ")
    twins.other = lambda sent: (sent[0], 7) if isinstance(sent[1], int) else sent  # other bits
    with pytest.raises(
        RuntimeError, match=r"^no sum over ranks works here: no gather: rank 0: the bits of a sum differ between ranks; no nccl:"
    ):
        choose_sums(twins, groups, like())


CALLS = Counter[int]()


def kernel(**given: Any) -> None:
    """In place of FlashInfer's compiled program, with the arguments that its Python passes: a sum of two equal ranks, and for one pattern
    the residual connection and the norm."""
    CALLS[given["pattern_code"]] += 1
    assert given["world_size"] == SIZE and given["world_rank"] == 0 and given["use_oneshot"] and given["fp32_acc"]
    shape = given["token_num"], given["hidden_dim"]
    total = given["allreduce_in"].view(shape) * SIZE
    if given["pattern_code"] == 0:
        given["allreduce_out"].view(shape).copy_(total)
        return
    residual = given["residual_in"].view(shape)
    found = add_rms_norm.reference(residual, total, given["rms_gamma"], given["rms_eps"])
    given["residual_out"].view(shape).copy_(found.states)
    given["norm_out"].view(shape).copy_(found.normed)


class Memory:
    """In place of memory that the GPUs map from each other."""

    def __init__(self, size: int, ranks: int, *_: Any, **options: Any) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        self.uc_ptrs = [self.memory.data_ptr()] * ranks


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer.comm import trtllm_ar

    CALLS.clear()
    monkeypatch.setattr(trtllm_ar, "SymmDeviceMemory", Memory)
    programs = SimpleNamespace(trtllm_allreduce_fusion=kernel, trtllm_lamport_initialize=lambda *_, **__: None)
    monkeypatch.setattr(trtllm_ar, "get_trtllm_comm_module", lambda: programs)


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_is_called_with_arguments_that_its_python_accepts(groups: RankGroups, times: dict[str, float]) -> None:
    times["flashinfer"] = 0.8
    note = choose_sums(Twins(), groups, like())
    assert note == "flashinfer; gather 100.0 us; nccl 100.0 us; flashinfer 50.0 us" and CALLS[0] and CALLS[1]
    CALLS.clear()
    for rows, used in ((ROWS, 1), (ROWS + 1, 0)):  # more rows than its memory holds
        x = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        sum_over_ranks.out(x, groups.graph)
        assert torch.equal(x.cpu(), torch.full((rows, HIDDEN), 2.0, dtype=torch.bfloat16)) and CALLS.pop(0, 0) == used
    full = choose_sums(Twins(), groups, like(torch.float32))
    assert full.endswith("; no flashinfer: rank 0: it adds bfloat16 and float16, not float32")


@pytest.mark.usefixtures("flashinfer")
def test_a_divided_model_uses_the_sum_with_the_norm(times: dict[str, float]) -> None:
    """Two such sums per layer; the sum of embeddings and the choice of tokens do not change."""
    times["flashinfer"] = 0.8
    ranks = Ranks(0, [group() for _ in range(3)], SECONDS)
    vocabulary = Vocabulary.printable()
    sizes: dict[str, Any] = {"vocab_size": len(vocabulary.tokens), "hidden_size": HIDDEN, "intermediate_size": 128, "head_size": 16}
    whole = LlamaConfig(num_heads=4, num_kv_heads=2, windows=(None,) * LAYERS, dtype=torch.bfloat16, **sizes)
    local = replace(whole, num_heads=2, num_kv_heads=1, intermediate_size=64)
    with torch.no_grad():
        target = ShardedLlama(local, ranks, len(vocabulary.tokens), (), DEVICE)
    ranks.exchange = Twins().exchange  # type: ignore[method-assign]  # there is no process of the other rank
    ranks.choose_sums(like())
    config = EngineConfig(max_rows=2, max_length=64, num_speculative_tokens=0, draft_length=0, greedy_only=True, compile_isolation="none")
    CALLS.clear()
    with Engine(target, None, vocabulary=vocabulary, config=config) as engine:
        notes = list[str]()
        graphs = added(lambda: notes.extend(engine.capture().notes))
    assert "sums over ranks: flashinfer; gather 100.0 us; nccl 100.0 us; flashinfer 50.0 us" in notes
    found = Counter(len(messages(nodes)) for nodes in graphs)
    assert set(found) <= {0, 1}, "the choice of tokens is the only message"
    assert CALLS[1] == 2 * LAYERS * CALLS[0], "each call of the model adds embeddings once"
