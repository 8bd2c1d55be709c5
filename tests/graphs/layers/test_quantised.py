"""Packed weights have the values of their formula; products in C equal those in torch, and do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import product
from stepgraph.graphs.layers.quantised import KINDS, MIXED, Grouped, QuantKind, common_kind, pack, quantised_rows, unpack
from stepgraph.sampling import native
from tests.helpers.torch_threads import torch_threads, without_subnormals

DISTINCT = {str(name): kind for kind, name in {kind: name for name, kind in KINDS.items()}.items()} | {"mixed": MIXED}
every_kind = pytest.mark.parametrize("kind", DISTINCT.values(), ids=DISTINCT)


def made(kind: QuantKind, outer: int, inner: int) -> tuple[Tensor, Tensor]:
    """Packed weights, and their values."""
    draw = torch.Generator().manual_seed(outer)
    count = inner // kind.group
    numbers = torch.randint(256 if kind.bits == 8 else 16, (outer, inner), generator=draw)
    numbers[:, 0] = torch.arange(outer) % (256 if kind.bits == 8 else 16)
    values = (numbers - kind.zero).float()
    if kind.float8:
        numbers[numbers & 127 == 127] = 126  # not NaN
        values = numbers.to(torch.uint8).view(torch.float8_e4m3fn).float()
    # Rounded to float16, so that scale * number is exact.
    scales = (torch.randn(outer, count, generator=draw) * 0.01).half().to(kind.scale_type)
    minimums = torch.randn(outer, count, generator=draw).to(kind.scale_type) if kind.ranged else None
    values = values.view(outer, count, -1) * scales.float()[:, :, None]
    values = values if minimums is None else values + minimums.float()[:, :, None]
    return pack(kind, Grouped(numbers - kind.zero, scales, minimums)), values.view(outer, inner)


@every_kind
def test_packed_weights_have_the_values_of_their_formula(kind: QuantKind) -> None:
    packed, reference = made(kind, 48, 384)
    assert packed.nbytes == 48 * (384 * kind.bits // 8 + 384 // kind.group * (1 + kind.ranged) * (4 if kind.wide else 2))
    assert torch.equal(unpack(packed), reference)
    rows = torch.tensor([47, 0, 16, 31])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(quantised_rows(rows, packed, dtype), reference[rows].to(dtype))
        assert torch.equal(quantised_rows.reference(rows, packed, dtype), reference[rows].to(dtype))
    with pytest.raises(IndexError, match="out of bounds" if native.why_not() else "outside of its table"):
        quantised_rows(torch.tensor([48]), packed, torch.float32)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "INT4_128"])
def test_the_common_kind_holds_weights_of_every_integer_kind(name: str) -> None:
    kind = KINDS[name]
    assert common_kind({kind}) is kind and common_kind({kind, None}) is None and common_kind({kind, KINDS["FP8"]}) is None
    numbers = torch.arange(256).repeat(16, 1) % (1 << kind.bits) - kind.zero
    scales, minimums = torch.randn(16, 256 // kind.group), torch.randn(16, 256 // kind.group) if kind.ranged else None
    weight = Grouped(numbers, scales.half().float(), None if minimums is None else minimums.half().float())
    common = common_kind({kind, KINDS["Q5_K"]})
    assert common is not None
    assert torch.equal(unpack(pack(common, weight)), unpack(pack(kind, weight)))


@pytest.mark.parametrize(("name", "scale"), [("FP8", 1.0), ("Q8_0", 2.0**-16)])
def test_small_numbers_and_scales_are_exact_without_subnormal_numbers(name: str, scale: float) -> None:
    kind, numbers = KINDS[name], torch.arange(128).repeat(16, 1) % 127
    packed = pack(kind, Grouped(numbers, torch.full((16, 128 // kind.group), scale).to(kind.scale_type)))
    expected = unpack(packed)
    with without_subnormals():
        assert torch.equal(product(torch.eye(128), packed).T, expected)
        assert torch.equal(quantised_rows(torch.arange(16), packed, torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outer", "inner"), [(80, 640), (16, 16_384)])
@every_kind
def test_quantised_products_are_correct_and_independent_of_the_batch(kind: QuantKind, outer: int, inner: int, dtype: torch.dtype) -> None:
    packed, reference = made(kind, outer, inner)
    given = torch.Generator().manual_seed(1)
    states = torch.randn(41, 2 * inner, generator=given).to(dtype)[:, :inner]
    for bias in (None, torch.randn(outer, generator=given).to(dtype)):
        found = product(states, packed, bias)
        expected = torch.nn.functional.linear(states.double(), reference.double(), None if bias is None else bias.double())
        # Float32 sums of `inner` products in another order, rounded to the dtype at the end.
        size = states.double().abs() @ reference.double().abs().T
        bound = inner * 2**-24 * size + (2**-8 * expected.abs() if dtype is torch.bfloat16 else 0)
        assert bool(((found.double() - expected).abs() <= bound).all())
        for rows in (*range(1, 18), 31, 32, 33, 40):
            assert torch.equal(product(states[:rows], packed, bias), found[:rows])
            assert torch.equal(product(states[-rows:], packed, bias), found[-rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_quantised_products_have_the_same_bits_with_any_number_of_threads(kind: QuantKind, dtype: torch.dtype) -> None:
    packed, _ = made(kind, 16 * 67, 640)
    states = torch.randn(19, 640, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = product(states, packed, None)
    for count in (2, 3):
        with torch_threads(count):
            assert torch.equal(product(states, packed, None), alone)
