"""The smallest Triton program: its launch shows whether Triton can compile, link and launch on a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def store_zero(target):  # [1] int32, written
    tl.store(target, 0)


def launch(device: torch.device) -> None:
    with torch.cuda.device(device):
        store_zero[(1,)](torch.empty(1, dtype=torch.int32, device=device))
