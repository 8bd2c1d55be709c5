"""Schemas and tools of the demonstration's prompts."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def text(most: int = 40) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


DATE = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
TIME = {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}
NUMBER = {"type": "number"}

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": record(name=text(), age=whole(0, 130), city=text(), occupation=text(), email=text(60)),
    "order": record(
        customer=text(),
        items={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": record(product=text(), quantity=whole(1, 99), unit_price=NUMBER),
        },
        delivery_address=text(60),
        express={"type": "boolean"},
    ),
    "event": record(
        title=text(), date=DATE, start_time=TIME, location=text(60), attendees={"type": "array", "items": text(), "maxItems": 4}
    ),
    "review": record(
        product=text(),
        sentiment={"enum": ["positive", "neutral", "negative"]},
        rating=whole(1, 5),
        summary=text(100),
        would_recommend={"type": "boolean"},
    ),
    "ticket": record(
        category={"enum": ["billing", "delivery", "technical", "other"]},
        priority={"enum": ["low", "medium", "high"]},
        customer_name=text(),
        order_number={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{5}$"},
        description=text(100),
    ),
    "job": record(company=text(), position=text(), city=text(), salary=whole(10_000, 200_000), remote={"type": "boolean"}),
    "journey": record(
        passenger=text(), departure_city=text(), arrival_city=text(), departure_date=DATE, seat_class={"enum": ["economy", "business"]}
    ),
    "address": record(first_name=text(), last_name=text(), street=text(60), house_number=whole(1, 999), postal_code=text(10), city=text()),
}
MEASURED = ("person", "order", "event", "review", "ticket")  # the five schemas of the benchmark


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "description": description, "parameters": record(**properties)}


TOOLS = [
    tool("get_weather", "Tell the weather of a city", city=text(), unit={"enum": ["celsius", "fahrenheit"]}),
    tool("set_alarm", "Set an alarm", time=TIME, label=text()),
    tool("send_message", "Send a message to a person", recipient=text(), message=text(100)),
    tool("create_event", "Put an event into the calendar", title=text(), date=DATE, start_time=TIME),
    tool("convert_currency", "Convert an amount of money", amount=NUMBER, source_currency=text(3), target_currency=text(3)),
    tool("translate", "Translate a text", text=text(100), target_language=text()),
    tool("search_products", "Search the shop", query=text(), max_price=NUMBER),
    tool("play_music", "Play a song", title=text(), volume=whole(0, 100)),
]


def tool_schema(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """A call of one of the tools."""
    calls = [record(name={"const": each["name"]}, arguments=each["parameters"]) for each in tools]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
