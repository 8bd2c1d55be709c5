"""The JSON-Schema-Test-Suite (required tests) run against the grammars, and the class of each case.

A value counts as accepted where one of its written forms is: object keys in any order, characters plain or escaped, numbers with or
without an exponent. So a valid value is not rejected for its layout, and an invalid one is tried in all forms.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, Vocabulary
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.schema.options import ObjectsMode

DATA = Path(__file__).parent.parent / "data"
SUITE = DATA / "json_schema_test_suite.jsonl"
OLDER_DRAFTS = DATA / "json_schema_test_suite_older_drafts.jsonl"  # 4 to 2019-09, without references to other documents
TABLE = DATA / "json_schema_test_suite_classes.json"

PASS, FALSE_ACCEPT, FALSE_REJECT = ".AR"  # of one case; a rejected schema has its reason instead of one letter per case
REFUSED = "refused: "
CLASSES = {"pass": PASS, "refused": "refused", "false accept": FALSE_ACCEPT, "false reject": FALSE_REJECT}
MAX_WRITINGS = 400
OTHER_DOCUMENTS = re.compile(
    r'"\$ref": "([^"]*/)?(tree|extendible-dynamic-ref|detached-dynamicref)\.json|"\$ref": "https?://json-schema\.org/'
)

BACKENDS: tuple[BackendChoice, ...] = ("xgrammar", "llguidance", "auto")
BYTES = Vocabulary([*(bytes([code]) for code in range(256)), b"<eos>"], stop_token_ids=[256])


@dataclass(frozen=True)
class Group:
    """One schema and the values to try."""

    file: str
    description: str
    schema: Any
    cases: tuple[tuple[Any, bool], ...]  # value, valid

    @property
    def is_one_document(self) -> bool:
        return self.file != "refRemote" and not OTHER_DOCUMENTS.search(json.dumps(self.schema))


def groups(draft: str = "") -> list[Group]:
    """The groups of draft 2020-12, or of an older one."""
    found = []
    for line in (OLDER_DRAFTS if draft else SUITE).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry.get("draft", "") != draft:
            continue
        cases = tuple((test["data"], test["valid"]) for test in entry["tests"])
        found.append(Group(entry["file"], entry["description"], entry["schema"], cases))
    return found


def written_forms(value: Any) -> Iterator[str]:
    """The written forms of a JSON value in the default layout, the plainest first, and without blanks, as for constants."""
    yield from dict.fromkeys(
        text for comma, colon in ((", ", ": "), (",", ":")) for text in islice(_laid_out(value, comma, colon), MAX_WRITINGS)
    )


def _laid_out(value: Any, comma: str, colon: str) -> Iterator[str]:
    if isinstance(value, str):
        yield from dict.fromkeys(json.dumps(value, ensure_ascii=ascii_only) for ascii_only in (False, True))
    elif isinstance(value, float):
        yield from dict.fromkeys(
            [json.dumps(value), format(Decimal(repr(value)), "f"), str(int(value)) if value.is_integer() else json.dumps(value)]
        )
    elif isinstance(value, list):
        for parts in product(*(list(islice(_laid_out(item, comma, colon), MAX_WRITINGS)) for item in value)):
            yield f"[{comma.join(parts)}]"
    elif isinstance(value, dict):
        for names in permutations(value):
            pairs = [product(_laid_out(name, comma, colon), islice(_laid_out(value[name], comma, colon), MAX_WRITINGS)) for name in names]
            for members in product(*pairs):
                yield f"{{{comma.join(f'{name}{colon}{item}' for name, item in members)}}}"
    else:
        yield json.dumps(value)


def takes(compiled: CompiledConstraint, text: str | bytes) -> bool:
    matcher, data = compiled.matcher(), text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return all(matcher.accept_token(byte) for byte in data) and matcher.accept_token(256)


def classify(group: Group, compiler: GrammarCompiler, objects: ObjectsMode = "closed") -> str:
    """One letter per case, or the reason why the schema is rejected."""
    try:
        compiled = compiler.compile(Constraint.json_schema(group.schema, objects=objects))
    except ValueError as error:
        return REFUSED + str(error).removeprefix("constraint json_schema: cannot be compiled: ")
    letters = ""
    for value, valid in group.cases:
        taken = any(takes(compiled, text) for text in written_forms(value))
        letters += PASS if taken == valid else FALSE_ACCEPT if taken else FALSE_REJECT
    return letters


def totals(classes: dict[str, str]) -> dict[str, int]:
    """The number of cases of each class; `classes` is by the key of each group."""
    counted = Counter[str]()
    for group in groups():
        outcome = classes[key(group)]
        counted.update(["refused"] * len(group.cases) if outcome.startswith(REFUSED) else outcome)
    return {name: counted[key] for name, key in CLASSES.items()}


def count_classes(found: Iterable[tuple[Group, str]]) -> dict[str, int]:
    """The number of cases of each class. The error that no value satisfies a schema passes if no case is valid."""
    counted = Counter[str]()
    for group, outcome in found:
        is_pass = "no value satisfies" in outcome and not any(valid for _, valid in group.cases)
        counted.update(PASS * len(group.cases) if is_pass else ["refused"] * len(group.cases) if outcome.startswith(REFUSED) else outcome)
    return {name: counted[key] for name, key in CLASSES.items()}


def key(group: Group) -> str:
    return f"{group.file}: {group.description}"


def outcomes() -> dict[str, dict[str, str]]:
    """The current outcome of each group under each backend. "auto" has the reasons of both, which are not repeated."""
    compilers = {name: GrammarCompiler(BYTES, max_threads=1, backend=name) for name in BACKENDS}
    found = {key(group): {str(name): classify(group, compiler) for name, compiler in compilers.items()} for group in groups()}
    return {where: {**row, "auto": REFUSED if row["auto"].startswith(REFUSED) else row["auto"]} for where, row in found.items()}


def stored_outcomes() -> dict[str, dict[str, str]]:
    """The outcomes in the table."""
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))["groups"]
    return table


def to_json(found: dict[str, dict[str, str]]) -> str:
    """The table as text, beginning with the totals."""
    table = {"totals": {name: totals({where: row[name] for where, row in found.items()}) for name in BACKENDS}, "groups": found}
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def differences(table: dict[str, dict[str, str]], found: dict[str, dict[str, str]]) -> list[str]:
    """One line per outcome that differs from the table."""
    lines = []
    for where in sorted(table.keys() | found.keys()):
        before, now = table.get(where, {}), found.get(where, {})
        lines += [
            f"{where}: {name}: {before.get(name)!r} in the table, now {now.get(name)!r}"
            for name in BACKENDS
            if before.get(name) != now.get(name)
        ]
    return lines
