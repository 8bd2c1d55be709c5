"""Training texts as token ids: from plain text, or from JSON lines of texts, conversations or ids.

Text is encoded by the tokenizer of the model folder or GGUF file.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.runtime.text import TextCodec

KINDS = ("text", "messages", "token_ids")


class Text(NamedTuple):
    token_ids: tuple[int, ...]
    prompt_length: int  # tokens of the prompt, at least one, which are not trained on


def read_texts(path: Path, target: Path, vocab_size: int, max_tokens: int, will_answer: bool = False) -> list[Text]:
    """The texts of a .txt or .jsonl file, cut to `max_tokens` tokens. ValueError names file, line and field.

    answered: the target will answer the texts, so a conversation may end with a question, and the whole text is the prompt.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: got the ending {path.suffix!r}, expected .txt, .jsonl, or a folder of saved hidden states")
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    encoder = Encoder(target, will_answer)
    pieces = _split_text(content, encoder, max_tokens) if path.suffix == ".txt" else _parse_lines(content, path, encoder)
    texts = [_checked(text, where, vocab_size, max_tokens, will_answer) for where, text in pieces]
    usable = [text for text in texts if len(text.token_ids) >= (1 if will_answer else 3)]
    if not usable:
        raise ValueError(f"{path}: got {len(texts)} texts of at least {'1 token' if will_answer else '3 tokens'}, expected at least one")
    return usable


class Encoder:
    """A target's tokenizer, opened on first use."""

    def __init__(self, target: Path, will_answer: bool = False) -> None:
        self._target, self._will_answer = target, will_answer

    @functools.cached_property
    def codec(self) -> TextCodec:
        return TextCodec.open(self._target)

    def text(self, text: str) -> Text:
        ids = self.codec.encode(text)
        return Text(tuple(ids), len(ids) if self._will_answer else 1)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Text:
        """If the last message is from the assistant it is the answer, and the previous messages are the prompt."""
        answer = messages[-1]["role"] == "assistant" and not self._will_answer
        question = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        prompt = self.codec.chat(question) if question else []
        if not answer:
            return Text(tuple(prompt), len(prompt))
        whole = self.codec.chat(messages, answer=False)
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
        return Text(tuple(whole), len(list(shared)))


def _split_text(content: str, encoder: Encoder, max_tokens: int) -> Iterator[tuple[str, Text]]:
    """Split a text into pieces of at most `max_tokens` tokens."""
    ids = encoder.text(content).token_ids
    for start in range(0, len(ids), max_tokens):
        yield f"token {start}", Text(ids[start : start + max_tokens], 1)


def _parse_lines(content: str, path: Path, encoder: Encoder) -> Iterator[tuple[str, Text]]:
    for number, line in enumerate(content.split("\n"), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        kinds = [kind for kind in KINDS if isinstance(entry, dict) and kind in entry]
        if len(kinds) != 1:
            raise ValueError(f"{where}: got {line.strip()!r:.80}, expected an object with one of {', '.join(KINDS)}")
        try:
            yield where, _entry(kinds[0], entry, encoder)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _entry(kind: str, entry: Mapping[str, Any], encoder: Encoder) -> Text:
    value = entry[kind]
    if kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"text: got {value!r:.80}, expected a string")
        return encoder.text(value)
    if kind == "messages":
        whole = isinstance(value, list) and value and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in value)
        if not whole:
            raise ValueError(f"messages: got {value!r:.80}, expected a list of objects with role and content")
        return encoder.conversation(value)
    if not isinstance(value, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise ValueError(f"token_ids: got {value!r:.80}, expected a list of whole numbers")
    prompt = entry.get("prompt_length", min(1, len(value)))
    if isinstance(prompt, bool) or not isinstance(prompt, int) or not 0 <= prompt <= len(value):
        raise ValueError(f"prompt_length: got {prompt!r}, expected a whole number from 0 to {len(value)}")
    return Text(tuple(value), prompt)


def _checked(text: Text, where: str, vocab_size: int, max_tokens: int, will_answer: bool) -> Text:
    wrong = [token for token in text.token_ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{where}: token_ids: got {wrong[0]}, expected ids from 0 to {vocab_size - 1}")
    kept = text.token_ids[:max_tokens]
    return Text(kept, len(kept) if will_answer else max(1, min(text.prompt_length, len(kept))))
