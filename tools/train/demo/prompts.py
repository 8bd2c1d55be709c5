"""The prompts that the demonstration's draft is trained and measured on: extraction to JSON, tool calls, small talk, code.

A prompt follows from its seed. The schemas in MEASURED occur in no training prompt. `held_out` prompts share no name, place, thing, topic,
tool or wording of the question with those of training; the texts to extract from are worded alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tools.train.demo import texts, words
from tools.train.demo.records import record_request
from tools.train.demo.schemas import MEASURED, SCHEMAS, TOOLS, Schema, tool_schema
from tools.train.demo.words import WordSampler


@dataclass(frozen=True)
class DemoPrompt:
    kind: str  # the schema's name, a tool call, talk or code
    messages: tuple[Mapping[str, str], ...]
    schema: Schema | None = field(default=None, hash=False)  # None: free text


def make_prompt(seed: int, kind: str | None = None, *, held_out: bool = False) -> DemoPrompt:
    """The prompt of a seed, of a kind in KINDS or of one that the seed picks."""
    rng = WordSampler(random.Random(f"{'measure' if held_out else 'train'} {kind} {seed}"), held_out)
    chosen = rng.generator.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0] if kind is None else kind
    return KINDS[chosen](rng, chosen)


def _messages(*messages: tuple[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": content} for role, content in messages)


def _extraction(make_text: Callable[[WordSampler], str]) -> Callable[[WordSampler, str], DemoPrompt]:
    def make(rng: WordSampler, kind: str) -> DemoPrompt:
        schema = SCHEMAS[kind]
        fields = list(schema["properties"])
        field_list = ", ".join(fields[:-1]) + " and " + fields[-1]
        instruction = rng.pick(
            [
                f"Extract the {kind} as JSON with {field_list}.",
                f"Read the text and write a JSON object with the keys {field_list}.",
                f"Turn this into JSON ({field_list}).",
                f"Give me {field_list} of the following text as JSON.",
            ]
        )
        return DemoPrompt(kind, _messages(("user", f"{instruction}\n\n{make_text(rng)}")), schema)

    return make


def _tool_call(rng: WordSampler, kind: str) -> DemoPrompt:
    drawn_tools = [rng.pick(TOOLS) for _ in range(rng.randint(2, 4))]
    offered = list({each["name"]: each for each in drawn_tools}.values())
    requested = rng.any(offered)["name"]
    descriptions = "\n".join(f"- {each['name']}({', '.join(each['parameters']['properties'])}): {each['description']}" for each in offered)
    system = f'You call tools. Answer with JSON: {{"name": tool, "arguments": {{...}}}}. Tools:\n{descriptions}'
    return DemoPrompt(kind, _messages(("system", system), ("user", texts.tool_request(requested, rng))), tool_schema(offered))


def _record(rng: WordSampler, kind: str) -> DemoPrompt:
    request, schema = record_request(rng)
    return DemoPrompt(kind, _messages(("user", request)), schema)


def _talk(rng: WordSampler, kind: str) -> DemoPrompt:
    topic, other = (rng.pick(rng.any([words.TOPICS, words.SUBJECTS])) for _ in range(2))
    city, job = rng.pick(words.CITIES), rng.pick(words.JOBS)
    question = rng.pick(
        [
            f"Explain {topic} to a child.",
            f"Tell me something interesting about {topic}.",
            f"Why do people like {topic}?",
            f"Write a short poem about {topic}.",
            f"What are the advantages and disadvantages of {topic}?",
            f"What should I see in {city} in one day?",
            f"What does a {job} do all day?",
            f"Give me three facts about {topic}.",
            f"What is the difference between {topic} and {other}?",
            f"How does {topic} work?",
            f"I am a {job} and I am tired. What can I do?",
            f"Tell a very short story about a {job} in {city}.",
            f"How can I learn more about {topic}?",
            f"Write an email to {texts.a_name(rng)} about {topic}.",
            f"Give me a quiz of three questions about {topic}.",
            f"How do I become a {job}?",
            f"What is a good present for a {job} who likes {topic}?",
            f"List five words that have to do with {topic}, with a short explanation of each.",
            f"Describe a walk through {city} in autumn.",
            f"Plan a weekend in {city} for somebody who likes {topic}.",
            f"Who should care about {topic}, and why?",
            f"Write the first paragraph of a novel in which {topic} plays a part.",
            f"Summarise what is known about {topic} in four sentences.",
            f"Argue for and against {topic}.",
            f"My friend says that {topic} is boring. What should I answer?",
        ]
    )
    return DemoPrompt(kind, _messages(("user", question)))


def _code(rng: WordSampler, kind: str) -> DemoPrompt:
    thing, number = rng.pick(words.PRODUCTS).split()[-1], rng.randint(2, 12)
    task = rng.pick(
        [
            f"returns the sum of all multiples of {number} below n",
            f"counts how often the word '{thing}' occurs in a text",
            f"sorts a list of {thing}s by price",
            f"checks whether a number is divisible by {number}",
            "reverses the words of a sentence",
            f"reads a file line by line and prints those that contain '{thing}'",
            f"removes all duplicates from a list of {thing}s",
            f"splits a list into groups of {number}",
            "computes the average of a list of numbers",
            f"returns the {number} largest numbers of a list",
            "checks whether a string is a palindrome",
            f"makes a dictionary from two lists, {thing}s and prices",
            f"raises ValueError when a {thing} has no name",
            f"prints the first {number} Fibonacci numbers",
        ]
    )
    language = rng.any(["Python", "Python", "Python", "JavaScript"])
    instruction = rng.any([f"Write a {language} function that {task}.", f"I need a {language} function which {task}. Keep it short."])
    return DemoPrompt(kind, _messages(("user", instruction)))


KINDS: dict[str, Callable[[WordSampler, str], DemoPrompt]] = {
    "person": _extraction(texts.person_text),
    "order": _extraction(texts.order_text),
    "event": _extraction(texts.event_text),
    "review": _extraction(texts.review_text),
    "ticket": _extraction(texts.ticket_text),
    "job": _extraction(texts.job_text),
    "journey": _extraction(texts.journey_text),
    "address": _extraction(texts.address_text),
    "tool call": _tool_call,
    "record": _record,
    "talk": _talk,
    "code": _code,
}
# Not among these: the schemas that are measured.
KIND_WEIGHTS = {"record": 50, "job": 3, "journey": 3, "address": 3, "tool call": 13, "talk": 18, "code": 10}
assert not set(KIND_WEIGHTS) & set(MEASURED)
