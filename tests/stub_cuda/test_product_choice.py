"""The probe of products with packed weights, on stub libraries: values are computed on the CPU, and the tests set the times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

if not hasattr(interpreter, "_LangPatchScope"):
    pytest.skip("values of kernels need a newer Triton than 3.4: see test_numerics.py", allow_module_level=True)

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.graphs import BufferSpec, StaticBuffers
from stepgraph.graphs.cuda.backend import CudaBackend
from stepgraph.graphs.layers import product_choice
from stepgraph.graphs.layers.dense import product
from stepgraph.graphs.layers.product_choice import choose_products
from stepgraph.graphs.layers.quantised import unpack
from stepgraph.graphs.layers.triton import quantised as programs
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from tests.stub_cuda.numerics import Numerics
from tools.gpu.checks.layers import random_weight

pytestmark = pytest.mark.stub_cuda
DEVICE, SHAPE, TYPE = torch.device("cuda", 0), (32, 256), torch.bfloat16
ALWAYS, FROM_256, NEVER = (9.0, 1.0) * 3, (9.0, 1.0, 9.0, 1.0, 1.0, 9.0), (1.0, 9.0)


@pytest.fixture(autouse=True)
def numerics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numerics]:
    monkeypatch.setattr(programs, "library_min_rows", {})
    with Numerics().computing() as computing:
        yield computing


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times of the next measurements, packed and dequantised in turn."""
    given = list[float]()

    def measured(replay: Callable[[], object], turns: int) -> float:
        replay()
        return given.pop(0)

    monkeypatch.setattr(product_choice, "replay_us", measured)
    return given


@pytest.mark.parametrize("name", ["INT4_128", "Q6_K", "FP8"])
def test_products_of_many_rows_use_the_library_where_it_is_faster(
    name: str, times: list[float], backend: CudaBackend, numerics: Numerics
) -> None:
    weight = random_weight(DEVICE, name, *SHAPE)
    times += FROM_256
    note = choose_products(TYPE, [weight, weight.clone(), torch.zeros(4, 4, 4, dtype=torch.uint8, device=DEVICE)])
    assert note == "products with dequantised weights: from 256 rows on for 1 of 1 shapes" and not times

    def step(buffers: StaticBuffers) -> None:
        buffers.found.copy_(product(buffers.states, weight))

    for rows, used in ((256, "packed_rows"), (255, "packed_product")):
        buffers = StaticBuffers([BufferSpec("states", (rows, SHAPE[1]), TYPE), BufferSpec("found", (rows, SHAPE[0]), TYPE)], DEVICE)
        buffers.states.copy_(torch.randn(rows, SHAPE[1], generator=torch.Generator().manual_seed(rows)))
        numerics.programs.clear()
        backend.capture(step, buffers).replay()
        expected = buffers.states.cpu().float() @ unpack(weight.cpu()).T
        assert float((buffers.found.cpu().float() - expected).norm() / expected.norm()) < 1e-2
        assert numerics.programs == {used}


def test_a_choice_is_kept_for_the_process(times: list[float]) -> None:
    weight = random_weight(DEVICE, "Q8_0", *SHAPE)
    times += NEVER
    for _ in range(2):
        assert choose_products(TYPE, [weight]) == "products with dequantised weights: none"
    times += ALWAYS
    assert choose_products(torch.float16, [weight]) == "products with dequantised weights: from 128 rows on for 1 of 1 shapes"
    assert choose_products(torch.float32, [weight]) == choose_products(TYPE, [weight.cpu()]) == choose_products(TYPE, []) == ""


def test_a_product_that_is_wrong_or_fails_is_not_chosen(times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    real, weights = programs.multiply_dequantised, [random_weight(DEVICE, name, *SHAPE) for name in ("Q8_0", "Q4_0", "INT4")]

    def planted(states: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
        if weight.shape == weights[1].shape:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        real(states, weight, bias, output)
        if weight.shape == weights[0].shape:
            output[:, 3] *= 2

    monkeypatch.setattr(programs, "multiply_dequantised", planted)
    times += (9.0, 1.0, 9.0, *ALWAYS)
    note = choose_products(TYPE, weights)
    assert note.startswith("products with dequantised weights: from 128 rows on for 1 of 3 shapes; not with 32 x 256: ")
    assert "products of 512 rows with dequantised weights are wrong" in note and note.endswith("CUBLAS_STATUS_ALLOC_FAILED") and not times


def test_ranks_use_the_choice_of_the_slowest_rank(times: list[float]) -> None:
    weights, sent = [random_weight(DEVICE, "Q8_0", *SHAPE), random_weight(DEVICE, "Q8_0", 48, 256)], list[Any]()

    class Twins:
        rank, size = 0, 2

        def exchange(self, value: Any) -> list[Any]:
            sent.append(value)
            return [value, {(TYPE, weights[0].shape): 512}]  # the other rank has no weight of the second shape

    times += (*ALWAYS, *ALWAYS)
    note = choose_products(TYPE, weights, Twins())
    assert note == "products with dequantised weights: from 128 rows on for 1 of 2 shapes, from 512 rows on for 1 of 2 shapes"
    assert sent == [dict.fromkeys(((TYPE, each.shape) for each in weights), 128)]


def test_an_engine_with_packed_weights_notes_the_choice(times: list[float]) -> None:
    vocabulary = Vocabulary.printable()
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_size": 16, "num_heads": 4, "num_kv_heads": 2}
    target = Llama(LlamaConfig(vocab_size=len(vocabulary.tokens), windows=(None,), dtype=TYPE, **sizes), device=DEVICE)
    with torch.no_grad():
        for layer in target.layers:
            layer.down = torch.nn.Parameter(random_weight(DEVICE, "Q8_0", 64, 128), requires_grad=False)
    times += FROM_256
    config = EngineConfig(max_rows=1, max_length=64, num_speculative_tokens=0, draft_length=0, greedy_only=True, compile_isolation="none")
    with Engine(target, None, vocabulary=vocabulary, config=config) as engine:
        assert "products with dequantised weights: from 256 rows on for 1 of 1 shapes" in engine.capture().notes
