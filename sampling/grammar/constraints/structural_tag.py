"""Structural tags: free text in which each trigger begins a tag: its `begin`, a JSON value, and its `end`.

`{"triggers": ["<call="], "structures": [{"begin": "<call=f>", "schema": {...}, "end": "</call>"}]}`

With `separator`, a list of tags instead of one, after `opening` and before `closing`. Without triggers, the text is one tag or list, or the
tag `alternative`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stepgraph.sampling.fields import check_value, clip_name, clip_repr, instance_of, one_of
from stepgraph.sampling.grammar.schema.reader import parse_json

STYLES = ("json", "qwen_xml")
ALTERNATIVE = "alternative"
MAX_TRIGGERS = 1000  # each is compared with all others
_TEXTS = ("separator", "opening", "closing")
_STRING = instance_of(str, "a string")


class Tag(NamedTuple):
    begin: str  # without the trigger
    schema: Any
    end: str
    style: str  # notation of the value; for qwen_xml see `parameters_grammar`


class TagGroup(NamedTuple):
    """The text after one trigger: one of the tags, or a list of tags if there is a separator."""

    trigger: str  # empty: the group is the whole text
    opening: str  # without the trigger
    tags: tuple[Tag, ...]
    separator: str | None
    closing: str
    name: str = ""  # in errors, instead of the beginning of the tag

    def name_of(self, tag: Tag) -> str:
        return self.name or self.trigger + tag.begin


def checked_tag(value: Any, name: str) -> dict[str, Any]:
    """The canonical form of a structural tag; ValueError naming the wrong field."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict with triggers and structures")
    if unknown := sorted(map(clip_name, value.keys() - {"type", "triggers", "structures", ALTERNATIVE, *_TEXTS})):
        raise ValueError(f"{name}.{unknown[0]}: got an unknown field, expected triggers, structures, {', '.join(_TEXTS)}, {ALTERNATIVE}")
    triggers, structures, texts = value.get("triggers"), value.get("structures"), {text: value[text] for text in _TEXTS if text in value}
    for field, text in texts.items():
        check_value(f"{name}.{field}", text, _STRING)
    if triggers is None and "triggers" not in value:
        triggers = []
    elif not isinstance(triggers, list) or not 0 < len(triggers) <= MAX_TRIGGERS or not all(type(one) is str and one for one in triggers):
        raise ValueError(f"{name}.triggers: got {clip_repr(triggers)}, expected a list of 1 to {MAX_TRIGGERS} non-empty strings")
    if not isinstance(structures, list) or not structures:
        raise ValueError(f"{name}.structures: got {clip_repr(structures)}, expected a list of at least one tag")
    opening = texts.get("opening", "")
    if opening and triggers and not opening.startswith(tuple(triggers)):
        raise ValueError(f"{name}.opening: got {clip_repr(opening)}, expected a text that starts with a trigger")
    for index, tag in enumerate(structures):
        _check_structure(tag, [] if opening else triggers, f"{name}.structures[{index}]")
    _check_triggers(triggers, structures, opening, f"{name}.triggers")
    if ALTERNATIVE in value:
        _check_structure(value[ALTERNATIVE], [], f"{name}.{ALTERNATIVE}")
        if triggers:
            raise ValueError(f"{name}.{ALTERNATIVE}: got {clip_repr(value[ALTERNATIVE])}, expected none beside triggers")
        texts[ALTERNATIVE] = value[ALTERNATIVE]
    return {"triggers": list(dict.fromkeys(triggers)), "structures": structures, **texts}


def _check_triggers(triggers: list[str], structures: list[dict[str, Any]], opening: str, name: str) -> None:
    for trigger in triggers:
        if not (opening.startswith(trigger) if opening else any(tag["begin"].startswith(trigger) for tag in structures)):
            expected = "the opening" if opening else "a structure's begin"
            raise ValueError(f"{name}: got {clip_repr(trigger)}, expected the beginning of {expected}")
        if any(other != trigger and trigger in other for other in triggers):
            raise ValueError(f"{name}: got {clip_repr(trigger)} inside another trigger, expected triggers without others in them")


def _check_structure(tag: Any, triggers: list[str], name: str) -> None:
    if not isinstance(tag, dict) or tag.keys() - {"begin", "schema", "end", "style"}:
        raise ValueError(f"{name}: got {clip_repr(tag)}, expected an object of begin, schema, end and style")
    check_value(f"{name}.style", tag.get("style", "json"), one_of(STYLES))
    for field in ("begin", "end"):
        check_value(f"{name}.{field}", tag.get(field), _STRING)
    check_value(f"{name}.schema", tag.get("schema"), instance_of(dict, "a JSON schema"))
    if triggers and not tag["begin"].startswith(tuple(triggers)):
        raise ValueError(f"{name}.begin: got {clip_repr(tag['begin'])}, expected a text that starts with a trigger")


def tag_groups(payload: str) -> list[TagGroup]:
    """The tags of a constraint's payload, by trigger."""
    value = parse_json(payload)
    opening, separator, groups = value.get("opening", ""), value.get("separator"), []
    for trigger in value["triggers"] or [""]:
        trigger_chars = 0 if opening else len(trigger)
        tags = tuple(_tag(tag, trigger_chars) for tag in value["structures"] if opening or tag["begin"].startswith(trigger))
        between = separator if opening or separator is None else separator + trigger  # before each further tag, which is cut as the first
        groups.append(TagGroup(trigger, opening[len(trigger) :], tags, between, value.get("closing", "")))
    if ALTERNATIVE in value:
        groups.append(TagGroup("", "", (_tag(value[ALTERNATIVE], 0),), None, "", ALTERNATIVE))
    return groups


def _tag(tag: dict[str, Any], trigger_chars: int) -> Tag:
    return Tag(tag["begin"][trigger_chars:], tag["schema"], tag["end"], tag.get("style", "json"))
