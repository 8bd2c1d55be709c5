"""Steps that the tape refuses, with the rule and the line, and similar legal steps that it accepts."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from stepgraph.graphs.backends import run_eager
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import current_context
from stepgraph.graphs.errors import CaptureError
from stepgraph.graphs.tape.backend import TapeBackend

SnippetStep = Callable[[StaticBuffers], object]


@torch.library.custom_op("stepgraph_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    assert x.data_ptr() != 0  # legal inside a kernel
    return x * 2


@torch.library.custom_op("stepgraph_test::add_one_", mutates_args=("x",))
def add_one_(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("stepgraph_test::count_and_sum", mutates_args=("count",))
def count_and_sum(x: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return x.sum(0)


KEPT = torch.ones(4, 8)


@torch.library.custom_op("stepgraph_test::kept_and_expanded", mutates_args=())
def kept_and_expanded(x: Tensor) -> tuple[Tensor, Tensor]:
    assert bool((KEPT == 1).all())
    return KEPT, x[:1].clone().expand(4, 8)


@torch.library.custom_op("stepgraph_test::product_of_rows", mutates_args=())
def product_of_rows(x: Tensor) -> Tensor:
    return (x @ x.T).float()


class Wrapped(Tensor):
    """A tensor subclass that wraps another tensor, like torchao's weights."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.wrapped = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*[each.wrapped if isinstance(each, cls) else each for each in args], **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x)))


torch.manual_seed(0)
NET, TABLE, UNREGISTERED = Net(), torch.randn(16, 8), torch.ones(4, 8)
GRU = nn.GRU(8, 8, batch_first=True)
GENERATOR, FREED = torch.Generator(), torch.ones(4, 8)
SPECS = [
    BufferSpec("x", (4, 8), torch.float32),
    BufferSpec("y", (4, 8), torch.float32),
    BufferSpec("big", (16, 8), torch.float32),
    BufferSpec("index", (4,), torch.int64),
    BufferSpec("mask", (4, 8), torch.bool),
    BufferSpec("count", (1,), torch.int32),
    BufferSpec("x_host", (4, 8), torch.float32, memory="pinned"),
    BufferSpec("index_host", (4,), torch.int64, memory="pinned"),
]
BUFFERS = StaticBuffers(SPECS, constants={"net": NET, "gru": GRU, "table": TABLE, "freed": FREED})
FREED.untyped_storage().resize_(0)
PACKED = torch.ones(4, 8).to_mkldnn()
ESCAPED: list[Tensor] = []
EVENTS: list[object] = []
BACKEND = TapeBackend(poison="every")


def randomise(b: StaticBuffers, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in b:
        tensor = b[name]
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randint(0, 2 if tensor.dtype == torch.bool else 4, tensor.shape, generator=generator))


def snapshot(b: StaticBuffers) -> dict[str, Tensor]:
    return {name: b[name].clone() for name in b}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


OLDER_POOL = ThreadPoolExecutor(1)
OLDER_POOL.submit(int).result()  # starts its thread

