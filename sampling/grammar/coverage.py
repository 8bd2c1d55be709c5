"""What is enforced of a constraint, and by whom: every keyword that a library refuses, with its place and the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepgraph.sampling.grammar.backends import BACKENDS, builder
from stepgraph.sampling.grammar.constraint import Constraint
from stepgraph.sampling.grammar.limits import GrammarLimits
from stepgraph.sampling.grammar.refusal import Refusal, RefusedError
from stepgraph.sampling.grammar.vocabulary import Vocabulary

MAX_REFUSALS = 100
_BYTES = Vocabulary([*(bytes([code]) for code in range(256)), b""], stop_token_ids=[256])


@dataclass(frozen=True)
class Coverage:
    """`refusals` by library: empty where it enforces the constraint as it stands."""

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


def coverage(constraint: Constraint) -> Coverage:
    names = BACKENDS if constraint.backend == "auto" else (constraint.backend,)
    refusals = {name: _refusals(name, constraint) for name in names}
    return Coverage(next((name for name in names if not refusals[name]), None), refusals)


def _refusals(name: str, constraint: Constraint) -> tuple[Refusal, ...]:
    """All of them: what is refused is taken out, and the rest is tried again."""
    found = list[Refusal]()
    try:
        library = builder(name, _BYTES, GrammarLimits(step_seconds=5.0), max_threads=1)
    except ValueError as error:
        return (Refusal("#", constraint.kind, str(error)),)
    while len(found) < MAX_REFUSALS:
        try:
            library.build(constraint, worker=None)
        except RefusedError as error:
            found.append(error.refusal)
            pruned = _without(constraint.payload, error.refusal) if constraint.kind == "json_schema" else None
            if pruned is None:
                break
            constraint = replace(constraint, payload=pruned)
        except ValueError as error:
            found.append(Refusal("#", constraint.kind, str(error)))
            break
        else:
            break
    return tuple(found)


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
