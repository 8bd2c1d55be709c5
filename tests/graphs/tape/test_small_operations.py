"""Calls in C for small operations of torch: the results of torch, also after the values of their inputs have changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.tape.replay_ops import OpCall
from stepgraph.graphs.tape.small_operations import MAX_ELEMENTS, Run, small_operation
from tests.helpers.c_library import needs_c

pytestmark = needs_c
aten = torch.ops.aten
WHOLE = (torch.int64, torch.int32, torch.bool)
ROWS = torch.tensor([1])
Arguments = tuple[Any, ...]
Make = Callable[[random.Random], Arguments]


def numbers(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype = torch.int64, least: int = -3, most: int = 3) -> Tensor:
    """A tensor with arbitrary strides: part of a larger tensor with permuted dimensions."""
    larger = tuple(size + rng.randrange(3) for size in shape)
    order = rng.sample(range(len(shape)), len(shape))
    made = torch.tensor([rng.randint(least, most) for _ in range(torch.Size(larger).numel())]).view([larger[dim] for dim in order])
    made = made > 0 if dtype is torch.bool else made.to(dtype)
    return made.permute([order.index(dim) for dim in range(len(shape))])[tuple(slice(size) for size in shape)]


def shape_of(rng: random.Random, most: int = 4) -> tuple[int, ...]:
    return tuple(rng.randint(1, 4) for _ in range(rng.randint(1, most)))


def pair(rng: random.Random, dtypes: tuple[torch.dtype, ...] = WHOLE) -> Arguments:
    """Two tensors that broadcast, or a tensor and a number."""
    shape = shape_of(rng)
    other = tuple(1 if rng.random() < 0.3 else size for size in shape[rng.randrange(len(shape)) :])
    first = numbers(rng, shape, rng.choice(dtypes))
    return first, rng.randint(-3, 3) if rng.random() < 0.3 else numbers(rng, other, rng.choice(dtypes))


def chosen(rng: random.Random) -> Arguments:
    shape = shape_of(rng)
    dtype = rng.choice(WHOLE)
    return numbers(rng, shape, torch.bool), numbers(rng, shape[-1:], dtype), numbers(rng, shape, dtype)


def rows_of_table(rng: random.Random) -> Arguments:
    """Some of the row indices are negative; they may have no dimension."""
    table = torch.randn(5, *(rng.randint(1, 4) for _ in range(rng.randrange(3)))).to(rng.choice([torch.float32, torch.bfloat16]))
    return table, [numbers(rng, shape_of(rng, 2)[rng.randrange(2) :], least=-5, most=4)]


def embedded(rng: random.Random) -> Arguments:
    return torch.randn(5, rng.randint(1, 4)), numbers(rng, shape_of(rng, 3), least=0, most=4)


def gathered(rng: random.Random) -> Arguments:
    shape = shape_of(rng)
    dim = rng.randrange(len(shape))
    index = tuple(rng.randint(1, 3) if each == dim else rng.randint(1, size) for each, size in enumerate(shape))
    return torch.randn(shape), dim - rng.choice([0, len(shape)]), numbers(rng, index, least=0, most=shape[dim] - 1)


CASES: dict[str, tuple[Any, Make]] = {
    **{name: (getattr(aten, name), pair) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: (getattr(aten, name), lambda rng: pair(rng, WHOLE[:2])) for name in ("add", "sub", "mul", "bitwise_and", "bitwise_or")},
    "bitwise_and of bools": (aten.bitwise_and, lambda rng: (numbers(rng, (3, 2), torch.bool), numbers(rng, (2,), torch.bool))),
    "clamp": (aten.clamp, lambda rng: (numbers(rng, shape_of(rng)), *rng.choice([(-1, None), (None, 1)]))),
    "clamp_": (aten.clamp_, lambda rng: (numbers(rng, shape_of(rng)), *rng.choice([(-1, None), (None, 1)]))),
    "where": (aten.where, chosen),
    "copy_": (aten.copy_, lambda rng: (numbers(rng, (2, 3), rng.choice(WHOLE[:2])), numbers(rng, (3,), rng.choice(WHOLE)))),
    "copy_ of numbers": (aten.copy_, lambda rng: (torch.randn(3, 4), torch.randn(4, 3).T)),
    "clone": (aten.clone, lambda rng: (torch.randn(4, 6).bfloat16()[:, ::2],)),
    "_to_copy": (aten._to_copy, lambda rng: (numbers(rng, shape_of(rng), rng.choice(WHOLE)),)),
    "cat": (aten.cat, lambda rng: ([torch.randn(2, 3), torch.randn(4, 2).T, torch.randn(2, 1)], rng.choice([1, -1]))),
    "index": (aten.index, rows_of_table),
    "embedding": (aten.embedding, embedded),
    "gather": (aten.gather, gathered),
}


def tensors_of(arguments: Arguments) -> list[Tensor]:
    flat = [part for each in arguments for part in (each if isinstance(each, (list, tuple)) else [each])]
    return [each for each in flat if isinstance(each, Tensor)]


def called(name: str, packet: Any, arguments: Arguments) -> tuple[Run | None, Tensor]:
    """The call in C, and the memory of the result; its arguments are those of torch's own call."""
    keywords = {"dtype": torch.int64} if name == "_to_copy" else {}
    overload = torch._C._jit_resolve_packet(f"aten::{name.split()[0]}", *arguments, **keywords)
    call = OpCall(getattr(packet, overload or "default"), arguments, keywords)
    result = call.func(*arguments, **keywords)
    return small_operation(call.schema.name, call.values, result), result


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_torch(name: str) -> None:
    """Each call is made once, and run again after its inputs have changed, as in replays."""
    packet, make = CASES[name]
    rng, used = random.Random(7), 0
    torch.manual_seed(7)
    for _ in range(150):
        arguments = make(rng)
        mutates = name.split()[0].endswith("_")
        run, result = called(name, packet, arguments)
        if run is None:
            continue
        used += 1
        indices = name in ("index", "embedding", "gather")
        for _ in range(2):
            for tensor in tensors_of(arguments):
                if not (indices and tensor.dtype is torch.int64 and tensor is not arguments[0]) and tensor.dim():
                    tensor.copy_(tensor.flip(0).clone())  # other values of the same kind
            before = arguments[0].clone() if mutates else None
            keywords = {"dtype": torch.int64} if name == "_to_copy" else {}
            expected = packet(*arguments, **keywords).clone()
            if before is not None:
                arguments[0].copy_(before)
            else:
                result.fill_(1)
            run()
            assert result.dtype is expected.dtype and torch.equal(result, expected), (name, arguments)
    assert used >= 50, "most of these calls are supported"


