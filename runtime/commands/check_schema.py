"""`stepgraph check-schema`: which parts of a JSON schema are refused or narrowed, and what to write instead."""

from __future__ import annotations

import argparse
import json
from typing import Any

from stepgraph.runtime.commands import terminal
from stepgraph.sampling.grammar import Constraint, coverage
from stepgraph.sampling.grammar.constraints.unsupported import Unsupported
from stepgraph.sampling.grammar.schema.reader import clip_json, value_of

COLUMNS = ("place", "keyword", "value", "result", "reason", "suggestion")
MAX_VALUE = 40  # characters of a value in the table


def run(options: argparse.Namespace) -> int:
    document = _checked(options.schema, options.objects)
    terminal.print_document(document, options.json, _table)
    return 0 if document["enforced"] else terminal.FAILED


def _checked(schema: dict[str, Any], objects: Any) -> dict[str, Any]:
    constraint = Constraint.json_schema(schema, objects=objects)
    with terminal.waiting("compiling ..."):
        report = coverage(constraint)
    parts = report.narrowed if report.enforced else report.unenforced or next(iter(report.unsupported.values()))
    result = "narrowed" if report.enforced else "refused"
    rows = [_row(part, schema, result) for part in sorted(set(parts), key=lambda part: (part.where, part.keyword))]
    return {"enforced": report.enforced, "backend": report.backend, "reason": report.reason, "objects": objects, "parts": rows}


def _row(part: Unsupported, schema: dict[str, Any] | bool, result: str) -> dict[str, Any]:
    """A row of the table. The value has its own column, so the reason does not repeat it."""
    reason, suggestion = part.split
    suggestion = suggestion or ("nothing to do" if result == "narrowed" else "remove it, and check it in the finished text")
    is_whole = part.where == "#" and (isinstance(schema, bool) or part.keyword not in schema)  # the part is the whole document
    value = None if is_whole else value_of(schema, part)
    reason = reason.removeprefix(f"got {clip_json(value)}").removeprefix(", which ").removeprefix(": ") or "is not accepted"
    return dict(zip(COLUMNS, (part.where, part.keyword, value, result, reason, suggestion), strict=True))


def _table(document: dict[str, Any]) -> list[str]:
    rows = [[_cell(row[name], name) for name in COLUMNS] for row in document["parts"]]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in (COLUMNS, *rows)]
    if not document["enforced"]:
        return [*lines, f"not enforced: {len(rows)} {'part is' if len(rows) == 1 else 'parts are'} refused"]
    summary = f"enforced by {document['backend']}" + (f" ({document['reason']})" if document["reason"] else "")
    return [*lines, f"{summary}; fewer texts are generated than the schema accepts"] if rows else [f"{summary}: every keyword"]


def _cell(value: Any, name: str) -> str:
    text = value if name != "value" else "" if value is None else json.dumps(value, ensure_ascii=False)
    text = " ".join(str(text).split())
    return f"{text[: MAX_VALUE - 3]}..." if name == "value" and len(text) > MAX_VALUE else text
