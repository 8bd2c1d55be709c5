"""Memory that is available, compared with what would be allocated, before it is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

import torch

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check_memory(name: str, nbytes: int, device: torch.device, remedy: str = "") -> None:
    """ValueError if `nbytes` more do not fit on the device."""
    available = available_bytes(device)
    if available is not None and nbytes > available:
        raise ValueError(f"{name}: got {nbytes:,} bytes on {device}, expected at most {available:,}, the memory available{remedy}")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device; None if unknown. On the CPU, within the limits of a container and of `ulimit -v`."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    found = [_table(_MEMINFO).get("MemAvailable:", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024) * 1024]
    with contextlib.suppress(OSError, ValueError):  # no container, or "max": no limit
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(limit - used + _table(_CGROUP / "memory.stat").get("inactive_file", 0))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            found.append(max(0, limit - _own_bytes()[0]))
    return min(found)


def resident_bytes() -> int | None:
    """Memory of this process, without what the allocator kept for later; None if unknown."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # the temporary tensors of a recording leave hundreds of MB
        return _own_bytes()[1]
    return None


def _own_bytes() -> list[int]:
    return [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in Path("/proc/self/statm").read_text().split()[:2]]


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
