"""Backups restore every bit."""

from __future__ import annotations

import pytest
import torch

from stepgraph.graphs import BufferSpec, StaticBuffers
from stepgraph.graphs.memory import Backup, holds_only

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backup_restores_every_bit(dtype: torch.dtype) -> None:
    specs = [
        BufferSpec("small", (3, 5), dtype, fill=1),
        BufferSpec("fresh", (1 << 21,), dtype, fill=1),
        BufferSpec("used", (1 << 21,), dtype, fill=1),
        BufferSpec("empty", (0, 4), dtype),
        BufferSpec("ring_host", (2, 3), dtype, "pinned"),
    ]
    buffers = StaticBuffers(specs)
    buffers.small.copy_(torch.arange(15).view(3, 5))
    buffers.used[-1] = 0
    before = {name: buffers[name].clone() for name in buffers}
    fingerprint = buffers.fingerprint()
    backups = [Backup(buffers[spec.name], spec.fill) for spec in specs]
    assert [backup._copy is None for backup in backups] == [name == "fresh" for name in buffers], "large buffers that hold their fill value"
    for name in buffers:
        buffers[name].zero_()
    for backup in backups:
        backup.restore()
    assert all(torch.equal(buffers[name], before[name]) for name in buffers)
    assert buffers.fingerprint() == fingerprint


def test_holds_only_compares_bits() -> None:
    zeros = torch.zeros(100)
    assert holds_only(zeros, 0)
    zeros[7] = -0.0
    assert not holds_only(zeros, 0)
    assert holds_only(torch.full((4,), -1, dtype=torch.int32), -1)
    assert not holds_only(torch.zeros(2, dtype=torch.complex128), 0)  # comparison not supported: copied instead
