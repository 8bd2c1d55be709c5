"""Samples of this process: memory, threads, files, child processes, live objects by type. None where the system does not report it."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from stepgraph import Engine
from stepgraph.runtime.stats import EngineStats

PROCESS = Path("/proc/self")
M_ARENA_MAX = -8  # from malloc.h
MALLOC_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # of struct mallinfo2
FILES_PER_CHILD = 2  # open files of this process per child
COUNTED_PACKAGES = ("stepgraph", "xgrammar", "llguidance", "asyncio", "threading")  # packages whose objects are counted


class TypeCounts(Mapping[str, int]):
    """Object counts by type in 4 bytes each: a run keeps thousands of samples, whose memory must not appear as growth."""

    __slots__ = ("_counts",)
    _type_indices: ClassVar[dict[str, int]] = {}  # index of every type that a sample has counted

    def __init__(self, counts: Mapping[str, int]) -> None:
        for name in counts:
            self._type_indices.setdefault(name, len(self._type_indices))
        self._counts = array("I", [counts.get(name, 0) for name in self._type_indices])

    def __getitem__(self, name: str) -> int:
        index = self._type_indices.get(name, len(self._counts))
        count = self._counts[index] if index < len(self._counts) else 0
        if not count:
            raise KeyError(name)
        return count

    def __iter__(self) -> Iterator[str]:
        return (name for name, count in zip(self._type_indices, self._counts, strict=False) if count)

    def __len__(self) -> int:
        return sum(map(bool, self._counts))


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. `settled`: every engine was idle, and unused memory was released before."""

    seconds: float
    settled: bool
    resident_bytes: int | None  # heaps and stacks, without mapped files
    heap_bytes: int | None  # allocated with malloc and not freed: unlike resident memory it does not depend on fragmentation
    device_bytes: int | None  # reserved by torch
    threads: int | None  # of the system, including those unknown to Python
    python_threads: int
    files: int | None  # open files, without the socket and the file of every child
    children: int | None  # processes: compile workers
    strays: int | None  # children that belong to no engine
    engines: int
    rows: int
    waiting: int
    pages: int  # in use
    cached_pages: int  # in the prefix cache
    grammars: int  # in the caches of the engines
    grammar_bytes: int
    compiles: int  # running or waiting
    objects: int = 0  # tracked by the garbage collector, if settled
    tensors: int = 0
    matchers: int = 0  # the last rounds of an engine keep some
    types: Mapping[str, int] = field(default_factory=dict, repr=False)


def sample(seconds: float, engines: Iterable[Engine], settled: bool) -> Sample:
    """A sample of this process and these engines. `settled` collects garbage first and counts objects; call it between two acts."""
    if settled:
        release_memory()
    engines = list(engines)
    stats = [engine.stats() for engine in engines]
    processes, files = children(), _entries("fd")
    types, objects, tensors = live_objects() if settled else ({}, 0, 0)
    return Sample(
        seconds=round(seconds, 3),
        settled=settled,
        resident_bytes=resident_bytes(),
        heap_bytes=heap_bytes(),
        device_bytes=torch.cuda.memory_reserved() if torch.cuda.is_available() else None,
        threads=_entries("task"),
        python_threads=threading.active_count(),
        files=None if files is None else files - FILES_PER_CHILD * (processes or 0),
        children=processes,
        strays=None if processes is None else processes - sum(map(_num_workers, engines)),
        **_engine_totals(stats),
        objects=objects,
        tensors=tensors,
        matchers=sum(count for name, count in types.items() if name.endswith("Matcher")),
        types=TypeCounts(types) if settled else {},
    )


def share_one_heap() -> None:
    """Make all threads allocate from one heap of the C library, if called before they start.

    By default every thread gets one of eight heaps per core, and memory that is free in one is not used by the others: under this load
    resident memory rises for ten minutes or more at the same allocated bytes. A leak is also visible in one heap.
    """
    with contextlib.suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def release_memory() -> None:
    re.purge()  # the cache of patterns grows over the first few hundred requests
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resident_bytes() -> int | None:
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", (PROCESS / "status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLOC_FIELDS)


def heap_bytes() -> int | None:
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # glibc before 2.33, or another C library
        return None
    read.restype = _MallocInfo
    found = read()
    return int(found.uordblks + found.hblkhd)


def children() -> int | None:
    """Child processes, including zombies."""
    found, readable = 0, False
    for path in PROCESS.glob("task/*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found += len(path.read_text().split())
            readable = True
    return found if readable else None


def live_objects() -> tuple[dict[str, int], int, int]:
    """Counts by type for the packages in COUNTED; number of all tracked objects; number of tensors."""
    counts, tensors = collections.Counter[type](), 0
    everything = gc.get_objects()
    for item in everything:
        counts[type(item)] += 1
    for kind, count in counts.items():
        tensors += count if issubclass(kind, torch.Tensor) else 0
    types = collections.Counter[str]()
    for kind, count in counts.items():
        if str(kind.__module__).startswith(COUNTED_PACKAGES):  # for some metaclasses it is a descriptor
            types[sys.intern(f"{kind.__module__}.{kind.__qualname__}")] += count
    return dict(types), len(everything), tensors


def _entries(folder: str) -> int | None:
    try:
        return len(os.listdir(PROCESS / folder))
    except OSError:
        return None


def _num_workers(engine: Engine) -> int:
    compiler = engine._parts.compiler
    return 0 if compiler is None else sum(worker is not None and worker.pid is not None for worker in compiler._workers)


def _engine_totals(stats: list[EngineStats]) -> dict[str, int]:
    return {
        "engines": len(stats),
        "rows": sum(each.running for each in stats),
        "waiting": sum(each.waiting for each in stats),
        "pages": sum(each.pages - each.free_pages for each in stats),
        "cached_pages": sum(each.cached_pages for each in stats),
        "grammars": sum(each.grammars.grammars for each in stats),
        "grammar_bytes": sum(each.grammars.nbytes for each in stats),
        "compiles": sum(each.grammars.running + each.grammars.waiting for each in stats),
    }