# By rule, then by name: steps of one line. Longer ones follow.
CALLS: dict[str, dict[str, SnippetStep]] = {
    "host-sync": {
        "item": lambda b: b.x.sum().item(),  # illegal
        "tolist": lambda b: b.index.tolist(),  # illegal
        "to_cpu": lambda b: b.x.cpu(),  # illegal
        "to_cpu_by_name": lambda b: b.x.to("cpu"),  # illegal
        "to_cpu_by_keyword": lambda b: b.x.to(device="cpu", non_blocking=True),  # illegal
        "numpy": lambda b: b.x.numpy(),  # illegal
        "numpy_function": lambda b: np.asarray(b.x),  # illegal
        "truth": lambda b: bool(b.mask[0, 0]),  # illegal
        "normal_with_a_deviation_tensor": lambda b: torch.normal(b.x, b.x.abs(), generator=GENERATOR),  # illegal
        "as_int": lambda b: int(b.index[0]),  # illegal
        "as_float": lambda b: float(b.x.max()),  # illegal
        "as_slice_bound": lambda b: b.x[: b.index[0]],  # illegal
        "as_list_index": lambda b: [1, 2, 3, 4][b.index[0]],  # illegal
        "math_function": lambda b: math.sqrt(b.x.abs().sum()),  # illegal
        "equal": lambda b: torch.equal(b.x, b.y),  # illegal
        "allclose": lambda b: torch.allclose(b.x, b.y),  # illegal
        "printed": lambda b: print(b.x),  # illegal
        "formatted": lambda b: f"{b.x.sum():.3f}",  # illegal
        "contained": lambda b: 3.0 in b.x,  # illegal
        "python_max": lambda b: max(b.x[0, 0], b.x[0, 1]),  # illegal
        "one_hot_without_classes": lambda b: F.one_hot(b.index),  # illegal
        "fill_by_mask_with_a_tensor": lambda b: b.y.masked_fill_(b.mask, b.x[0, 0]),  # illegal
        "fill_at_indices_with_a_tensor": lambda b: b.y.index_fill_(0, b.index, b.x[0, 0]),  # illegal
        "linspace_to_a_tensor": lambda b: torch.linspace(0, b.x[0, 0], 8, device=b.device),  # illegal
        "logspace_from_a_tensor": lambda b: torch.logspace(b.x[0, 0], 1, 8, device=b.device),  # illegal
        "histogram_without_a_range": lambda b: torch.histc(b.x, 16),  # illegal
        "matrix_exponential": lambda b: torch.linalg.matrix_exp(b.x[:, :4]),  # illegal
        "split_by_tensor": lambda b: torch.tensor_split(b.x, b.index),  # illegal
        "applied": lambda b: b.x.apply_(lambda value: value + 1),  # illegal
        "mapped": lambda b: b.x.map_(b.y, lambda value, other: value * other),  # illegal
        "synchronised": lambda b: BACKEND.synchronize(),  # illegal
        "segments_with_a_check": lambda b: torch.segment_reduce(b.x[:, 0], "sum", lengths=torch.ones_like(b.index)),  # illegal
        "search_with_a_sorter": lambda b: torch.searchsorted(b.x, b.y, sorter=b.x.argsort(-1)),  # illegal
        "whole_zero_points": lambda b: torch.fake_quantize_per_channel_affine(b.x, b.y[:, 0], b.index.int(), 0, 0, 255),  # illegal
        "older_cholesky": lambda b: torch.cholesky(torch.eye(4, device=b.device)),  # illegal
        "matrix_inverse": lambda b: torch.linalg.inv(b.x[:, :4]),  # illegal
        "singular_values": lambda b: torch.linalg.svdvals(b.x),  # illegal
        "linear_solve": lambda b: torch.linalg.solve(b.x[:, :4], b.y),  # illegal
        "cholesky": lambda b: torch.linalg.cholesky(b.x[:, :4]),  # illegal
    },
    "dynamic-shape": {
        "nonzero": lambda b: b.mask.nonzero(),  # illegal
        "where_of_one": lambda b: torch.where(b.mask),  # illegal
        "masked_select": lambda b: b.x.masked_select(b.mask),  # illegal
        "read_by_mask": lambda b: b.x[b.mask],  # illegal
        "unique": lambda b: b.index.unique(),  # illegal
        "repeat_by_tensor": lambda b: b.index.repeat_interleave(b.index),  # illegal
        "bincount": lambda b: torch.bincount(b.index, minlength=16),  # illegal
        "index_put_by_mask": lambda b: b.x.index_put_((b.mask,), b.y[0, 0]),  # illegal
    },
    "host-data": {
        "tensor_of_list": lambda b: b.x.add_(torch.tensor([1.0] * 8, device=b.device)),  # illegal
        "tensor_of_number": lambda b: b.x.mul_(torch.tensor(2.0)),  # illegal
        "as_tensor": lambda b: b.index.copy_(torch.as_tensor([1, 2, 3, 4])),  # illegal
        "new_tensor": lambda b: b.index.copy_(b.index.new_tensor([1, 2, 3, 4])),  # illegal
        "list_index": lambda b: b.x[[0, 2]],  # illegal
        "numpy_index": lambda b: b.x[np.array([0, 2])],  # illegal
    },
    "missing-device": {
        "arange_on_host": lambda b: b.index.copy_(torch.arange(4)),  # illegal
        "zeros_on_host": lambda b: b.x.copy_(torch.zeros(4, 8, device="cpu")),  # illegal
    },
    "generator": {
        "unregistered_generator": lambda b: b.x.exponential_(generator=GENERATOR),  # illegal
    },
    "other-thread": {
        "thread_of_an_older_pool": lambda b: OLDER_POOL.submit(b.x.add_, 1).result(),  # illegal
        "map_over_an_older_pool": lambda b: list(OLDER_POOL.map(b.x.add_, [1, 2])),  # illegal
    },
    "inplace-view": {
        "resize": lambda b: b.x.resize_(2, 8),  # illegal
        "transpose_in_place": lambda b: b.x.t_(),  # illegal
        "other_memory": lambda b: (b.x * 2).set_(b.y),  # type: ignore[call-overload]  # illegal
        "resized": lambda b: (b.x * 2).resize_(99),  # illegal
        "set_storage": lambda b: b.x.set_(b.y),  # type: ignore[call-overload]  # illegal
    },
    "out-resize": {
        "resizing_out": lambda b: torch.add(b.x[0], b.y[0], out=b.x),  # illegal
    },
    "raw-pointer": {
        "data_ptr": lambda b: b.x.data_ptr(),  # illegal
        "storage_pointer": lambda b: b.x.untyped_storage().data_ptr(),  # illegal
        "cuda_array_interface": lambda b: b.x.__cuda_array_interface__,  # illegal
        "dlpack": lambda b: np.from_dlpack(b.x),  # illegal
    },
    "unregistered-input": {
        "unregistered": lambda b: b.x.add_(UNREGISTERED),  # illegal
        "unregistered_write": lambda b: UNREGISTERED.copy_(b.x),  # illegal
        "opaque": lambda b: b.x.copy_(PACKED + PACKED),  # illegal
        "view_of_an_opaque_tensor": lambda b: PACKED.transpose(0, 1),  # illegal
        "meta_result": lambda b: torch.empty(4, device="meta"),  # illegal
        "quantised_result": lambda b: torch.quantize_per_tensor(b.x, 0.1, 0, torch.qint8),  # illegal
    },
    "wrapper-subclass": {
        "wrapper_subclass": lambda b: b.x.add_(Wrapped(b.y)),  # illegal
        "result_of_a_collective": lambda b: b.x.add_(AsyncCollectiveTensor(b.y)),  # illegal
    },
    "freed-input": {
        "freed": lambda b: b.x.add_(FREED),  # illegal
    },
    "foreign-intermediate": {
        "foreign": lambda b: b.x.add_(ESCAPED[0]),  # illegal
    },
    "constant-write": {
        "constant_write": lambda b: TABLE.mul_(2),  # illegal
        "weight_write": lambda b: NET.linear.weight[0].zero_(),  # illegal
    },
    "mixed-residence": {
        "compute_on_pinned": lambda b: b.x.add_(b.x_host),  # illegal
        "index_by_pinned": lambda b: b.x[b.index_host],  # illegal
        "pinned_to_pinned": lambda b: b.x_host[0].copy_(b.x_host[1], non_blocking=True),  # illegal
        "pinned_to_device": lambda b: b.x_host.to(b.device, non_blocking=True),  # illegal
    },
    "blocking-copy": {
        "blocking_download": lambda b: b.x_host.copy_(b.x),  # illegal
    },
    "pinned-copy": {
        "strided_upload": lambda b: b.x[:, :2].copy_(b.x_host[:, :2], non_blocking=True),  # illegal
        "broadcast_upload": lambda b: b.x.copy_(b.x_host[0], non_blocking=True),  # illegal
    },
    "foreign-event": {
        "foreign_event": lambda b: current_context().wait(EVENTS[0]),  # illegal
    },
    "host-node-memory": {
        "host_node_on_device_memory": lambda b: current_context().host_node("h", lambda: None, reads=[b.x]),  # illegal
        "host_node_on_unregistered_memory": lambda b: current_context().host_node("h", lambda: None, writes=[UNREGISTERED]),  # illegal
    },
    "collective": {
        "all_reduce": lambda b: torch.ops._c10d_functional.all_reduce(b.x, "sum", "group"),  # illegal
        "wait_for_all_reduce": lambda b: torch.ops._c10d_functional.wait_tensor(b.x),  # illegal
        "all_reduce_in_place": lambda b: distributed.all_reduce(b.x),  # illegal
    },
    "nested-capture": {
        "nested": lambda b: BACKEND.capture(lambda b: None, b),  # illegal
    },
}


