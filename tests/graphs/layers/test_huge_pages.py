"""Memory of weights in huge pages."""

from __future__ import annotations

import gc
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stepgraph.graphs.layers.huge_pages import empty_in_huge_pages

NUMBERS = torch.empty(0, dtype=torch.bfloat16)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


def has_huge_pages(address: int) -> bool:
    """Whether the mapping at this address requests huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


def test_tensors_have_memory_of_their_own() -> None:
    """Also a tensor that is larger than a mapping shared by several tensors, and the tensors after it."""
    shapes = [(100, 700), (40000, 600), (3, 50001), (100, 700)]
    tensors = [empty_in_huge_pages(NUMBERS, shape) for shape in shapes]
    packed = empty_in_huge_pages(NUMBERS, (5, 70000), torch.uint8)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    packed.fill_(200)
    assert [tuple(tensor.shape) for tensor in tensors] == shapes and packed.shape == (5, 70000) and packed.dtype is torch.uint8
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors)) and bool((packed == 200).all())
    assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in [*tensors, packed])


@linux
def test_large_tensors_request_huge_pages() -> None:
    large, small = (empty_in_huge_pages(NUMBERS, (rows, 64)) for rows in (1 << 15, 2))
    assert has_huge_pages(large.data_ptr()) and not has_huge_pages(small.data_ptr())


@linux
def test_memory_is_released_with_the_last_tensor() -> None:
    """In a thread of its own: the latest mapping of a thread is shared with its next tensors, and others of this thread may live on."""
    kept = empty_in_huge_pages(NUMBERS, (1 << 12, 600))
    with ThreadPoolExecutor(1) as pool:
        first, second = pool.submit(lambda: [empty_in_huge_pages(NUMBERS, (1 << 13, 600)) for _ in range(2)]).result()
    address, later = first.data_ptr(), second.data_ptr()
    del first
    gc.collect()
    assert has_huge_pages(address) and abs(later - address) < 1 << 26
    del second
    gc.collect()
    assert not has_huge_pages(address) and has_huge_pages(kept.data_ptr())


def test_other_devices_have_their_own_memory() -> None:
    found = empty_in_huge_pages(torch.empty(0, device="meta"), (1 << 15, 64))
    assert found.is_meta and found.shape == (1 << 15, 64)