@pytest.mark.parametrize(
    ("packet", "arguments"),
    [
        (aten.add, (torch.ones(3), torch.ones(3))),
        (aten.add, (torch.ones(3, dtype=torch.int64), 1.5)),
        (aten.eq, (torch.ones(3), 1)),
        (aten.where, (torch.ones(3, dtype=torch.bool), torch.ones(3), torch.zeros(3))),
        (aten.clamp, (torch.ones(3, dtype=torch.int64), 0, 2)),
        (aten.sum, (torch.ones(3, 2, dtype=torch.int64), [1])),
        (aten.index, (torch.ones(3), [torch.tensor([True, False, True])])),
        (aten.index, (torch.ones(3, 2), [None, torch.tensor([1])])),
        (aten.copy_, (torch.ones(3), torch.ones(3, dtype=torch.int64))),
        (aten.copy_, (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.int64))),
        (aten.mul, (torch.ones(MAX_ELEMENTS + 1, dtype=torch.int64), 2)),
        (aten.mul, (torch.ones(1, 1, 1, 1, 2, dtype=torch.int64), 2)),
        (aten.neg, (torch.ones(3, dtype=torch.int64),)),
        (aten.copy_, (torch.ones(3), torch.ones(3, dtype=torch.complex64).conj().imag)),
        (aten.copy_, (torch.ones(3, dtype=torch.complex64).conj().imag, torch.ones(3))),
        (aten.lt, (torch.ones(3, dtype=torch.int32), torch.tensor(2**32))),
        (aten.mul, (torch.ones(3, dtype=torch.int32), torch.tensor(2))),
        (aten.lt, (torch.ones(3, dtype=torch.int32), 2**32 + 5)),
        (aten.eq, (torch.ones(3, dtype=torch.int64), 2**63)),
        (aten.copy_, (ROWS.expand(4, 1)[1:], ROWS.expand(4, 1)[:-1])),
        (aten.gather, (torch.tensor(1.0), 0, torch.tensor(0))),
        (aten.gather, (torch.tensor(1.0), 0, torch.tensor([0, 0]))),
        (aten.index_put_, (torch.ones(3, 2), [ROWS, ROWS], torch.ones(1))),
    ],
)
def test_other_operations_run_in_torch(packet: Any, arguments: Arguments) -> None:
    run, _ = called(packet._qualified_op_name.removeprefix("aten::"), packet, arguments)
    assert run is None


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_outside_of_its_table_is_an_error(index: int) -> None:
    rows = torch.tensor([1])
    run, _ = called("index", aten.index, (torch.ones(5, 2), [rows]))
    rows.fill_(index)
    assert run is not None
    with pytest.raises(IndexError, match="an index lies outside of its table"):
        run()


def test_constants_are_written_again() -> None:
    """Tapes reuse the memory of intermediate results."""
    for call in (OpCall(aten.arange.default, (6,), {}), OpCall(aten.full.default, ([2, 3], True), {"dtype": torch.bool})):
        result = call.func(*call.args, **call.kwargs)
        run, expected = small_operation(call.schema.name, call.values, result), result.clone()
        assert run is not None
        result.zero_()
        run()
        assert torch.equal(result, expected)