def without_result(step: SnippetStep) -> SnippetStep:
    """A tensor that the step returns would be refused first."""

    def run(b: StaticBuffers) -> None:
        step(b)

    return run


ILLEGAL = {name: (rule, without_result(step)) for rule, steps in CALLS.items() for name, step in steps.items()}
LEGAL: dict[str, SnippetStep] = {
    "copy_within_a_buffer": lambda b: b.x[:, 1:].copy_(b.x[:, :-1]),
    "embedding": lambda b: b.x.copy_(F.embedding(b.index, TABLE)),
    "softmax": lambda b: b.x.copy_(b.x.softmax(-1) + b.y.log_softmax(-1)),
    "module": lambda b: b.x.copy_(NET(b.x) + b.x),
    "one_hot_by_comparison": lambda b: b.x.copy_(b.index[:, None] == torch.arange(8, device=b.device)),
    "segments_without_a_check": lambda b: b.x[0, :4].copy_(
        torch.segment_reduce(b.y[:, 0], "sum", lengths=torch.ones_like(b.index), unsafe=True)
    ),
    "embedding_of_a_limited_norm": lambda b: b.x.copy_(F.embedding(b.index, b.y, max_norm=1.0)),
    "inverse_of_a_cholesky_factor": lambda b: b.x[:, :4].copy_(torch.cholesky_inverse(torch.eye(4, device=b.device))),
    "zero_points_in_float": lambda b: b.x.copy_(torch.fake_quantize_per_channel_affine(b.y, b.y[:, 0].abs() + 1, b.y[:, 1], 0, -9, 9)),
    "search": lambda b: b.x.copy_(torch.searchsorted(b.big[:4].sort(-1)[0], b.y)),
    "histogram_of_a_range": lambda b: b.x[0].copy_(torch.histc(b.y, 8, -1, 1)),
    "repeated_to_a_known_size": lambda b: b.index.copy_(torch.repeat_interleave(torch.ones_like(b.index), output_size=4)),
    "vectorised": lambda b: b.x[0].copy_(torch.vmap(lambda value: value * 2)(b.x[0])),
    "kernel_that_resizes_its_out": lambda b: b.y[0, 0].copy_(F.huber_loss(b.x, b.y)),
    "assertion_on_device": lambda b: torch._assert_async((b.index >= 0).all()),
}


