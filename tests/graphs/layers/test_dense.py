"""The C kernels of layers against plain torch: results, memory bounds, and the fallback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.attention.choose import choose_attention
from stepgraph.graphs.attention.paged import paged_attention
from stepgraph.graphs.layers.dense import Activation, activate_and_mul, add_rms_norm, product, rms_norm
from stepgraph.graphs.layers.experts import expert_product
from stepgraph.graphs.layers.lora import slot_product
from stepgraph.graphs.layers.quantised import KINDS, MAX_INNER
from stepgraph.graphs.layers.slot_mapping import rope_and_write_kv
from stepgraph.graphs.model import AttentionShape
from stepgraph.sampling import native
from stepgraph.sampling.native import Unavailable
from tests.graphs.attention.test_paged import Case, make_case
from tests.graphs.layers.test_quantised import made
from tests.helpers.compared import compare_c
from tests.helpers.torch_threads import torch_threads

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
DTYPES = (torch.float32, torch.bfloat16)
HAS_TILES = sys.platform == "linux" and "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(case: Case, window: int, output: Tensor, softcap: float = 0.0, sinks: Tensor | None = None) -> tuple[Any, ...]:
    query, keys, values, (_, positions, slots, tables, page, *_) = case
    return query, keys, values, positions, slots, tables, page, window, query.shape[3] ** -0.5, softcap, sinks, output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 3, 128), (2, 1, 12), (8, 2, 80), (1, 1, 256)])
def test_attention_in_c_equals_the_reference(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """A row without entries gives zeros; inert positions give finite numbers."""
    near = 2e-5 if dtype is torch.float32 else 8e-3
    for lengths, count in (([1, 63, 64, 65, 0], 1), ([40, 129, 5, 0, 200], 5), ([150], 150)):
        case = make_case(lengths, count, heads, kv_heads, size, dtype)
        sinks = random(heads, dtype=dtype)
        for window, softcap, sink in ((0, 0.0, None), (1, 0.0, None), (50, 0.0, None), (0, 0.7, None), (50, 0.7, sinks), (1, 0.0, sinks)):
            expected, found = torch.empty_like(case.query), torch.full_like(case.query, torch.nan)
            paged_attention.run_reference(*arguments(case, window, expected, softcap, sink))
            run = paged_attention.prepare(*arguments(case, window, found, softcap, sink))
            assert run is not None
            run()
            live, empty = case.inputs.slots >= case.inputs.page_size, torch.tensor(lengths) == 0
            torch.testing.assert_close(found[live], expected[live], rtol=near, atol=near)
            assert bool((found[empty] == 0).all() and (expected[empty] == 0).all() and found.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "count", "size"), [([40, 129, 5, 0, 200], 5, 64), ([700], 1, 128), ([190], 40, 80)])
def test_attention_has_the_same_bits_with_any_number_of_threads(lengths: list[int], count: int, size: int, dtype: torch.dtype) -> None:
    case = make_case(lengths, count, 6, 2, size, dtype)
    alone, outside = case.run(window=150), case.inputs.block_tables.clone()
    outside[-1, 5] = 10**9
    for threads in (2, 3, 4):
        with torch_threads(threads):
            assert torch.equal(case.run(window=150), alone)
            with pytest.raises(IndexError, match="outside of its table"):
                case._replace(inputs=case.inputs._replace(block_tables=outside)).run()


def test_unused_memory_is_not_read() -> None:
    """Table entries after a row's last page are arbitrary; a query depends on its own row only."""
    case = make_case([9, 30], 2, size=64)
    before = case.run()
    tables = case.inputs.block_tables.clone()
    tables[0, 2:] = 10**9
    assert torch.equal(case._replace(inputs=case.inputs._replace(block_tables=tables)).run(), before)
    tables[0, 1] = 10**9
    with pytest.raises(IndexError, match="outside of its table"):
        case._replace(inputs=case.inputs._replace(block_tables=tables)).run()
    tables[0, 1] = -1
    with pytest.raises(IndexError, match="outside of its table"):
        case._replace(inputs=case.inputs._replace(block_tables=tables)).run()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_query_does_not_affect_others(dtype: torch.dtype) -> None:
    case = make_case([9, 30], 2, size=64, dtype=dtype)
    before = case.run()
    case.query[0, 1, 2] = torch.nan
    found = case.run()
    assert bool(found[0, 1, 2].isnan().all())
    found[0, 1, 2] = before[0, 1, 2]
    assert torch.equal(found, before)
    huge = make_case([70], 1, size=64, dtype=dtype)
    huge.query.mul_(1e4)  # one attention weight dominates
    assert bool(huge.run().isfinite().all())


