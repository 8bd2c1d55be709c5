"""What a soak measures of its own process: memory, threads, files, children, live objects by type. None where a system does not tell."""

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
OF_A_CHILD = 2  # files that this process has open for it
COUNTED = ("stepgraph", "xgrammar", "llguidance", "asyncio", "threading")  # whose objects are counted


@dataclass(frozen=True)
class Sample:
    """At one moment. `settled`: every engine was idle, and what could be given back was."""

    seconds: float
    settled: bool
    resident_bytes: int | None  # of heaps and stacks; not of mapped files, which come and go
    device_bytes: int | None  # that torch has from the device
    threads: int | None  # the system's, also those that Python does not know
    python_threads: int
    files: int | None  # open; but for the socket and the file of every child
    children: int | None  # processes: compile workers
    strays: int | None  # children that no engine has
    engines: int
    rows: int
    waiting: int
    pages: int  # that somebody holds
    cached_pages: int  # kept for their prefix
    grammars: int  # compiled, in the engines' caches
    grammar_bytes: int
    compiles: int  # under way or waiting
    objects: int = 0  # that the collector knows, if settled
    tensors: int = 0
    matchers: int = 0  # the last rounds of an engine keep theirs
    types: dict[str, int] = field(default_factory=dict, repr=False)


def sample(seconds: float, engines: Iterable[Engine], settled: bool) -> Sample:
    """Of this process and these engines. `settled` collects garbage first and counts what is left: for the thread that drives, between
    two acts."""
    if settled:
        give_back()
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


def give_back() -> None:
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
    """Processes that this one started and that are not gone, zombies too."""
    found, told = 0, False
    for path in PROCESS.glob("task/*/children"):
        with contextlib.suppress(OSError):  # of a thread that ended meanwhile
            found += len(path.read_text().split())
            told = True
    return found if told else None


def live_objects() -> tuple[dict[str, int], int, int]:
    """By type, of this library and of those beneath it; all that the collector knows; tensors."""
    known, tensors = collections.Counter[type](), 0
    everything = gc.get_objects()
    for item in everything:
        known[type(item)] += 1
    for kind, count in known.items():
        tensors += count if issubclass(kind, torch.Tensor) else 0
    types = collections.Counter[str]()
    for kind, count in known.items():
        if str(kind.__module__).startswith(COUNTED):  # of some metaclasses it is a descriptor
            types[sys.intern(f"{kind.__module__}.{kind.__qualname__}")] += count
    return dict(types), len(everything), tensors


def _entries(folder: str) -> int | None:
    try:
        return len(os.listdir(PROCESS / folder))
    except OSError:
        return None


def _workers(engine: Engine) -> int:
    compiler = engine._grammar_queue._compiler
    return 0 if compiler is None else sum(worker.pid is not None for worker in tuple(compiler._workers))


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