def illegal(rule: str) -> Callable[[SnippetStep], SnippetStep]:
    def register(step: SnippetStep) -> SnippetStep:
        ILLEGAL[step.__name__] = rule, step
        return step

    return register


def legal(step: SnippetStep) -> SnippetStep:
    LEGAL[step.__name__] = step
    return step


# host syncs


@illegal("host-sync")
def branch(b: StaticBuffers) -> object:
    if b.x[0, 0] > 0:  # illegal
        b.x.add_(1)
    return None


@illegal("host-sync")
def swallowed(b: StaticBuffers) -> None:
    with contextlib.suppress(RuntimeError):
        b.x.sum().item()  # illegal


# shapes that depend on values


@illegal("dynamic-shape")
def write_tensor_by_mask(b: StaticBuffers) -> None:
    b.x[b.mask] = b.x[0, 0]  # illegal


@illegal("dynamic-shape")
def write_number_by_mask_and_index(b: StaticBuffers) -> None:
    b.x[b.index < 2, b.index] = 5.0  # illegal


# Python data


@illegal("host-data")
def list_index_write(b: StaticBuffers) -> None:
    b.x[[0, 2]] = 1.0  # illegal


@illegal("host-data")
def number_at_indices(b: StaticBuffers) -> None:
    b.big[b.index] = 7.0  # illegal


@illegal("host-data")
def number_in_one_element(b: StaticBuffers) -> None:
    b.index[-1] = 3  # illegal


@illegal("host-data")
def number_in_a_column_at_indices(b: StaticBuffers) -> None:
    b.big[b.index, 2] = 7.0  # illegal


@illegal("host-data")
def numpy_array(b: StaticBuffers) -> None:
    array = np.ones((4, 8), dtype=np.float32)
    b.x.add_(torch.from_numpy(array))  # illegal


@illegal("default-dtype")
def other_default_dtype(b: StaticBuffers) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        b.x[0, :4].copy_(b.index / 3)  # illegal
    finally:
        torch.set_default_dtype(torch.float32)


# randomness


# addresses and shapes of tensors


@illegal("other-thread")
def started_thread(b: StaticBuffers) -> None:
    thread = threading.Thread(target=b.x.add_, args=(1,))
    thread.start()  # illegal
    thread.join()


