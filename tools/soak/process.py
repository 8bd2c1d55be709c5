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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stepgraph import Engine
from stepgraph.runtime.stats import EngineStats

PROCESS = Path("/proc/self")
OF_A_CHILD = 2  # open files of this process per child
COUNTED = ("stepgraph", "xgrammar", "llguidance", "asyncio", "threading")  # packages whose objects are counted


@dataclass(frozen=True)
class Sample:
    """One moment. `settled`: every engine was idle, and unused memory was released before."""

    seconds: float
    settled: bool
    resident_bytes: int | None  # heaps and stacks, without mapped files
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
    types: dict[str, int] = field(default_factory=dict, repr=False)


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
        device_bytes=torch.cuda.memory_reserved() if torch.cuda.is_available() else None,
        threads=_entries("task"),
        python_threads=threading.active_count(),
        files=None if files is None else files - OF_A_CHILD * (processes or 0),
        children=processes,
        strays=None if processes is None else processes - sum(map(_workers, engines)),
        **_held(stats),
        objects=objects,
        tensors=tensors,
        matchers=sum(count for name, count in types.items() if name.endswith("Matcher")),
        types=types,
    )


def release_memory() -> None:
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
    known, tensors = collections.Counter[type](), 0
    everything = gc.get_objects()
    for item in everything:
        known[type(item)] += 1
    for kind, count in known.items():
        tensors += count if issubclass(kind, torch.Tensor) else 0
    types = collections.Counter[str]()
    for kind, count in known.items():
        if str(kind.__module__).startswith(COUNTED):  # for some metaclasses it is a descriptor
            types[sys.intern(f"{kind.__module__}.{kind.__qualname__}")] += count
    return dict(types), len(everything), tensors


def _entries(folder: str) -> int | None:
    try:
        return len(os.listdir(PROCESS / folder))
    except OSError:
        return None


def _workers(engine: Engine) -> int:
    compiler = engine._parts.compiler
    return 0 if compiler is None else sum(worker is not None and worker.pid is not None for worker in compiler._workers)


def _held(stats: list[EngineStats]) -> dict[str, int]:
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
