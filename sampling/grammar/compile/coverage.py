"""Reports which parts of a constraint each grammar library does not enforce, and why.

Found by compiling, under the limits of any compile and in a worker process that ends with the call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stepgraph.sampling.grammar.automaton.library import UnfitError
from stepgraph.sampling.grammar.compile.backends import (
    Backends,
    Builder,
    backends_for,
    builder,
    by_cost,
    check_first_mask,
    check_size,
    is_final,
    reason_of,
)
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.unsupported import Unsupported, UnsupportedError
from stepgraph.sampling.grammar.schema.grammar import narrowed_parts, without
from stepgraph.sampling.grammar.schema.reader import parsed
from stepgraph.sampling.grammar.vocabulary import Vocabulary

MAX_UNSUPPORTED = 100
_BYTES = Vocabulary([*(bytes([code]) for code in range(256)), b""], stop_token_ids=[256])


@dataclass(frozen=True)
class Coverage:
    """What the libraries make of a constraint; `unsupported` is empty for a library that enforces all of it."""

    backend: str | None  # the library that would be used; None where compiling it raises an error
    unsupported: Mapping[str, tuple[Unsupported, ...]]  # by library
    reason: str = ""  # why that is not the first library that enforces all of it
    narrowed: tuple[Unsupported, ...] = ()  # parts of a schema that are enforced, but of which not all texts are generated

    @property
    def enforced(self) -> bool:
        """Whether all of it is; of an approximate constraint parts may not be."""
        return self.backend is not None and not self.unsupported[self.backend]

    @property
    def unenforced(self) -> tuple[Unsupported, ...]:
        if self.enforced:
            return ()
        parts = [{(part.where, part.keyword) for part in found} for found in self.unsupported.values()]
        common = set.intersection(*parts)
        return tuple(part for found in self.unsupported.values() for part in found if (part.where, part.keyword) in common)


def coverage(constraint: Constraint, limits: GrammarLimits | None = None) -> Coverage:
    """What each grammar library makes of a constraint, and which one would enforce it.

    Takes seconds: it starts a worker process, and for each library at most twice `compile_seconds`.
    """
    limits, names = limits or GrammarLimits(), backends_for(constraint, "auto")
    try:
        check_size(constraint, limits)
    except ValueError as error:
        return Coverage(None, dict.fromkeys(names, (Unsupported("#", constraint.kind, str(error)),)))
    worker, unsupported, backend = CompileWorker(_BYTES, limits, max_threads=1), dict[str, tuple[Unsupported, ...]](), None
    later, pending = dict[str, str](), list(names)
    exact = replace(constraint, approximate=False)
    try:
        while pending:
            name = pending.pop(0)
            found, final, unfit = _unsupported(name, exact, limits, worker)
            unsupported[name] = found
            if unfit:
                later, pending = by_cost(pending, constraint.kind, unfit)
            if not found and backend is None:
                backend = name
            if final and backend is None:
                unsupported |= dict.fromkeys(names, found)
                break
        if backend is None and constraint.approximate:
            backend = next((name for name in names if not _unsupported(name, constraint, limits, worker)[0]), None)
    finally:
        worker.close()
    later = {name: why for name, why in later.items() if name != backend and not unsupported[name]}
    is_schema = backend is not None and constraint.kind == "json_schema"  # compiled in the worker, so that this ends too
    narrowed = narrowed_parts(parsed(constraint.payload), constraint.schema_options) if is_schema else ()
    return Coverage(backend, unsupported, "; ".join(f"{name}: {why}" for name, why in later.items()), narrowed)


def check_constraints(constraints: Iterable[Constraint]) -> None:
    """ValueError, as from compiling it, for a constraint that is refused with any vocabulary: it is compiled over the 256 bytes."""
    limits = GrammarLimits()
    worker = CompileWorker(_BYTES, limits, max_threads=1)
    try:
        for constraint in dict.fromkeys(constraints):
            Backends(_BYTES, "auto", limits, max_threads=1).build(constraint, worker)
    finally:
        worker.close()


def _unsupported(
    name: str, constraint: Constraint, limits: GrammarLimits, worker: CompileWorker
) -> tuple[tuple[Unsupported, ...], bool, UnfitError | None]:
    """The unsupported parts found in the time of one compile, by removing each from the schema and compiling the rest again; whether
    they are those of every library; and why the rest does not fit in an automaton."""
    found, kind, end, final = list[Unsupported](), constraint.kind, time.monotonic() + limits.compile_seconds, False
    library: Builder | None = None
    while not found or (len(found) < MAX_UNSUPPORTED and time.monotonic() < end):
        try:
            library = library or builder(name, _BYTES, limits, max_threads=1)
            check_first_mask(library.build(constraint, worker), constraint, _BYTES)
        except Exception as error:  # a library's error is a property of the constraint
            part = error.unsupported if isinstance(error, UnsupportedError) else None
            found.append(part or Unsupported("#", kind, reason_of(error)))
            final = final or ((part is not None or len(found) == 1) and is_final(error, name, kind))
            rest = without(json.loads(constraint.payload), part) if part and kind == "json_schema" else None
            if rest is None:
                return tuple(found), final, error if isinstance(error, UnfitError) else None
            constraint = replace(constraint, payload=json.dumps(rest, separators=(",", ":")))
        else:
            break
    return tuple(found), final, None
