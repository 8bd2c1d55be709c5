"""Checks OpenAI's `response_format`; a field that would be ignored is an error."""

from __future__ import annotations

from typing import Any

from stepgraph.sampling.fields import clip_name, clip_repr

_FIELDS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "triggers", "structures"},
}


def checked_response_format(value: Any) -> tuple[str, Any]:
    """The type, and the schema or the tags if it has any; ValueError naming the wrong field."""
    name = "response_format"
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict with a type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"{name}.type: got {clip_repr(kind)}, expected one of {', '.join(_FIELDS)}")
    _check_fields(value, _FIELDS[kind], name)
    if kind != "json_schema":
        return kind, value if kind == "structural_tag" else None
    inner, name = value.get("json_schema"), f"{name}.json_schema"
    if not isinstance(inner, dict):
        raise ValueError(f"{name}: got {clip_repr(inner)}, expected an object with a name and a schema")
    _check_fields(inner, {"name", "description", "schema", "strict"}, name)
    if not isinstance(inner.get("name"), str) or not inner["name"]:
        raise ValueError(f"{name}.name: got {clip_repr(inner.get('name'))}, expected a non-empty string")
    if not isinstance(inner.get("description", ""), str):
        raise ValueError(f"{name}.description: got {clip_repr(inner['description'])}, expected a string")
    if not isinstance(inner.get("strict"), (bool, type(None))):
        raise ValueError(f"{name}.strict: got {clip_repr(inner['strict'])}, expected true, false or null")
    if not isinstance(inner.get("schema"), dict):
        raise ValueError(f"{name}.schema: got {clip_repr(inner.get('schema'))}, expected a JSON schema")
    return kind, inner["schema"]


def _check_fields(value: dict[str, Any], known: set[str], name: str) -> None:
    for field in value:
        if field not in known:
            raise ValueError(f"{name}.{clip_name(field)}: got an unknown field, expected {', '.join(sorted(known))}")
