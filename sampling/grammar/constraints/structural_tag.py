"""Structural tags: free text in which each trigger must be followed by a tag: its beginning, a JSON value, and its end.

`{"triggers": ["<call="], "structures": [{"begin": "<call=f>", "schema": {...}, "end": "</call>"}]}`
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stepgraph.sampling.fields import clip_name, clip_repr
from stepgraph.sampling.grammar.schema.reader import parsed


class Tag(NamedTuple):
    begin: str  # without the trigger
    schema: Any
    end: str


class TagGroup(NamedTuple):
    """The tags of one trigger; the text continues with one of them after the trigger."""

    trigger: str
    tags: tuple[Tag, ...]


def checked_tag(value: Any, name: str) -> dict[str, Any]:
    """The canonical form of a structural tag; ValueError naming the wrong field."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict with triggers and structures")
    if unknown := sorted(map(clip_name, value.keys() - {"type", "triggers", "structures"})):
        raise ValueError(f"{name}.{unknown[0]}: got an unknown field, expected triggers and structures")
    triggers, structures = value.get("triggers"), value.get("structures")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise ValueError(f"{name}.triggers: got {clip_repr(triggers)}, expected a list of at least one non-empty string")
    if not isinstance(structures, list) or not structures:
        raise ValueError(f"{name}.structures: got {clip_repr(structures)}, expected a list of at least one tag")
    for index, tag in enumerate(structures):
        _check_structure(tag, triggers, f"{name}.structures[{index}]")
    for trigger in triggers:
        if not any(tag["begin"].startswith(trigger) for tag in structures):
            raise ValueError(f"{name}.triggers: got {clip_repr(trigger)}, expected the beginning of a structure's begin")
        if any(other != trigger and trigger in other for other in triggers):
            raise ValueError(f"{name}.triggers: got {clip_repr(trigger)} inside another trigger, expected triggers without others in them")
    return {"triggers": list(dict.fromkeys(triggers)), "structures": structures}


def _check_structure(tag: Any, triggers: list[str], name: str) -> None:
    if not isinstance(tag, dict) or tag.keys() - {"begin", "schema", "end"}:
        raise ValueError(f"{name}: got {clip_repr(tag)}, expected an object of begin, schema and end")
    for field in ("begin", "end"):
        if not isinstance(tag.get(field), str):
            raise ValueError(f"{name}.{field}: got {clip_repr(tag.get(field))}, expected a string")
    if not isinstance(tag.get("schema"), dict):
        raise ValueError(f"{name}.schema: got {clip_repr(tag.get('schema'))}, expected a JSON schema")
    if not any(tag["begin"].startswith(trigger) for trigger in triggers):
        raise ValueError(f"{name}.begin: got {clip_repr(tag['begin'])}, expected a text that starts with a trigger")


def tag_groups(payload: str) -> list[TagGroup]:
    """The tags of a constraint's payload, by trigger."""
    value = parsed(payload)
    groups = []
    for trigger in value["triggers"]:
        tags = [
            Tag(tag["begin"][len(trigger) :], tag["schema"], tag["end"]) for tag in value["structures"] if tag["begin"].startswith(trigger)
        ]
        groups.append(TagGroup(trigger, tuple(tags)))
    return groups