@illegal("other-thread")
def thread_of_a_pool(b: StaticBuffers) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(b.x.add_, 1).result()  # illegal


@illegal("inplace-view")
def rebind_data(b: StaticBuffers) -> None:
    b.x.data = b.y  # illegal


@illegal("higher-order")
def branch_on_the_device(b: StaticBuffers) -> None:
    b.x.copy_(torch.cond(b.x.sum() > 0, torch.sin, torch.cos, (b.x,)))  # illegal


# memory that the capture does not know, or must not use in this way


@illegal("mixed-residence")
def fill_pinned(b: StaticBuffers) -> None:
    b.x_host[0] = 5  # illegal


@illegal("blocking-copy")
def blocking_upload(b: StaticBuffers) -> None:
    b.x[0] = b.x_host[0]  # illegal


@illegal("returned-tensor")  # illegal
def returned_sum(b: StaticBuffers) -> object:
    return {"sums": [b.x.sum(1), b.x]}


# streams, events, host nodes, nesting


@illegal("stream-outside-capture")
def side_stream_without_wait(b: StaticBuffers) -> None:
    with current_context().stream("side"):
        b.x.add_(1)  # illegal


@illegal("stream-outside-capture")
def event_on_outside_stream(b: StaticBuffers) -> None:
    with current_context().stream("side"):
        current_context().record()  # illegal


@illegal("stream-outside-capture")
def host_node_on_outside_stream(b: StaticBuffers) -> None:
    with current_context().stream("side"):
        current_context().host_node("h", lambda: None)  # illegal


@illegal("unjoined-fork")
def unjoined(b: StaticBuffers) -> None:
    context = current_context()
    event = context.record()
    with context.stream("side"):
        context.wait(event)
        b.x.add_(1)  # illegal


@illegal("unjoined-fork")
def work_after_the_join(b: StaticBuffers) -> None:
    context = current_context()
    event = context.record()
    with context.stream("side"):
        context.wait(event)
        b.x.add_(1)
        done = context.record()
        context.host_node("late", lambda: None)  # illegal
    context.wait(done)


@pytest.fixture(scope="module")
def another_capture() -> object:
    def other(b: StaticBuffers) -> None:
        ESCAPED.append(b.x + 1)
        EVENTS.append(current_context().record())

    return BACKEND.capture(other, BUFFERS)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of this process only."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("rule", "step"), ILLEGAL.values(), ids=ILLEGAL)
def test_illegal(rule: str, step: SnippetStep, another_capture: object) -> None:
    randomise(BUFFERS, 1)
    before, fingerprint = snapshot(BUFFERS), BUFFERS.fingerprint()
    with pytest.raises(CaptureError) as caught:
        BACKEND.capture(step, BUFFERS)  # type: ignore[arg-type]
    error = caught.value
    assert error.rule == rule, str(error)
    assert "# illegal" in error.source, f"{error.file}:{error.line}: {error.source}"
    assert error.file == __file__ and f"{error.file}:{error.line}" in str(error)
    assert_same(before, snapshot(BUFFERS))
    assert BUFFERS.fingerprint() == fingerprint


def test_threads_are_refused_while_another_capture_ends() -> None:
    begun, other_begun = threading.Event(), threading.Event()

    def waits(buffers: StaticBuffers) -> None:
        begun.set()
        other_begun.wait(10)

    def starts_thread(buffers: StaticBuffers) -> None:
        other_begun.set()
        other.join()
        threading.Thread(target=int).start()

    other = threading.Thread(target=TapeBackend().capture, args=(waits, StaticBuffers([])))
    other.start()
    begun.wait(10)
    with pytest.raises(CaptureError, match="other-thread"):
        TapeBackend().capture(starts_thread, StaticBuffers([]))
    assert threading.Thread.start.__module__ == "threading"  # no longer replaced


def test_thread_of_a_pool_of_multiprocessing() -> None:
    with ThreadPool(1) as pool, pytest.raises(CaptureError, match=r"(?s)other-thread.*# illegal"):
        BACKEND.capture(lambda b: pool.apply(b.x.add_, (1,)), BUFFERS)  # type: ignore[arg-type]  # illegal


# legal look-alikes


@legal
def batch_statistics(b: StaticBuffers) -> None:
    torch.nn.functional.batch_norm(b.x, b.x[0].mul(1), b.x[1].add_(1), training=True)
    torch.nn.functional.batch_norm(b.x, b.y[0], b.y[1], training=True)
    torch.batch_norm_update_stats(b.x, b.big[0], b.big[1], 0.1)


