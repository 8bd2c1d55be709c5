"""JSON schemas in the shapes that applications send: OpenAI's strict mode, pydantic, zod-to-json-schema, OpenAPI, and lists of tools."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: list[str] | None = None, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


def strict(**properties: Any) -> Schema:
    return {**record(**properties), "additionalProperties": False}


def ref(name: str, folder: str = "$defs") -> Schema:
    return {"$ref": f"#/{folder}/{name}"}


TEXT, WHOLE, REAL, FLAG, NOTHING = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))

OPENAI_STRICT = {
    "steps": strict(steps={"type": "array", "items": strict(explanation=TEXT, output=TEXT)}, final_answer=TEXT),
    "optional as null": strict(name=TEXT, age={"type": ["integer", "null"]}, unit={"type": ["string", "null"], "enum": ["C", "F", None]}),
    "tree": {**strict(value=WHOLE, children={"type": "array", "items": {"$ref": "#"}})},
    "choice": strict(item={"anyOf": [strict(kind={"const": "user"}, age=WHOLE), strict(kind={"const": "bot"}, model=TEXT)]}),
    "list": {
        **strict(head={"anyOf": [ref("node"), NOTHING]}),
        "$defs": {"node": strict(value=REAL, next={"anyOf": [ref("node"), NOTHING]})},
    },
    "limits": strict(score={"type": "integer", "minimum": 0, "maximum": 100}, tags={"type": "array", "items": TEXT, "maxItems": 3}),
}

PYDANTIC = {
    "defaults": {
        **record(["name"], name={"title": "Name", **TEXT}, age={"default": 3, "minimum": 0, "title": "Age", **WHOLE}),
        "title": "Person",
    },
    "optional": record([], nick={"anyOf": [TEXT, NOTHING], "default": None, "title": "Nick"}),
    "nested": {**record(home=ref("Address")), "$defs": {"Address": record(street=TEXT, number={"exclusiveMinimum": 0, **WHOLE})}},
    "discriminated": {
        "$defs": {
            "Cat": record(kind={"const": "cat", "default": "cat", **TEXT}, lives={"maximum": 9, "minimum": 1, **WHOLE}),
            "Dog": record(kind={"const": "dog", "default": "dog", **TEXT}, tricks={"items": TEXT, "type": "array"}),
        },
        **record(
            pet={
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                "oneOf": [ref("Cat"), ref("Dog")],
            }
        ),
    },
    "enum": {"$defs": {"Colour": {"enum": ["red", "green"], **TEXT}}, **record(colour=ref("Colour"), more={"allOf": [ref("Colour")]})},
    "mapping": record(scores={"additionalProperties": WHOLE, "type": "object"}, flags={"type": "array", "items": FLAG, "minItems": 1}),
    "tuple": record(at={"type": "array", "prefixItems": [REAL, REAL], "minItems": 2, "maxItems": 2}),
    "formats": record(day={"format": "date", **TEXT}, at={"format": "date-time", **TEXT}, key={"format": "uuid", **TEXT}),
    "pattern": record(code={"pattern": "^[A-Z]{3}-[0-9]+$", "maxLength": 12, **TEXT}, rate={"multipleOf": 0.5, "maximum": 10, **REAL}),
    "recursive": {"$defs": {"Node": record(["name"], name=TEXT, below={"items": ref("Node"), "type": "array"})}, **ref("Node")},
    "forbid": {**record([], a=WHOLE), "additionalProperties": False, "title": "Config"},
}

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
ZOD = {
    "object": {**strict(name=TEXT, email={**TEXT, "format": "email"}), "$schema": DRAFT_7},
    "union": {"anyOf": [TEXT, WHOLE, strict(id=WHOLE)], "$schema": DRAFT_7},
    "literals": {"type": "object", "properties": {"size": {"type": ["string", "number"], "enum": ["S", "M", 3]}}, "$schema": DRAFT_7},
    "discriminated": {
        "anyOf": [strict(status={**TEXT, "const": "ok"}, data=TEXT), strict(status={**TEXT, "const": "error"}, code=WHOLE)],
        "$schema": DRAFT_7,
    },
    "tuple": {"type": "array", "minItems": 2, "maxItems": 2, "items": [TEXT, REAL], "$schema": DRAFT_7},
    "record": {"type": "object", "additionalProperties": REAL, "propertyNames": {"minLength": 1}, "$schema": DRAFT_7},
    "merged": {"allOf": [record(a=TEXT), record(b={"type": "number", "exclusiveMinimum": 0})], "$schema": DRAFT_7},
    "nullable": {"anyOf": [{"type": "array", "items": {"not": {}}, "maxItems": 0}, NOTHING], "$schema": DRAFT_7},
    "lazy": {
        **record(["id"], id=WHOLE, sub={"type": "array", "items": {"$ref": "#"}}),
        "additionalProperties": False,
        "$schema": DRAFT_7,
    },
}

OPENAPI_30 = {  # `nullable` is not a keyword of JSON Schema
    "nullable": record(name={**TEXT, "nullable": True}, count={**WHOLE, "nullable": True, "format": "int64"}),
    "exclusive": record(price={**REAL, "minimum": 0, "exclusiveMinimum": True, "format": "double"}),
    "all of": {"allOf": [record(id={**WHOLE, "format": "int32"}), record([], note={**TEXT, "example": "x", "maxLength": 40})]},
    "components": {
        **ref("Pet", "components/schemas"),
        "components": {"schemas": {"Pet": record(name=TEXT, tag={**TEXT, "nullable": True})}},
    },
    "discriminator": {
        "oneOf": [ref("Card", "definitions"), ref("Cash", "definitions")],
        "discriminator": {"propertyName": "method"},
        "definitions": {
            "Card": record(method={"type": "string", "enum": ["card"]}, number={**TEXT, "pattern": "^[0-9]{4}$"}),
            "Cash": record(method={"type": "string", "enum": ["cash"]}, amount=REAL),
        },
    },
    "annotations": {**record(a={**FLAG, "readOnly": True, "deprecated": True}), "xml": {"name": "A"}, "externalDocs": {"url": "x"}},
    "page": record(["items"], items={"type": "array", "items": record(id=WHOLE)}, next={**TEXT, "nullable": True, "format": "uri"}),
    "error": record(["code", "message"], code={**WHOLE, "format": "int32"}, message=TEXT, details={"type": "array", "items": TEXT}),
    "money": record(
        currency={**TEXT, "pattern": "^[A-Z]{3}$"}, units={**WHOLE, "format": "int64"}, nanos={**WHOLE, "maximum": 999_999_999}
    ),
    "order": {
        **ref("Order", "components/schemas"),
        "components": {
            "schemas": {
                "Line": record(sku={**TEXT, "minLength": 1}, quantity={**WHOLE, "minimum": 1}),
                "Order": record(
                    ["lines", "status"],
                    lines={"type": "array", "items": ref("Line", "components/schemas"), "minItems": 1},
                    status={"type": "string", "enum": ["placed", "approved", "delivered"], "default": "placed"},
                    placed={**TEXT, "format": "date-time"},
                ),
            }
        },
    },
    "map": {"type": "object", "additionalProperties": {**WHOLE, "format": "int32"}},
    "file": record(name={**TEXT, "maxLength": 80}, content={**TEXT, "format": "byte"}),
    "any of": record(value={"anyOf": [{**TEXT, "maxLength": 9}, {**REAL, "format": "float"}, {"type": "array", "items": FLAG}]}),
    "patch": {"allOf": [record([], name=TEXT, tags={"type": "array", "items": TEXT, "maxItems": 4})], "minProperties": 1},
    "category tree": {
        **ref("Category", "components/schemas"),
        "components": {
            "schemas": {"Category": record(["name"], name=TEXT, children={"type": "array", "items": ref("Category", "components/schemas")})}
        },
    },
}

OPENAPI_31 = {
    "type lists": record(name={"type": ["string", "null"]}, at={"type": ["integer", "string"], "minimum": 0, "maxLength": 5}),
    "constants": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
    "siblings": {"$defs": {"Base": record(id=WHOLE)}, "$ref": "#/$defs/Base", "properties": {"extra": TEXT}, "required": ["extra"]},
    "dependent": {**record(["card"], card=TEXT, code=WHOLE), "dependentRequired": {"card": ["code"]}},
    "conditional": {
        **record(kind={"enum": ["a", "b"]}),
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"properties": {"size": WHOLE}, "required": ["size"]},
        "else": {"properties": {"size": FLAG}},
    },
    "unevaluated": {"allOf": [record(a=WHOLE)], "properties": {"b": FLAG}, "unevaluatedProperties": False},
    "problem": record(["type", "status"], type={**TEXT, "format": "uri-reference"}, status={**WHOLE, "minimum": 100, "maximum": 599}),
    "point": record(
        type={"const": "Point"}, coordinates={"type": "array", "prefixItems": [REAL, REAL], "items": REAL, "minItems": 2, "maxItems": 3}
    ),
    "nullable reference": {
        **record(owner={"anyOf": [ref("User", "components/schemas"), NOTHING]}),
        "components": {"schemas": {"User": record(id={**TEXT, "format": "uuid"}, email={**TEXT, "format": "email"})}},
    },
    "event": {
        "oneOf": [
            record(event={"const": "created"}, at={**TEXT, "format": "date-time"}),
            record(event={"const": "deleted"}, reason={"type": ["string", "null"]}),
        ],
        "discriminator": {"propertyName": "event"},
    },
    "headers": {"type": "object", "patternProperties": {"^x-[a-z]+$": TEXT}, "additionalProperties": False, "maxProperties": 3},
    "range": record(low={**REAL, "exclusiveMinimum": 0}, high={**REAL, "exclusiveMaximum": 100, "multipleOf": 0.5}),
    "media": record(image={**TEXT, "contentEncoding": "base64", "contentMediaType": "image/png"}),
    "levels": record(level={"enum": [1, 2, 3, "max", None]}, unit={"enum": ["ms", "s"], "default": "s"}),
    "annotated": {"$comment": "c", **record(["a"], a={**TEXT, "examples": ["x"]}, b={"default": 1, **WHOLE, "deprecated": True})},
}

APPLICATIONS = {
    f"{kind}: {name}": schema
    for kind, schemas in (
        ("strict", OPENAI_STRICT),
        ("pydantic", PYDANTIC),
        ("zod", ZOD),
        ("openapi 3.0", OPENAPI_30),
        ("openapi 3.1", OPENAPI_31),
    )
    for name, schema in schemas.items()
}


def in_json_schema(name: str) -> Any:
    """The schema of an application, with keywords of OpenAPI 3.0 replaced by those of JSON Schema."""
    return _without_nullable(APPLICATIONS[name]) if name.startswith("openapi 3.0") else APPLICATIONS[name]


def _without_nullable(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _without_nullable(value) for name, value in schema.items() if name != "nullable"}
    if schema.get("nullable"):
        found["type"] = [schema["type"], "null"]
    if schema.get("exclusiveMinimum") is True:
        found["exclusiveMinimum"] = found.pop("minimum")
    return found


def tools(count: int) -> Schema:
    """The schema of a call of one of `count` tools."""
    arguments = [*OPENAI_STRICT.values(), *(schema for schema in PYDANTIC.values() if "$defs" not in schema)]
    plain = [schema for schema in arguments if "$defs" not in schema and schema.get("type") == "object" and "$ref" not in str(schema)]
    calls = [strict(name={"const": f"server_{index % 7}__tool_{index}"}, arguments=plain[index % len(plain)]) for index in range(count)]
    return {"anyOf": calls}


def large() -> dict[str, Schema]:
    """Schemas at the limits of what applications send."""
    wide = record(
        [f"field_{index}" for index in range(0, 200, 2)], **{f"field_{index}": (TEXT, WHOLE, FLAG)[index % 3] for index in range(200)}
    )
    long = {"type": "string", "description": "A part of the description of a field. " * 60}
    return {
        "100 tools": tools(100),
        "enum of 5,000": {"enum": [f"product-{index * 7919 % 10007:05}" for index in range(5000)]},
        "200 properties": {**wide, "additionalProperties": False},
        "500 kB": strict(**{f"field_{index}": long for index in range(220)}),
    }
