"""Static memory: allocation from the spec table, validation, the layout of results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepgraph.graphs import BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.round_specs import round_specs
from stepgraph.graphs.row_layout import Column, ResultLayout, ResultRecord
from tests.graphs.test_graph_key import SIZES


def test_allocated_tensors_match_the_spec_table() -> None:
    specs = round_specs(Limits(**SIZES))
    buffers = StaticBuffers(specs)
    assert list(buffers) == [spec.name for spec in specs]
    for spec in specs:
        tensor = buffers[spec.name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
        assert bool((tensor == spec.fill).all())
        assert tensor is getattr(buffers, spec.name)
        assert spec.name.endswith("_host") == (spec.memory == "pinned")
        assert tensor.numel() == 0 or buffers.owner_of(tensor[..., -1:]) == (spec.name, spec.memory)
    assert buffers.nbytes == sum(tensor.nbytes for tensor in (buffers[name] for name in buffers))
    assert buffers.row_state.shape == (4, len(Column)) and buffers.row_masks.shape == (4, 5, 3)


def test_reset_refills_in_place_and_fingerprint_changes_with_the_tensors() -> None:
    module = nn.Linear(2, 2)
    buffers = StaticBuffers([BufferSpec("x", (3,), torch.int32, fill=7)], constants={"module": module})
    before = buffers.fingerprint()
    buffers.x.zero_()
    buffers.reset()
    assert buffers.x.tolist() == [7, 7, 7] and buffers.fingerprint() == before
    assert buffers.owner_of(module.weight[0]) == ("module.weight", "constant")
    assert buffers.owner_of(torch.zeros(1)) is None
    assert StaticBuffers([BufferSpec("x", (3,), torch.int32)]).fingerprint() != before
    with pytest.raises(AttributeError, match="StaticBuffers: got 'y', expected one of: x"):
        buffers.y  # noqa: B018
    with pytest.raises(KeyError, match="StaticBuffers: got 'y', expected one of: x"):
        buffers["y"]
    with pytest.raises(ValueError, match="expected one of: none are declared") as caught:
        StaticBuffers([]).y  # noqa: B018
    assert str(caught.value) == "StaticBuffers: got 'y', expected one of: none are declared"
    assert hasattr(buffers, "x") and not hasattr(buffers, "y")


@pytest.mark.parametrize(
    ("constant", "got"),
    [
        (torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch.eye(2).to_mkldnn(), "a tensor of layout torch._mkldnn"),
        (nn.UninitializedBuffer(), "an uninitialised tensor of a lazy module"),
    ],
    ids=["sparse", "opaque", "lazy"],
)
def test_constants_without_an_address_are_refused(constant: torch.Tensor, got: str) -> None:
    module = nn.Sequential(nn.Module())
    module[0].register_buffer("weight", constant)
    for source, place in ((constant, ""), (module, r"\.0\.weight")):
        with pytest.raises(ValueError, match=rf"constants\['w'\]{place}: got {got}, expected one of layout torch\.strided with values"):
            StaticBuffers([], constants={"w": source})


def test_static_buffer_cannot_be_rebound() -> None:
    buffers = StaticBuffers([BufferSpec("x", (3,), torch.int32)])
    tensor = buffers.x
    with pytest.raises(AttributeError, match=r"buffers.x is static and cannot be rebound; write into it: buffers.x.copy_"):
        buffers.x = buffers.x + 1
    buffers.x += 1
    assert buffers.x is tensor and tensor.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BufferSpec("x", (1,), torch.int32, fill=1.5), r"BufferSpec.fill of 'x': got 1.5, expected a number of torch.int32"),
        (lambda: BufferSpec("x_host", (1,), torch.int32), r"BufferSpec.name: got 'x_host' in device memory, expected the suffix _host"),
        (lambda: BufferSpec("x", (1,), torch.int32, "pinned"), r"BufferSpec.name: got 'x' in pinned memory"),
        (lambda: BufferSpec("not a name", (1,), torch.int32), r"BufferSpec.name: got 'not a name', expected a public Python identifier"),
        (lambda: BufferSpec("_x", (1,), torch.int32), r"BufferSpec.name: got '_x'"),
        (lambda: StaticBuffers([BufferSpec("reset", (1,), torch.int32)]), r"StaticBuffers.specs: got 'reset', a method of StaticBuffers"),
        (lambda: BufferSpec("x", (2, -1), torch.int32), r"BufferSpec.shape of 'x': got \(2, -1\), expected a tuple of integers >= 0"),
        (lambda: BufferSpec("x", 4, torch.int32), r"BufferSpec.shape of 'x': got 4, expected a tuple"),  # type: ignore[arg-type]
        (lambda: BufferSpec("x", (4,), "float32"), r"BufferSpec.dtype of 'x': got 'float32', expected a torch.dtype"),  # type: ignore[arg-type]
        (lambda: BufferSpec("x", (4,), torch.int32, "gpu"), r"BufferSpec.memory of 'x': got 'gpu'"),  # type: ignore[arg-type]
        (lambda: StaticBuffers([BufferSpec("x", (1,), torch.int32)] * 2), r"StaticBuffers.specs: 'x' is declared twice"),
        (lambda: StaticBuffers([], "gpu"), r"StaticBuffers.device: got 'gpu' \(RuntimeError: Expected one of cpu, .*\), expected"),
        pytest.param(
            lambda: StaticBuffers([], "cuda"),
            r"StaticBuffers.device: got 'cuda' \(AssertionError: Torch not compiled with CUDA enabled\), expected a torch device",
            marks=pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch has CUDA"),
        ),
    ],
)
def test_invalid_specs_raise_value_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_result_fields_are_read_as_they_were_written(drafts: int) -> None:
    layout, rows = ResultLayout(drafts), 2
    line = torch.arange(rows * layout.width).reshape(rows, layout.width)
    expected = [layout.read(row, []) for row in line.tolist()]
    assert [len(expected[0].tokens), len(expected[0].statuses), len(expected[0].drafts)] == [drafts + 1, drafts + 1, drafts]
    fields = {name: torch.tensor([getattr(row, name) for row in expected]) for name in ResultRecord._fields[:-1]}
    written = torch.full_like(line, -1)
    layout.write(written, **{name: fields.pop(name) for name in ("emitted", "finish")})
    layout.write(written, **{name: fields.pop(name) for name in ("looked_up", "relaxed")})
    layout.write(written, **fields)
    assert torch.equal(written, line)
    with pytest.raises(AssertionError, match="adjacent"):
        layout.write(written, emitted=line[:, 0], accepted=line[:, 0])