@legal
def factories(b: StaticBuffers) -> None:
    b.x.add_(torch.zeros(8, device=b.device)).add_(torch.full((4, 1), 2.0, device=b.device)).add_(torch.ones_like(b.y))
    b.x.add_(torch.arange(8, device=b.device)).mul_(torch.arange(1, 9, dtype=torch.float32, device=b.device))
    b.x.add_(b.x.new_zeros(8)).add_(torch.eye(8, device=b.device)[2]).add_(torch.linspace(0, 1, 8, device=b.device))


@legal
def shapes_of_own_tensors_in_place(b: StaticBuffers) -> None:
    made = b.x * 2
    b.y.add_(made)
    view = made.t_().unsqueeze_(0)[:, 2:4].transpose_(0, 2)
    b.x[:, :4].copy_(b.y @ made.squeeze_()).add_(view.sum())
    made.as_strided_((4, 8), (8, 1)).mul_(3)
    b.x[1:3].t_().unsqueeze_(0).mul_(2)
    b.y.add_(made + b.x.quantile(0.3, dim=0))


@legal
def spectrum(b: StaticBuffers) -> None:
    b.big.add_(torch.stft(b.y.flatten(), 8, window=torch.ones(8, device=b.device), return_complex=True).abs().sum())


@legal
def recurrent_layer(b: StaticBuffers) -> None:
    b.y.add_(GRU(b.x[None])[0][0])


@legal
def fill_by_scalar(b: StaticBuffers) -> object:
    b.x[1].fill_(3.5)
    return b.y.zero_()  # a buffer


@legal
def where_with_scalars(b: StaticBuffers) -> None:
    b.x.copy_(torch.where(b.mask, b.x, -math.inf))
    b.y.copy_(torch.where(b.mask, 1.0, 2.0))


@legal
def masked_fill(b: StaticBuffers) -> None:
    b.x.masked_fill_(b.mask, -1.0)
    b.y.add_(b.x.masked_fill(~b.mask, 2.0))


@legal
def index_by_tensor(b: StaticBuffers) -> None:
    b.x.copy_(b.y[b.index])
    b.y[:, 0].copy_(b.x[b.index, b.index])


@legal
def index_write_by_tensor(b: StaticBuffers) -> None:
    b.big[b.index] = b.x[0].clone()
    b.big.index_put_((b.index,), b.y[:1], accumulate=True)
    b.big.index_fill_(0, b.index[:2], 7.0)
    b.big[b.index[2:], 3] += 1.0


@legal
def scalar_store(b: StaticBuffers) -> None:
    b.x[0] = 5
    b.x[:, 2] = 1.5
    b.mask[1] = True
    b.index[-1:] = 3


@legal
def scalar_store_by_mask(b: StaticBuffers) -> None:
    b.x[b.mask] = 0.25


@legal
def slice_copy(b: StaticBuffers) -> None:
    b.x[:, 1:3].copy_(b.y[:, 4:6])
    b.x[2:] = b.y[:2]
    b.x[..., -1].add_(b.y[None, :, 0][0])


@legal
def scatter_gather(b: StaticBuffers) -> None:
    b.x.scatter_(1, b.index[:, None], 9.0)
    b.y.scatter_(1, b.index[:, None], b.x[:, :1].clone())
    b.x.add_(b.y.gather(1, b.index[:, None].expand(4, 8)))
    b.big.scatter_add_(0, b.index[:, None].expand(4, 8), b.x)
    b.big.index_add_(0, b.index, b.y)


@legal
def orderings(b: StaticBuffers) -> None:
    values, indices = b.x.topk(3, dim=1)
    ordered, order = b.y.sort(dim=1, descending=True)
    b.x[:, :3].copy_(values + indices)
    b.y.copy_(ordered + order + b.y.argsort(dim=1, stable=True))


@legal
def scans_and_reductions(b: StaticBuffers) -> None:
    b.x.copy_(b.x.cumsum(1) + b.y.cumprod(0))
    b.index.copy_(b.x.argmax(1) + b.mask.sum(1) + b.mask.any(1))
    values, where = b.x.max(dim=0)
    b.y.copy_(values + where + b.x.mean(1, keepdim=True) + b.x.logsumexp(1, keepdim=True) + b.x.amax(1, keepdim=True))


