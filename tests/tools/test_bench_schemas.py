"""The benchmark of schemas with instances: classes of outcomes, resumption, and the orders of properties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler
from tools.bench_schemas import BYTES, OrderSearch, PropertyOrders, Tokens, main

ENTRIES: list[dict[str, Any]] = [
    {
        "name": "good\u2028",
        "schema": {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]},
        "tests": [{"valid": True, "data": {"b": 1, "a": 1}}, {"valid": False, "data": {"b": 1}}],
    },
    {"name": "refused", "schema": {"uniqueItems": True}, "tests": []},
    {"name": "whole", "schema": {"type": "integer"}, "tests": [{"valid": True, "data": 1.0}, {"valid": False, "data": 1.5}]},
    {
        "name": "old draft",
        "schema": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"},
        "tests": [{"valid": False, "data": 1.0}],
    },
    {"name": "narrowed", "schema": {"type": "string", "format": "regex"}, "tests": [{"valid": True, "data": "(?<n>a)"}]},
    {"name": "mislabelled", "schema": {"type": "integer"}, "tests": [{"valid": False, "data": 1}]},
]


def test_outcomes_are_counted_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in ENTRIES), encoding="utf-8")
    assert main(["--data", str(data), "--out", str(out), "--backend", "xgrammar", "--vocabulary", "bytes"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["masks"] > 10 and found["mask_us"]["all"]["least of three"]["p50"] > 0
    assert found["counts"] == {"pass": 3, "refused": 1, "valid rejected": 1, "invalid accepted": 1}
    assert list(found["refused"]) == [
        "_: uniqueItems: got true, which is enforced for a list of values, at most one item, or items whose schemas share no value, "
        "without contains; give items an enum,"  # reasons are cut
    ]
    lines = out.read_text()
    out.write_text("".join(lines.splitlines(keepends=True)[:-1]))  # only the last schema is processed again
    assert main(["--data", str(data), "--out", str(out), "--backend", "xgrammar", "--vocabulary", "bytes"]) == 1
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == [entry["name"] for entry in ENTRIES]


def test_instances_are_written_in_declared_orders() -> None:
    orders = PropertyOrders({"properties": {"b": {"properties": {"y": {}, "x": {}}}, "a": {}}})
    assert orders.texts({"a": 1, "z": 0, "b": {"x": 1, "y": 2}})[0] == '{"b": {"y": 2, "x": 1}, "a": 1, "z": 0}'


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        ({"c": 1, "b": {"e": 1, "d": True}, "a": 2}, True),
        ({"c": 1, "b": {"e": 1, "d": 0}, "a": 2}, False),
        ({"c": 1, "a": 2, "x": [{"c": 1}]}, True),
        ({"b": {"d": True}, "x": 1, "a": "no integer"}, False),
    ],
)
def test_instance_is_accepted_if_one_order_of_its_properties_is(value: Any, accepted: bool) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"properties": {"d": {"type": "boolean"}, "e": {}}}, "c": {}}}
    grammar = GrammarCompiler(BYTES, max_threads=1, isolation="none").compile(Constraint.json_schema(schema, objects="standard"))
    assert OrderSearch(grammar, Tokens(BYTES)).is_accepted(value) is accepted
