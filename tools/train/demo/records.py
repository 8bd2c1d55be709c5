"""Composed records: any number of schemas of many shapes, with prompts that ask for them.

A record draws some fields of a topic in any order and spelling, and may group them in an object or repeat it in an array, so
that hardly any two prompts share a schema. None is used for measuring.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.train.demo import texts, words
from tools.train.demo.schemas import DATE, NUMBER, TIME, Schema, text, whole
from tools.train.demo.words import Words

# Per line a topic, and the fields that its records draw from as `name:kind`; kinds are those of `_of`.
TOPICS = dict(line.split(": ", 1) for line in Path(__file__).with_name("topics.txt").read_text(encoding="utf-8").splitlines())
MOST_FIELDS = 7
GROUPS = ("details", "info", "contact", "data", "properties", "meta")


@dataclass(frozen=True)
class Field:
    """A value of one field: its schema, and how a text may write it."""

    name: str
    schema: Schema
    value: Any


def record_request(drawn: Words) -> tuple[str, Schema]:
    """The text of a prompt, and the schema of its answer."""
    topic = drawn.any(list(TOPICS))
    fields = fields_of(topic, drawn)
    schema = closed(fields, drawn)
    if drawn.number(1, 8) == 1:  # several records
        others = [[Field(each.name, *_drawn(each.name, topic, drawn)) for each in fields] for _ in range(drawn.number(1, 2))]
        written = "\n".join(_written(topic, each, drawn) for each in (fields, *others))
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}
        if drawn.number(1, 2) == 1:
            name = drawn.any(["records", "results", "items", "entries"])
            schema = {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
    else:
        written = _written(topic, fields, drawn)
    names = [each.name for each in fields]
    listed = ", ".join(names[:-1]) + " and " + names[-1]
    if drawn.number(1, 5) == 1:
        return _invention(topic, listed, schema, drawn), schema
    lead = drawn.any(
        [
            f"Convert this {topic} to JSON.",
            f"Here is a {topic}. Return a JSON object with {listed}.",
            f"Fill the fields {listed} from the text below.",
            f"What are {listed} of this {topic}? Answer in JSON.",
            f"Parse the following and answer with JSON only ({listed}).",
            f"Store this {topic} as JSON: {listed}.",
            "Write the following as structured data.",
            f"Summarise the {topic} as a JSON record.",
            f"JSON with keys {listed}, please.",
            f"Answer with JSON that matches this schema:\n{json.dumps(schema)}",
        ]
    )
    return (f"{lead}\n\n{written}" if drawn.number(1, 4) > 1 else f"{written}\n\n{lead}"), schema


def fields_of(topic: str, drawn: Words) -> list[Field]:
    names = [each.split(":")[0] for each in _split(TOPICS[topic], " ")]
    chosen = drawn.generator.sample(names, min(len(names), drawn.number(3, MOST_FIELDS)))
    return [Field(name, *_drawn(name, topic, drawn)) for name in chosen]


def closed(fields: Sequence[Field], drawn: Words) -> Schema:
    """An object of these fields, perhaps with some of them in an inner object, or with optional ones."""
    spellings: list[Callable[[str], str]] = [str, str, camel, title]
    spelled = drawn.any(spellings)
    properties = {spelled(each.name): each.schema for each in fields}
    optional = drawn.number(1, 8) == 1
    if len(fields) > 4 and drawn.number(1, 4) == 1:
        names = list(properties)
        inner, outer = names[-3:], names[:-3]
        group = {
            "type": "object",
            "properties": {name: properties[name] for name in inner},
            "required": inner,
            "additionalProperties": False,
        }
        properties = {name: properties[name] for name in outer} | {spelled(drawn.any(GROUPS)): group}
    required = list(properties)[: len(properties) - optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def title(name: str) -> str:
    return name.replace("_", " ").title()


def _invention(topic: str, listed: str, schema: Schema, drawn: Words) -> str:
    return drawn.any(
        [
            f"Invent a {topic} and write it as JSON with {listed}.",
            f"Give me an example of a {topic} in JSON.",
            f"Make up a realistic {topic} set in {drawn.of(words.CITIES)}. Fields: {listed}.",
            f"Generate test data: one {topic} ({listed}).",
            f"Write a sample {topic} for this schema: {json.dumps(schema)}",
        ]
    )


def _written(topic: str, fields: Sequence[Field], drawn: Words) -> str:
    """The values as lines, a table, sentences or a note."""
    pairs = [(each.name.replace("_", " "), _said(each.value)) for each in fields]
    style = drawn.number(1, 5)
    if style == 1:
        return "\n".join(f"{name.capitalize()}: {value}" for name, value in pairs)
    if style == 2:
        return " | ".join(name for name, _ in pairs) + "\n" + " | ".join(value for _, value in pairs)
    if style == 3:
        return f"New {topic}: " + ", ".join(f"{name} {value}" for name, value in pairs) + "."
    if style == 4:
        return f"The {topic}. " + " ".join(f"The {name} is {value}." for name, value in pairs)
    drawn.generator.shuffle(pairs)
    first, *rest = pairs
    return f"This {topic} has the {first[0]} {first[1]}; " + "; ".join(f"{name} = {value}" for name, value in rest)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " and ".join(map(_said, value))
    return str(value)


def _drawn(name: str, topic: str, drawn: Words) -> tuple[Schema, Any]:
    kinds = dict(each.split(":", 1) for each in _split(TOPICS[topic], " "))
    return _of(kinds[name], drawn)


def _of(kind: str, drawn: Words) -> tuple[Schema, Any]:
    """The schema of a kind, and a value."""
    head, _, inside = kind.partition("(")
    parts = _split(inside[:-1], ",") if inside else []
    if "|" in kind:
        choices = kind.split("|")
        return {"enum": choices}, drawn.any(choices)
    if head == "list":
        pairs = [_of(inside[:-1], drawn) for _ in range(drawn.number(1, 3))]
        return {"type": "array", "items": pairs[0][0], "maxItems": 4}, [value for _, value in pairs]
    if head == "items":
        rows = [{name: _of(inner, drawn) for name, inner in (part.split(":") for part in parts)} for _ in range(drawn.number(1, 2))]
        properties = {name: schema for name, (schema, _) in rows[0].items()}
        inner = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}, [{name: row[name][1] for name in row} for row in rows]
    if head == "whole":
        least, most = map(int, parts)
        return drawn.any([whole(least, most), {"type": "integer"}]), drawn.number(least, most)
    if head == "number":
        least, most = map(int, parts)
        return NUMBER, round(drawn.generator.uniform(least, most), 1)
    if head == "digits":
        count = int(parts[0])
        pattern = {"type": "string", "pattern": f"^[0-9]{{{count}}}$"}
        return drawn.any([pattern, text(count)]), "".join(str(drawn.number(0, 9)) for _ in range(count))
    if head == "code":
        letters, digits = parts[0].count("A"), parts[0].count("9")
        value = (
            "".join(drawn.any("ABCDEFGHKLMNPRSTUVWX") for _ in range(letters)) + "-" + str(drawn.number(10 ** (digits - 1), 10**digits - 1))
        )
        pattern = {"type": "string", "pattern": f"^[A-Z]{{{letters}}}-[0-9]{{{digits}}}$"}
        return drawn.any([pattern, text(12)]), value
    schema, value_of = _PLAIN[head]
    return schema, value_of(drawn)


def _split(written: str, separator: str) -> list[str]:
    """Split at separators that are not within parentheses, nor between the words of a choice."""
    parts = re.split(separator + r"(?![^(]*\))", written)
    joined: list[str] = []
    for part in parts:
        if joined and ":" not in part and separator == " ":
            joined[-1] += " " + part  # a choice of two words
        else:
            joined.append(part)
    return joined


def _sentence(drawn: Words) -> str:
    return drawn.any(
        [
            f"the {drawn.of(words.PRODUCTS)} must be checked before {drawn.any(words.DAYS)}",
            f"{drawn.of(words.FIRST)} asked about {drawn.of(words.TOPICS)}",
            f"everything about {drawn.of(words.TOPICS)} was fine",
            f"please call {texts.a_name(drawn)} in {drawn.of(words.CITIES)}",
            f"no {drawn.of(words.PRODUCTS)} was found at {drawn.of(words.STREETS)}",
            f"a {drawn.of(words.JOBS)} from {drawn.of(words.COMPANIES)} will help",
        ]
    )


def _title(drawn: Words) -> str:
    return drawn.any(
        [drawn.of(words.SONGS), f"{drawn.any(_ADJECTIVES)} {drawn.of(words.PRODUCTS)}".title(), drawn.of(words.TOPICS).title()]
    )


_ADJECTIVES = "old quiet golden small northern broken green distant silent early heavy bright winter secret wooden second".split()
_COLOURS = "red blue green black white silver yellow brown grey orange purple beige".split()
_COUNTRIES = "Norway|Brazil|Kenya|Japan|Portugal|Canada|Egypt|Poland|Vietnam|Chile|Ireland|Turkey|Peru|Ghana|Austria|New Zealand".split("|")
_TOPS = ("example", "org", "net", "io")
_PLAIN: dict[str, tuple[Schema, Callable[[Words], Any]]] = {
    "flag": ({"type": "boolean"}, lambda drawn: drawn.any([True, False])),
    "person": (text(), texts.a_name),
    "first": (text(), lambda drawn: drawn.of(words.FIRST)),
    "last": (text(), lambda drawn: drawn.of(words.LAST)),
    "city": (text(), lambda drawn: drawn.of(words.CITIES)),
    "street": (text(60), lambda drawn: f"{drawn.number(1, 180)} {drawn.of(words.STREETS)}"),
    "country": (text(), lambda drawn: drawn.any(_COUNTRIES)),
    "company": (text(), lambda drawn: drawn.of(words.COMPANIES)),
    "product": (text(), lambda drawn: drawn.of(words.PRODUCTS)),
    "colour": (text(20), lambda drawn: drawn.any(_COLOURS)),
    "language": (text(), lambda drawn: drawn.any(words.LANGUAGES)),
    "currency": ({"type": "string", "pattern": "^[A-Z]{3}$"}, lambda drawn: drawn.any(words.CURRENCIES)),
    "day": ({"enum": words.DAYS}, lambda drawn: drawn.any(words.DAYS)),
    "month": (text(), lambda drawn: drawn.any(words.MONTHS)),
    "date": (DATE, texts.a_date),
    "time": (TIME, texts.a_time),
    "datetime": ({"type": "string", "format": "date-time"}, lambda drawn: f"{texts.a_date(drawn)} {texts.a_time(drawn)}"),
    "price": (NUMBER, lambda drawn: float(drawn.price())),
    "mail": ({"type": "string", "format": "email"}, lambda drawn: texts.a_mail(drawn, texts.a_name(drawn))),
    "phone": (text(20), lambda drawn: f"+{drawn.number(1, 99)} {drawn.number(100, 999)} {drawn.number(10_000, 99_999)}"),
    "url": (text(60), lambda drawn: f"https://{drawn.of(words.COMPANIES).lower().replace(' ', '')}.{drawn.any(_TOPS)}"),
    "host": (text(), lambda drawn: f"{drawn.any(_COLOURS)}-{drawn.number(1, 40)}.{drawn.any(_TOPS)}"),
    "ip": ({"type": "string", "format": "ipv4"}, lambda drawn: ".".join(str(drawn.number(1, 254)) for _ in range(4))),
    "version": (text(12), lambda drawn: f"{drawn.number(0, 9)}.{drawn.number(0, 20)}.{drawn.number(0, 9)}"),
    "title": (text(), _title),
    "sentence": (text(100), _sentence),
    "words": (
        {"type": "array", "items": text(), "maxItems": 4},
        lambda drawn: [drawn.of(words.PRODUCTS) for _ in range(drawn.number(1, 3))],
    ),
}
