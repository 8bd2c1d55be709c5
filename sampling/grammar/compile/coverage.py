"""What is enforced of a constraint, and by whom: every keyword that a library refuses, with its place and the reason.

Found out by compiling, under the limits of any compile and in a worker process of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepgraph.sampling.grammar.compile.backends import Builder, asked, builder, reason_of, try_out
from stepgraph.sampling.grammar.compile.limits import GrammarLimits, check_size
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker, WorkerError
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.unsupported import Refusal, RefusedError
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.shortest_text import EndlessError

MAX_REFUSALS = 100
_BYTES = Vocabulary([*(bytes([code]) for code in range(256)), b""], stop_token_ids=[256])


@dataclass(frozen=True)
class Coverage:
    """`refusals` by library that was asked: empty where it enforces the constraint as it stands."""

    backend: str | None  # the one that would enforce it; None where none does, and compiling it is refused
    refusals: Mapping[str, tuple[Refusal, ...]]

    @property
    def enforced(self) -> bool:
        return self.backend is not None

    @property
    def unenforced(self) -> tuple[Refusal, ...]:
        """What neither library enforces."""
        if self.enforced:
            return ()
        places = [{(refusal.where, refusal.keyword) for refusal in told} for told in self.refusals.values()]
        return tuple(
            refusal for told in self.refusals.values() for refusal in told if (refusal.where, refusal.keyword) in set.intersection(*places)
        )


def coverage(constraint: Constraint, limits: GrammarLimits | None = None) -> Coverage:
    limits, names = limits or GrammarLimits(), asked(constraint, "auto")
    try:
        check_size(constraint, limits)
    except ValueError as error:
        return Coverage(None, dict.fromkeys(names, (Refusal("#", constraint.kind, str(error)),)))
    worker, refusals, backend = CompileWorker(_BYTES, limits, max_threads=1), dict[str, tuple[Refusal, ...]](), None
    try:
        for name in names:
            told, too_much = _refusals(name, constraint, limits, worker)
            refusals[name] = told
            if not told and backend is None:
                backend = name
            if too_much and backend is None:
                break  # a limit is not what another library is there for, nor is it asked when the constraint is compiled
    finally:
        worker.close()
    return Coverage(backend, refusals)


def _refusals(name: str, constraint: Constraint, limits: GrammarLimits, worker: CompileWorker) -> tuple[tuple[Refusal, ...], bool]:
    """All of them, as far as they are found in the time of one compile: what is refused is taken out, and the rest is tried again. And
    whether the constraint as it stands came to a limit."""
    found, kind, end = list[Refusal](), constraint.kind, time.monotonic() + limits.compile_seconds
    library: Builder | None = None
    while not found or (len(found) < MAX_REFUSALS and time.monotonic() < end):
        try:
            library = library or builder(name, _BYTES, limits, max_threads=1)
            try_out(library.build(constraint, worker), constraint, _BYTES)
        except RefusedError as error:
            found.append(error.refusal)
            pruned = _without(constraint.payload, error.refusal) if kind == "json_schema" else None
            if pruned is None:
                break
            constraint = replace(constraint, payload=pruned)
        except (WorkerError, EndlessError) as error:
            found.append(Refusal("#", kind, str(error)))
            return tuple(found), len(found) == 1
        except Exception as error:  # what a constraint brings about in a library is its fault
            found.append(Refusal("#", kind, reason_of(error)))
            break
        else:
            break
    return tuple(found), False


def _without(payload: str, refusal: Refusal) -> str | None:
    """The schema without the keyword that was refused; None where it is not one that can be taken out."""
    schema = json.loads(payload)
    node: Any = schema
    for part in refusal.where.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        node = node[int(name)] if isinstance(node, list) else node[name]
    if not isinstance(node, dict) or refusal.keyword not in node:
        return None
    del node[refusal.keyword]
    return json.dumps(schema, separators=(",", ":"))
