"""All fuzzed entry points by name."""

from __future__ import annotations

from tests.fuzz.folders import ConfigDoor, DraftDoor, GgufDoor, SafetensorsDoor
from tests.fuzz.grammars import EbnfDoor, FormatDoor, LarkDoor, RegexDoor, SchemaDoor, TagDoor
from tests.fuzz.loop import Door
from tests.fuzz.records import RecordingDoor, StatesDoor
from tests.fuzz.requests import ConstraintDoor, SamplingDoor, SubmitDoor
from tests.fuzz.server import ServerDoor
from tests.fuzz.texts import RanksDoor, TokenizerDoor

_ALL: tuple[type[Door], ...] = (
    SamplingDoor,
    ConstraintDoor,
    SubmitDoor,
    ConfigDoor,
    DraftDoor,
    SafetensorsDoor,
    GgufDoor,
    TokenizerDoor,
    RanksDoor,
    RecordingDoor,
    StatesDoor,
    ServerDoor,
    SchemaDoor,
    RegexDoor,
    EbnfDoor,
    LarkDoor,
    TagDoor,
    FormatDoor,
)
DOORS: dict[str, type[Door]] = {door.name: door for door in _ALL}