@legal
def products(b: StaticBuffers) -> None:
    b.y.copy_((b.x @ TABLE.T) @ TABLE)
    b.x.copy_(F.linear(b.y, NET.linear.weight, NET.linear.bias) + torch.einsum("ij,kj->ik", b.x, b.y)[:, :1])
    b.big.copy_(torch.baddbmm(b.big[None], b.big[None, :, :4], b.x[None])[0])


@legal
def attention(b: StaticBuffers) -> None:
    q, k = b.x.view(1, 2, 4, 4), b.y.view(1, 2, 4, 4)
    b.x.copy_(F.scaled_dot_product_attention(q, k, k).reshape(4, 8))
    b.y.copy_(F.scaled_dot_product_attention(q, k, k, attn_mask=b.mask[:, :4].view(1, 1, 4, 4)).nan_to_num_().reshape(4, 8))


@legal
def shapes_on_host(b: StaticBuffers) -> None:
    rows = int(b.x.shape[0]) + b.x.size(1) + b.x.numel() + len(b.x) + b.x.dim() + b.x.stride(0)
    name = f"{b.x.shape} {tuple(b.x.size())} {b.x.dtype} {b.x.device}"
    assert name and b.x.is_contiguous() and not b.x.requires_grad
    b.x.add_(rows)


@legal
def one_hot_with_classes(b: StaticBuffers) -> None:
    b.x.copy_(F.one_hot(b.index, 8))
    b.y[0, :4].copy_(F.one_hot(b.index[:1], num_classes=4)[0])


@legal
def conversions(b: StaticBuffers) -> None:
    b.x.copy_(b.x.to(torch.bfloat16).float() + b.y.half().to(torch.float32) + b.x.to(torch.int32) + b.x.to(b.device))
    b.count.copy_(b.x.sum().to(torch.int32))


@legal
def pinned_copies(b: StaticBuffers) -> None:
    b.x_host.copy_(b.x, non_blocking=True)
    b.index.copy_(b.index_host, non_blocking=True)
    b.x_host[1].copy_(b.y[:, 0].repeat(2), non_blocking=True)


@legal
def views(b: StaticBuffers) -> None:
    left, right = b.x.split(4, dim=1)
    first, *rest = b.y.unbind(0)
    chunks = torch.chunk(b.big, 4)
    left.add_(chunks[1][:, :4])
    first.add_(rest[0]).sub_(b.x[:, :1].expand(4, 8)[1])
    right.copy_(b.y.T.reshape(8, 4)[:4] + b.y.view(2, 2, 8).transpose(0, 1).flatten(0, 1)[:, 4:])
    for row in b.y:
        row.mul_(1.5)


@legal
def joins(b: StaticBuffers) -> None:
    b.big.copy_(torch.cat([b.x, b.y, torch.stack([b.x[0], b.y[1]]).repeat(4, 1)]))
    b.x.copy_(F.pad(b.x[:, 1:], (0, 1), value=3.0) + b.y.roll(1, 0) + b.y.flip(0) + b.y.tril())


