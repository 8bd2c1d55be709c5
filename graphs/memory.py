"""Memory that is available, compared with what would be allocated; and the contents of a static tensor while a step is only recorded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check_memory(name: str, nbytes: int, device: torch.device, remedy: str = "") -> None:
    """ValueError if `nbytes` more do not fit on the device."""
    available = available_bytes(device)
    if available is not None and nbytes > available:
        raise ValueError(f"{name}: got {nbytes:,} bytes on {device}, expected at most {available:,}, the memory available{remedy}")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device; None if unknown. On the CPU, within the limits of a container and of `ulimit -v`."""
    if device.type == "cuda":
        index = torch.empty(0, device=device).device.index
        general = (each for each in torch.cuda.memory_snapshot() if (each["device"], each["segment_pool_id"]) == (index, (0, 0)))
        return int(torch.cuda.mem_get_info(device)[0] + sum(each["total_size"] - each["allocated_size"] for each in general))
    if device.type != "cpu":
        return None
    free_bytes = [_read_table(_MEMINFO).get("MemAvailable:", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024) * 1024]
    with contextlib.suppress(OSError, ValueError):  # no container, or "max": no limit
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free_bytes.append(limit - used + _read_table(_CGROUP / "memory.stat").get("inactive_file", 0))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            free_bytes.append(max(0, limit - _process_bytes()[0]))
    return min(free_bytes)


def resident_bytes() -> int | None:
    """Memory of this process, without what the allocator kept for later; None if unknown."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # the temporary tensors of a recording leave hundreds of MB
        return _process_bytes()[1]
    return None


def _process_bytes() -> list[int]:
    return [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in Path("/proc/self/statm").read_text().split()[:2]]


def _read_table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


_SMALL_BYTES = 1 << 20  # bytes; smaller tensors are copied without a comparison
_CHUNK_WORDS = {"cpu": 1 << 18, "cuda": 1 << 26}  # words per comparison: on the CPU they stay in its cache


class Backup:
    """A copy of a tensor, made and restored on the current stream while nothing else runs.

    A large tensor that holds only its declared fill value, such as a cache before the first request, is not copied. A copy that does not
    fit into device memory is on the host.
    """

    def __init__(self, tensor: Tensor, fill: float) -> None:
        self._tensor, self._fill = tensor, fill
        self._copy = None if tensor.nbytes > _SMALL_BYTES and holds_only(tensor, fill) else _copy_of(tensor)

    def restore(self) -> None:
        if self._copy is not None:
            self._tensor.copy_(self._copy)
        else:
            for chunk, pattern in _changed_chunks(self._tensor, self._fill):
                chunk.copy_(pattern.expand_as(chunk))


def holds_only(tensor: Tensor, fill: float) -> bool:
    """Whether every element has the bits of `fill`. False if the tensor's size is not a multiple of words."""
    return tensor.nbytes % 8 == 0 and tensor.element_size() <= 8 and next(_changed_chunks(tensor, fill), None) is None


def _changed_chunks(tensor: Tensor, fill: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of words that hold something else, and a word that holds only `fill`."""
    word = torch.full((8 // tensor.element_size(),), fill, dtype=tensor.dtype, device=tensor.device).view(torch.int64)
    for chunk in tensor.view(-1).view(torch.int64).split(_CHUNK_WORDS[tensor.device.type]):
        if not bool((chunk == word).all()):
            yield chunk, word


def _copy_of(tensor: Tensor) -> Tensor:
    if tensor.is_cuda and 2 * tensor.nbytes > torch.cuda.mem_get_info(tensor.device)[0]:
        return tensor.cpu()
    return tensor.clone()
