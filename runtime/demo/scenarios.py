"""The prompts of the demonstration: extract a record, call a tool, answer a question. The head was not trained on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepgraph.sampling.grammar import Constraint


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT = {"type": "string", "maxLength": 40}


@dataclass(frozen=True)
class Scenario:
    name: str
    user: str
    system: str = ""
    schema: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]

    @property
    def constraint(self) -> Constraint | None:
        return Constraint.json_schema(self.schema) if self.schema else None


SCENARIOS = (
    Scenario(
        "extraction",
        "Extract the booking as JSON with guest, email, room, nights, arrival and breakfast.\n\n"
        "Good evening, I am Miriam Castellan (miriam.castellan@quartz.example). I would like the garden room from 2027-05-14, for "
        "3 nights, with breakfast if possible.",
        schema=record(
            guest=_TEXT,
            email={"type": "string", "maxLength": 60},
            room=_TEXT,
            nights={"type": "integer", "minimum": 1, "maximum": 60},
            arrival={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            breakfast={"type": "boolean"},
        ),
    ),
    Scenario(
        "tool call",
        "Please remind Theodora Blum that the kiln course begins at 18:30 on Thursday.",
        'You call tools. Answer with JSON: {"name": tool, "arguments": {...}}. Tools:\n'
        "- send_message(recipient, message): Send a message to a person\n"
        "- open_door(floor): Open the door of a floor",
        schema={
            "anyOf": [
                record(name={"const": "send_message"}, arguments=record(recipient=_TEXT, message={"type": "string", "maxLength": 100})),
                record(name={"const": "open_door"}, arguments=record(floor={"type": "integer", "minimum": 0, "maximum": 20})),
            ]
        },
    ),
    Scenario("free text", "Why does a candle flame point upwards?"),
)