@legal
def arithmetic(b: StaticBuffers) -> None:
    b.x.copy_(1 - b.x / 3 + 2**b.y - (b.x > 0).float() * torch.maximum(b.x, b.y).clamp(min=-1).rsqrt().nan_to_num())
    b.x.addcmul_(b.y, b.y, value=0.5).lerp_(b.y, 0.25)
    b.index.copy_((b.index * 5 + 3) // 2 % 4 << 1 ^ 1 & 3)


@legal
def integers_of_two_widths(b: StaticBuffers) -> None:
    large = b.count << 30
    torch.add(large, large, out=b.index[:1])
    b.index[2:3].copy_(b.count < (b.index[1] << 32))
    b.index[3:].copy_(b.count + (b.index[1] << 32))


@legal
def tensors_without_dimensions(b: StaticBuffers) -> None:
    first = torch.zeros_like(b.index)
    b.x[0, :4].copy_(b.y[0, 0].gather(0, first))
    b.x[1, 1].index_copy_(0, first[:1], b.y[1, 2:3])


@legal
def given_out(b: StaticBuffers) -> None:
    torch.add(b.x, b.y, out=b.x)
    torch.cat([b.y[:, -1:], b.y[:, :-1]], 1, out=b.y)  # overlaps
    torch.mm(b.x, b.y.T, out=b.big.view(-1)[:16].view(4, 4))


@legal
def empty_then_written(b: StaticBuffers) -> None:
    scratch = torch.empty(4, 8, device=b.device)
    scratch.copy_(b.x)
    b.y.copy_(torch.empty_like(b.x).fill_(2).add_(scratch))


@legal
def custom_kernels(b: StaticBuffers) -> None:
    add_one_(b.x)
    b.y.copy_(doubled(b.x))
    add_one_(b.big[2:4])
    b.x.add_(count_and_sum(b.x, b.count))


@legal
def kernel_that_keeps_and_expands_its_results(b: StaticBuffers) -> None:
    kept, expanded = kept_and_expanded(b.x)
    b.y.copy_(kept * 2 + expanded)


@legal
def kernel_under_autocast(b: StaticBuffers) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        b.x[:, :4].copy_(product_of_rows(b.x))
    b.x[:, 4:].copy_(product_of_rows(b.x))


@legal
def foreach_kernels(b: StaticBuffers) -> None:
    torch._foreach_add_([b.x, b.y], 1.0)
    more = torch._foreach_mul([b.x, b.y], 2.0)
    b.x.copy_(more[1])


@legal
def random_draws(b: StaticBuffers) -> None:
    b.x.exponential_(generator=GENERATOR)
    b.y.copy_(torch.rand(4, 8, device=b.device, generator=GENERATOR))
    b.index.copy_(torch.randint(0, 4, (4,), device=b.device, generator=GENERATOR))
    b.mask.copy_(torch.bernoulli(torch.full((4, 8), 0.5, device=b.device), generator=GENERATOR))
    b.index.add_(torch.multinomial(b.x, 1, generator=GENERATOR)[:, 0] + torch.multinomial(b.x, 2, generator=GENERATOR)[:, 1])


@legal
def draws_from_the_default_generator(b: StaticBuffers) -> None:
    b.x.copy_(torch.randn(4, 8, device=b.device) + F.dropout(b.y, 0.5) + torch.rand_like(b.x))
    b.y.copy_(F.gumbel_softmax(b.x))
    q = b.x.view(1, 1, 4, 8)
    b.big[:4].copy_(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)[0, 0])


@legal
def several_streams(b: StaticBuffers) -> None:
    context = current_context()
    fork = context.record()
    b.x.add_(1)
    with context.stream("side"):
        context.wait(fork)
        b.y.mul_(2)
        with context.stream("third"):
            context.wait(fork)
            b.big.add_(1)
            third = context.record()
        context.wait(third)
        b.big[:4].add_(b.y)
        join = context.record()
    context.wait(join)
    b.x.add_(b.big[:4])


@legal
def host_node(b: StaticBuffers) -> None:
    context = current_context()
    b.x_host.copy_(b.x, non_blocking=True)
    fork = context.record()
    with context.stream("side"):
        context.wait(fork)
        context.host_node("double", lambda: BUFFERS.x_host.mul_(2), reads=[b.x_host], writes=[b.x_host])
        join = context.record()
    b.x.add_(1)
    context.wait(join)
    b.y.copy_(b.x_host, non_blocking=True)


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    """The capture has no side effects, and each of several replays equals the eager step bit for bit."""
    step, generators = LEGAL[name], [GENERATOR, torch.default_generator]
    randomise(BUFFERS, 1)
    before, states = snapshot(BUFFERS), [g.get_state() for g in generators]
    allowed = [GENERATOR] if "draws" in name else []
    recorded = BACKEND.capture(step, BUFFERS, check="twice", generators=allowed)  # type: ignore[arg-type]
    assert_same(before, snapshot(BUFFERS))
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, states, strict=True))
    for seed in range(3):
        expected = []
        for repeat in (lambda: run_eager(step, BUFFERS), recorded.replay):  # type: ignore[arg-type]
            randomise(BUFFERS, seed)
            for generator in generators:
                generator.manual_seed(seed)
            repeat()
            repeat()
            expected.append(snapshot(BUFFERS))
        assert_same(*expected)
    assert not name.startswith("custom") or recorded.report.nodes["copied"] == 2


def test_the_message_names_the_function_that_the_step_calls() -> None:
    with pytest.raises(CaptureError, match=r"\[host-sync\] aten::\w+ in inverse\(\) "):
        BACKEND.capture(lambda b: b.x[:, :4].copy_(b.y[:, :4].inverse()), BUFFERS)  # type: ignore[arg-type]
