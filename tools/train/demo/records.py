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
from tools.train.demo.words import WordSampler

# Per line a topic, and the fields that its records draw from as `name:kind`; kinds are those of `_kind_value`.
TOPICS = dict(line.split(": ", 1) for line in Path(__file__).with_name("topics.txt").read_text(encoding="utf-8").splitlines())
MAX_FIELDS = 7
GROUPS = ("details", "info", "contact", "data", "properties", "meta")


@dataclass(frozen=True)
class Field:
    """A value of one field: its schema, and how a text may write it."""

    name: str
    schema: Schema
    value: Any


def record_request(rng: WordSampler) -> tuple[str, Schema]:
    """The text of a prompt, and the schema of its answer."""
    topic = rng.any(list(TOPICS))
    fields = fields_of(topic, rng)
    schema = object_schema(fields, rng)
    if rng.randint(1, 8) == 1:  # several records
        others = [[Field(each.name, *_field_value(each.name, topic, rng)) for each in fields] for _ in range(rng.randint(1, 2))]
        record_text = "\n".join(_render_fields(topic, each, rng) for each in (fields, *others))
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}
        if rng.randint(1, 2) == 1:
            name = rng.any(["records", "results", "items", "entries"])
            schema = {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
    else:
        record_text = _render_fields(topic, fields, rng)
    names = [each.name for each in fields]
    field_list = ", ".join(names[:-1]) + " and " + names[-1]
    if rng.randint(1, 5) == 1:
        return _invented_record(topic, field_list, schema, rng), schema
    instruction = rng.any(
        [
            f"Convert this {topic} to JSON.",
            f"Here is a {topic}. Return a JSON object with {field_list}.",
            f"Fill the fields {field_list} from the text below.",
            f"What are {field_list} of this {topic}? Answer in JSON.",
            f"Parse the following and answer with JSON only ({field_list}).",
            f"Store this {topic} as JSON: {field_list}.",
            "Write the following as structured data.",
            f"Summarise the {topic} as a JSON record.",
            f"JSON with keys {field_list}, please.",
            f"Answer with JSON that matches this schema:\n{json.dumps(schema)}",
        ]
    )
    return (f"{instruction}\n\n{record_text}" if rng.randint(1, 4) > 1 else f"{record_text}\n\n{instruction}"), schema


def fields_of(topic: str, rng: WordSampler) -> list[Field]:
    names = [each.split(":")[0] for each in _split(TOPICS[topic], " ")]
    chosen = rng.generator.sample(names, min(len(names), rng.randint(3, MAX_FIELDS)))
    return [Field(name, *_field_value(name, topic, rng)) for name in chosen]


def object_schema(fields: Sequence[Field], rng: WordSampler) -> Schema:
    """An object of these fields, perhaps with some of them in an inner object, or with optional ones."""
    spellings: list[Callable[[str], str]] = [str, str, camel, title]
    respell = rng.any(spellings)
    properties = {respell(each.name): each.schema for each in fields}
    optional = rng.randint(1, 8) == 1
    if len(fields) > 4 and rng.randint(1, 4) == 1:
        names = list(properties)
        inner, outer = names[-3:], names[:-3]
        group = {
            "type": "object",
            "properties": {name: properties[name] for name in inner},
            "required": inner,
            "additionalProperties": False,
        }
        properties = {name: properties[name] for name in outer} | {respell(rng.any(GROUPS)): group}
    required = list(properties)[: len(properties) - optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def title(name: str) -> str:
    return name.replace("_", " ").title()


def _invented_record(topic: str, field_list: str, schema: Schema, rng: WordSampler) -> str:
    return rng.any(
        [
            f"Invent a {topic} and write it as JSON with {field_list}.",
            f"Give me an example of a {topic} in JSON.",
            f"Make up a realistic {topic} set in {rng.pick(words.CITIES)}. Fields: {field_list}.",
            f"Generate test data: one {topic} ({field_list}).",
            f"Write a sample {topic} for this schema: {json.dumps(schema)}",
        ]
    )


def _render_fields(topic: str, fields: Sequence[Field], rng: WordSampler) -> str:
    """The values as lines, a table, sentences or a note."""
    pairs = [(each.name.replace("_", " "), _render_value(each.value)) for each in fields]
    style = rng.randint(1, 5)
    if style == 1:
        return "\n".join(f"{name.capitalize()}: {value}" for name, value in pairs)
    if style == 2:
        return " | ".join(name for name, _ in pairs) + "\n" + " | ".join(value for _, value in pairs)
    if style == 3:
        return f"New {topic}: " + ", ".join(f"{name} {value}" for name, value in pairs) + "."
    if style == 4:
        return f"The {topic}. " + " ".join(f"The {name} is {value}." for name, value in pairs)
    rng.generator.shuffle(pairs)
    first, *rest = pairs
    return f"This {topic} has the {first[0]} {first[1]}; " + "; ".join(f"{name} = {value}" for name, value in rest)


def _render_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_render_value(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " and ".join(map(_render_value, value))
    return str(value)


def _field_value(name: str, topic: str, rng: WordSampler) -> tuple[Schema, Any]:
    kinds = dict(each.split(":", 1) for each in _split(TOPICS[topic], " "))
    return _kind_value(kinds[name], rng)


def _kind_value(kind: str, rng: WordSampler) -> tuple[Schema, Any]:
    """The schema of a kind, and a value."""
    head, _, inside = kind.partition("(")
    parts = _split(inside[:-1], ",") if inside else []
    if "|" in kind:
        choices = kind.split("|")
        return {"enum": choices}, rng.any(choices)
    if head == "list":
        pairs = [_kind_value(inside[:-1], rng) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "items": pairs[0][0], "maxItems": 4}, [value for _, value in pairs]
    if head == "items":
        rows = [{name: _kind_value(inner, rng) for name, inner in (part.split(":") for part in parts)} for _ in range(rng.randint(1, 2))]
        properties = {name: schema for name, (schema, _) in rows[0].items()}
        inner = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}, [{name: row[name][1] for name in row} for row in rows]
    if head == "whole":
        least, most = map(int, parts)
        return rng.any([whole(least, most), {"type": "integer"}]), rng.randint(least, most)
    if head == "number":
        least, most = map(int, parts)
        return NUMBER, round(rng.generator.uniform(least, most), 1)
    if head == "digits":
        count = int(parts[0])
        pattern = {"type": "string", "pattern": f"^[0-9]{{{count}}}$"}
        return rng.any([pattern, text(count)]), "".join(str(rng.randint(0, 9)) for _ in range(count))
    if head == "code":
        letters, digits = parts[0].count("A"), parts[0].count("9")
        value = (
            "".join(rng.any("ABCDEFGHKLMNPRSTUVWX") for _ in range(letters)) + "-" + str(rng.randint(10 ** (digits - 1), 10**digits - 1))
        )
        pattern = {"type": "string", "pattern": f"^[A-Z]{{{letters}}}-[0-9]{{{digits}}}$"}
        return rng.any([pattern, text(12)]), value
    schema, value_of = _SIMPLE_KINDS[head]
    return schema, value_of(rng)


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


def _sentence(rng: WordSampler) -> str:
    return rng.any(
        [
            f"the {rng.pick(words.PRODUCTS)} must be checked before {rng.any(words.DAYS)}",
            f"{rng.pick(words.FIRST)} asked about {rng.pick(words.TOPICS)}",
            f"everything about {rng.pick(words.TOPICS)} was fine",
            f"please call {texts.a_name(rng)} in {rng.pick(words.CITIES)}",
            f"no {rng.pick(words.PRODUCTS)} was found at {rng.pick(words.STREETS)}",
            f"a {rng.pick(words.JOBS)} from {rng.pick(words.COMPANIES)} will help",
        ]
    )


def _title(rng: WordSampler) -> str:
    return rng.any([rng.pick(words.SONGS), f"{rng.any(_ADJECTIVES)} {rng.pick(words.PRODUCTS)}".title(), rng.pick(words.TOPICS).title()])


_ADJECTIVES = "old quiet golden small northern broken green distant silent early heavy bright winter secret wooden second".split()
_COLOURS = "red blue green black white silver yellow brown grey orange purple beige".split()
_COUNTRIES = "Norway|Brazil|Kenya|Japan|Portugal|Canada|Egypt|Poland|Vietnam|Chile|Ireland|Turkey|Peru|Ghana|Austria|New Zealand".split("|")
_TOP_LEVEL_DOMAINS = ("example", "org", "net", "io")
_SIMPLE_KINDS: dict[str, tuple[Schema, Callable[[WordSampler], Any]]] = {
    "flag": ({"type": "boolean"}, lambda rng: rng.any([True, False])),
    "person": (text(), texts.a_name),
    "first": (text(), lambda rng: rng.pick(words.FIRST)),
    "last": (text(), lambda rng: rng.pick(words.LAST)),
    "city": (text(), lambda rng: rng.pick(words.CITIES)),
    "street": (text(60), lambda rng: f"{rng.randint(1, 180)} {rng.pick(words.STREETS)}"),
    "country": (text(), lambda rng: rng.any(_COUNTRIES)),
    "company": (text(), lambda rng: rng.pick(words.COMPANIES)),
    "product": (text(), lambda rng: rng.pick(words.PRODUCTS)),
    "colour": (text(20), lambda rng: rng.any(_COLOURS)),
    "language": (text(), lambda rng: rng.any(words.LANGUAGES)),
    "currency": ({"type": "string", "pattern": "^[A-Z]{3}$"}, lambda rng: rng.any(words.CURRENCIES)),
    "day": ({"enum": words.DAYS}, lambda rng: rng.any(words.DAYS)),
    "month": (text(), lambda rng: rng.any(words.MONTHS)),
    "date": (DATE, texts.a_date),
    "time": (TIME, texts.a_time),
    "datetime": ({"type": "string", "format": "date-time"}, lambda rng: f"{texts.a_date(rng)} {texts.a_time(rng)}"),
    "price": (NUMBER, lambda rng: float(rng.price())),
    "mail": ({"type": "string", "format": "email"}, lambda rng: texts.a_mail(rng, texts.a_name(rng))),
    "phone": (text(20), lambda rng: f"+{rng.randint(1, 99)} {rng.randint(100, 999)} {rng.randint(10_000, 99_999)}"),
    "url": (text(60), lambda rng: f"https://{rng.pick(words.COMPANIES).lower().replace(' ', '')}.{rng.any(_TOP_LEVEL_DOMAINS)}"),
    "host": (text(), lambda rng: f"{rng.any(_COLOURS)}-{rng.randint(1, 40)}.{rng.any(_TOP_LEVEL_DOMAINS)}"),
    "ip": ({"type": "string", "format": "ipv4"}, lambda rng: ".".join(str(rng.randint(1, 254)) for _ in range(4))),
    "version": (text(12), lambda rng: f"{rng.randint(0, 9)}.{rng.randint(0, 20)}.{rng.randint(0, 9)}"),
    "title": (text(), _title),
    "sentence": (text(100), _sentence),
    "words": (
        {"type": "array", "items": text(), "maxItems": 4},
        lambda rng: [rng.pick(words.PRODUCTS) for _ in range(rng.randint(1, 3))],
    ),
}
