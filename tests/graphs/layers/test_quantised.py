"""Packed weights have the values of the format's reference; products in C equal those in torch, and do not depend on the batch."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from torch.library import opcheck

from stepgraph.graphs.layers.quantised import GROUP, KINDS, pack, quantised_product, quantised_rows, unpack


def made(kind: str, outer: int, inner: int) -> tuple[Tensor, Tensor]:
    """Packed weights, and their values by the reference of the format."""
    weight = torch.randn(outer, inner, generator=torch.Generator().manual_seed(outer))
    blocks = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind])
    reference = torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType[kind]))
    return pack(KINDS[kind], torch.from_numpy(blocks).view(outer, inner // GROUP, -1)), reference


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_have_the_bits_of_the_reference(kind: str) -> None:
    packed, reference = made(kind, 48, 96)
    assert packed.nbytes == 48 * 3 * gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    assert torch.equal(unpack(packed), reference)
    rows = torch.tensor([47, 0, 16, 31])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(quantised_rows(rows, packed, dtype), reference[rows].to(dtype))
        assert torch.equal(quantised_rows.reference(rows, packed, dtype), reference[rows].to(dtype))
    with pytest.raises(IndexError, match="outside of its table"):
        quantised_rows(torch.tensor([48]), packed, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_products_are_correct_and_independent_of_the_batch(kind: str, dtype: torch.dtype) -> None:
    packed, reference = made(kind, 80, 576)
    given = torch.Generator().manual_seed(1)
    states = torch.randn(21, 1152, generator=given).to(dtype)[:, :576]
    for bias in (None, torch.randn(80, generator=given).to(dtype)):
        found = quantised_product(states, packed, bias)
        expected = torch.nn.functional.linear(states.double(), reference.double(), None if bias is None else bias.double())
        # Float32 sums of 576 products in another order, rounded to the dtype at the end.
        size = states.double().abs() @ reference.double().abs().T
        bound = 576 * 2**-24 * size + (2**-8 * expected.abs() if dtype is torch.bfloat16 else 0)
        assert bool(((found.double() - expected).abs() <= bound).all())
        for rows in range(1, 18):
            assert torch.equal(quantised_product(states[:rows], packed, bias), found[:rows])
            assert torch.equal(quantised_product(states[-rows:], packed, bias), found[-rows:])


def test_operations_pass_opcheck() -> None:
    packed = made("Q4_1", 16, 32)[0]
    opcheck(quantised_product.out, (torch.randn(3, 32), packed, None, torch.empty(3, 16)))
    opcheck(quantised_rows.out, (torch.tensor([1, 2]), packed, torch.float32, torch.empty(2, 32)))