def turning(size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Parts of one product, angles and slots; a cache of NaN."""
    parts = list(random(6, 5, size, dtype=dtype).split([3, 1, 1], 1))
    turns = [random(6, 1, size, dtype=dtype, seed=seed) for seed in (1, 2)]
    return [*parts, *turns], torch.tensor([8, 3, 1, 5, 0, 9]), [torch.full((10, 1, size), torch.nan, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotated"), [(2, 2), (12, 12), (64, 64), (64, 32), (96, 72), (256, 256)])
def test_rotation_in_c_is_bit_equal_to_torch(size: int, rotated: int, dtype: torch.dtype) -> None:
    states, slots, cache = turning(size, dtype)
    states[3:] = [each[..., :rotated].contiguous() for each in states[3:]]
    compare_c(rope_and_write_kv, *states, slots, *cache)


@pytest.mark.parametrize("slot", [-1, 10, 2**40])
def test_slot_outside_of_the_cache_is_refused_before_any_write(slot: int) -> None:
    states, slots, cache = turning(12, torch.float32)
    slots[-1] = slot
    with pytest.raises(IndexError, match="outside of its table"):
        rope_and_write_kv(*(*states, slots, *cache))
    assert all(bool(each.isnan().all()) for each in cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(576, 200), (37, 70), (80, 33), (100, 48), (5, 1)])
def test_products_are_correct_and_independent_of_the_batch(inner: int, outer: int, dtype: torch.dtype) -> None:
    """Strided rows, few and many."""
    states, weight = random(73, 2 * inner, dtype=dtype)[:, :inner], random(outer, inner, dtype=dtype, seed=1)
    for bias in (None, random(outer, dtype=dtype, seed=2)):
        output = torch.full((73, outer), torch.nan, dtype=dtype)
        run = product.prepare(states, weight, bias, output)
        assert run is not None
        run()
        expected = torch.nn.functional.linear(states.double(), weight.double(), None if bias is None else bias.double())
        near = 1e-5 if dtype is torch.float32 else 8e-3
        torch.testing.assert_close(output.double(), expected, rtol=near, atol=near)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 40):
            assert torch.equal(product(states[:count], weight, bias), output[:count])
        assert torch.equal(product(states[72:], weight, bias), output[72:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inner", "outer"), [(8, 1100, 70), (8, 20_000, 5), (8, MAX_INNER, 5), (40, 8_200, 50), (33, 16_384, 20), (33, 16_390, 20)]
)
def test_wide_rows_have_the_bits_of_single_rows(rows: int, inner: int, outer: int, dtype: torch.dtype) -> None:
    """With eight rows, weights of more than 2 KiB per column are read in another order. Few rows of large states are converted at once.

    Matrix tiles take 32 rows at once, above 8,192 numbers 16 rows, and above 16,384 none.
    """
    states, weight = random(rows, inner, dtype=dtype), random(outer, inner, dtype=dtype, seed=1)
    found = product(states, weight)
    assert torch.equal(found, torch.cat([product(row[None], weight) for row in states]))
    assert torch.equal(found[:17], product(states[:17], weight))
    expected, size = states.double() @ weight.double().T, states.double().abs() @ weight.double().abs().T
    bound = inner * 2**-24 * size + (2**-8 * expected.abs() if dtype is torch.bfloat16 else 0)
    assert bool(((found.double() - expected).abs() <= bound).all())
    large = torch.zeros(1, MAX_INNER + 1, dtype=dtype)
    assert product.prepare(large, large, None, large[:, :1]) is None
    assert slot_product.prepare(large, torch.tensor([0]), large[None], None, large[:, :1]) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [33, 576])
def test_residual_connection_equals_a_sum_and_its_norm(size: int, dtype: torch.dtype) -> None:
    states, update, weight = random(11, size, dtype=dtype), random(11, 2 * size, dtype=dtype, seed=1)[:, :size], random(size, dtype=dtype)
    for offset in (0.0, 1.0):
        found = add_rms_norm(states, update, weight, 1e-5, offset)
        assert torch.equal(found.states, states + update)
        assert torch.equal(found.normed, rms_norm(states + update, weight, 1e-5, offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(64, 16), (21, 200), (8, 1)])
def test_products_by_slot_are_correct_and_independent_of_the_batch(inner: int, outer: int, dtype: torch.dtype) -> None:
    states, weights, base = (
        random(60, inner, dtype=dtype),
        random(3, outer, inner, dtype=dtype, seed=1),
        random(60, outer, dtype=dtype, seed=2),
    )
    weights[0], slots = 0, torch.tensor([2, 0, 1])
    found = slot_product(states, slots, weights, base)
    wide = torch.cat([part.double() @ weights[slot].double().T for part, slot in zip(states.chunk(3), slots.tolist(), strict=True)])
    near = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found.double(), base.double() + wide, rtol=near, atol=near)
    torch.testing.assert_close(slot_product.reference(states, slots, weights, base), found, rtol=near, atol=near)
    assert torch.equal(found[20:40], base[20:40]), "a row without an adapter"
    for first, count in ((0, 1), (0, 7), (41, 19)):
        part = slice(first, first + count)
        assert torch.equal(slot_product(states[part], slots[first // 20, None], weights, base[part]), found[part])
        assert torch.equal(slot_product(states[part], slots[first // 20, None].expand(count), weights, base[part]), found[part])
    with pytest.raises(IndexError):
        slot_product(states, slots + 1, weights)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/task")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_use_the_threads_of_torch_and_have_the_same_bits_with_any_number(dtype: torch.dtype) -> None:
    weight, bias = random(1001, 576, dtype=dtype), random(1001, dtype=dtype, seed=1)
    states = [random(rows, 576, dtype=dtype, seed=2) for rows in (1, 2, 5, 8, 16, 19, 40)]
    alone = [product(each, weight, bias) for each in states]
    before = num_threads()
    found = dict[int, list[Tensor]]()
    for count in (3, 2, 4, 1):
        with torch_threads(count):
            found[count] = [product(each, weight, bias) for each in states]
            assert num_threads() == before + count - 1
    assert all(torch.equal(*pair) for each in found.values() for pair in zip(each, alone, strict=True))


@pytest.mark.skipif(not HAS_TILES, reason="the processor has no matrix tiles")
def test_products_by_matrix_tiles_need_little_stack() -> None:
    states, weight, found = random(40, 8192, dtype=torch.bfloat16), random(70, 8192, dtype=torch.bfloat16, seed=1), list[Tensor]()
    child, expected = os.fork(), product(states, weight)
    if not child:
        try:
            threading.stack_size(128 << 10)
            caller = threading.Thread(target=lambda: found.append(product(states, weight)))
            caller.start()
            caller.join()
        finally:
            os._exit(0 if found and torch.equal(found[0], expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_products_of_two_callers_at_the_same_time_are_correct() -> None:
    weights = [random(1001, 576, seed=seed) for seed in range(2)]
    states, wrong = random(5, 576, seed=2), list[int]()

    def repeat(index: int) -> None:
        wrong.extend(index for _ in range(200) if not torch.equal(product(states, weights[index]), expected[index]))

    with torch_threads(3):
        expected = [product(states, weight) for weight in weights]
        callers = [threading.Thread(target=repeat, args=(index,)) for index in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong


def in_child(multiply: Callable[[], Tensor], expected: Tensor) -> None:
    """End the process, with exit code 0 if products are correct on three threads and then on two."""
    code = 1
    try:
        signal.alarm(30)  # ends a child that waits for a thread that the fork did not copy
        before = num_threads()
        same = torch.equal(multiply(), expected) and num_threads() == before + 2
        native.use_threads(2)
        code = 0 if same and num_threads() == before + 1 else 1
    finally:
        os._exit(code)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/task")
def test_products_in_a_fork_use_threads_of_their_own() -> None:
    """Also if a product of the parent was running on its threads at the fork."""
    weight, small, states = random(8192, 1024), random(1001, 576, seed=1), random(19, 1024, seed=2)
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            product(states, weight)

    with torch_threads(3):
        expected = product(states[:, :576], small)
        caller = threading.Thread(target=repeat)
        caller.start()
        try:
            for _ in range(5):
                child = os.fork()
                if not child:
                    in_child(lambda: product(states[:, :576], small), expected)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            ended.set()
            caller.join()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (4, 3, 64)])
def test_norm_equals_the_reference_up_to_rounding(shape: tuple[int, ...], offset: float) -> None:
    weight = random(shape[-1], seed=1)
    for states in (random(*shape), random(*shape, seed=2) * 1e-4):
        found, expected = rms_norm(states, weight, 1e-5, offset), rms_norm.reference(states, weight, 1e-5, offset)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    states, weight = random(512, shape[-1], dtype=torch.bfloat16), weight.bfloat16()
    found, expected = rms_norm(states, weight, 1e-5, offset), rms_norm.reference(states, weight, 1e-5, offset)
    assert int((found != expected).sum()) <= found.numel() // 1000, "rounds at the same places as torch"
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_strided_heads(dtype: torch.dtype) -> None:
    query = random(5, 7, 16, dtype=dtype)[:, 2:6]
    weight = random(16, dtype=dtype, seed=1)
    assert torch.equal(rms_norm(query, weight, 1e-6), rms_norm(query.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("activation", Activation)
def test_activate_and_mul_equals_the_reference(activation: Activation) -> None:
    pairs = torch.cat([torch.linspace(-80, 120, 350).view(5, 70), random(5, 70)], 1)
    found, expected = activate_and_mul(pairs, activation), activate_and_mul.reference(pairs, activation)
    near = 1e-5 if activation is Activation.GELU_TANH else 1e-6  # small results: exp of a polynomial, with that polynomial's rounding error
    torch.testing.assert_close(found, expected, rtol=near, atol=1e-30)
    narrow = random(64, 300, dtype=torch.bfloat16) * 4
    found, expected = activate_and_mul(narrow, activation), activate_and_mul.reference(narrow, activation)
    assert int(((found != expected) & (expected.abs() > 1e-30)).sum()) <= found.numel() // 1000
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-30)
    assert bool(activate_and_mul(torch.tensor([[torch.nan, 1.0]]), activation).isnan().all())
    assert activate_and_mul(torch.empty(2, 3, 0), activation).shape == (2, 3, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_independent_of_the_batch(dtype: torch.dtype) -> None:
    states, weight = random(6, 100, dtype=dtype), random(100, dtype=dtype, seed=1)
    together = rms_norm(states, weight, 1e-5), activate_and_mul(states)
    for row in range(6):
        alone = states[row : row + 1]
        assert torch.equal(rms_norm(alone, weight, 1e-5)[0], together[0][row]) and torch.equal(activate_and_mul(alone)[0], together[1][row])


@pytest.mark.parametrize(
    "run",
    [
        lambda states: product(states, random(8, 16)),
        lambda states: product(states, random(8, 64), random(4)),
        lambda states: rms_norm(states, random(8), 1e-5),
        lambda states: add_rms_norm(states, states, random(8), 1e-5),
        lambda states: product(states, made(KINDS["Q8_0"], 16, 96)[0]),
        lambda states: slot_product(states, torch.tensor([1]), random(2, 8, 4)),
        lambda states: expert_product(states, torch.tensor([[1]]), random(8, 4), 2),
        lambda states: product(states, made(KINDS["Q8_0"], 16, 64)[0], random(1)),
        lambda states: slot_product(states.expand(2, 64), torch.tensor([1]), random(2, 8, 64), random(1, 8)),
        lambda states: expert_product(states, torch.tensor([[1]]), random(8, 64), 2, random(2)),
        lambda states: expert_product(states, torch.tensor([[1]]), made(KINDS["Q8_0"], 32, 64)[0], 2, random(2)),
        lambda states: activate_and_mul(states[:, 1:]),
    ],
)
def test_weights_biases_and_pairs_of_another_size_are_refused(run: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, AssertionError), match=r"size|shape|Size"):
        run(random(1, 64))


def test_training_runs_in_torch() -> None:
    weight = random(8).requires_grad_()
    (rms_norm(random(3, 8), weight, 1e-5).sum() + activate_and_mul(weight[None]).sum()).backward()
    assert weight.grad is not None and bool(weight.grad.abs().gt(0).all())
    with torch.no_grad():
        assert rms_norm(random(3, 8), weight, 1e-5).grad_fn is None


def test_layers_without_the_library_run_as_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = Unavailable("they were not built")
    monkeypatch.setattr(native, "load", lambda: reason)
    assert torch.equal(activate_and_mul(random(3, 24)), activate_and_mul.reference(random(3, 24)))
    choice = choose_attention(torch.device("cpu"), "auto", (AttentionShape(torch.float32, 2, 1, 8),), 16)
    assert str(choice) == "reference; no native: they were not built"


def test_incompatible_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = native.find_library()
    monkeypatch.setattr(native, "LAYOUTS", {"stepgraph_kernel_sizes": (0, native.ARGUMENT.size)})
    with pytest.raises(Unavailable, match="built from other sources; install stepgraph again"):
        native.open_library(path)
    with pytest.raises(Unavailable, match="not built: there was no C compiler"):
        native.find_library(tmp_path)
    (tmp_path / "setup.py").touch()
    with pytest.raises(Unavailable, match=r"not built in this checkout: cd .* && python setup\.py build_ext --inplace"):
        native.find_library(tmp_path / "sampling")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(Unavailable, match=r"broken\.so cannot be loaded"):
        native.open_library(broken)
