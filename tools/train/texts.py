"""Training texts as token ids: from plain text, or from JSON lines of texts, conversations or ids.

Text is encoded by the tokenizer of the model folder or GGUF file, loaded with `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("text", "messages", "token_ids")


class Text(NamedTuple):
    token_ids: tuple[int, ...]
    prompt_length: int  # tokens of the prompt, at least one, which are not trained on


def read_texts(path: Path, target: Path, vocab_size: int, longest: int, answered: bool = False) -> list[Text]:
    """The texts of a .txt or .jsonl file, cut to `longest` tokens. ValueError names file, line and field.

    answered: the target will answer the texts, so a conversation may end with a question, and the whole text is the prompt.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: got the ending {path.suffix!r}, expected .txt, .jsonl, or a folder of saved hidden states")
    try:
        written = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    encoder = Encoder(target, answered)
    found = _plain(written, encoder, longest) if path.suffix == ".txt" else _lines(written, path, encoder)
    texts = [_checked(text, where, vocab_size, longest, answered) for where, text in found]
    usable = [text for text in texts if len(text.token_ids) >= (1 if answered else 3)]
    if not usable:
        raise ValueError(f"{path}: got {len(texts)} texts of at least {'1 token' if answered else '3 tokens'}, expected at least one")
    return usable


class Encoder:
    """A target's tokenizer, opened on first use."""

    def __init__(self, target: Path, answered: bool = False) -> None:
        self._target, self._answered = target, answered
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            try:
                import transformers
            except ModuleNotFoundError:
                raise ValueError("token ids of text: reading a tokenizer needs transformers: pip install transformers") from None
            transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
            file = {"gguf_file": self._target.name} if self._target.is_file() else {}
            folder = self._target.parent if file else self._target
            try:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **file)
            except Exception as error:  # the library raises exceptions of many types
                raise ValueError(f"{self._target}: no tokenizer could be read: {error}") from None
        return self._tokenizer

    def text(self, text: str) -> Text:
        ids = self.tokenizer(text)["input_ids"]
        return Text(tuple(ids), len(ids) if self._answered else 1)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Text:
        """If the last message is from the assistant it is the answer, and the previous messages are the prompt."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("messages: the tokenizer has no chat template; give 'text' or 'token_ids'")
        answer = messages[-1]["role"] == "assistant" and not self._answered
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        prompt = self._templated(asked, add_generation_prompt=True) if asked else []
        if not answer:
            return Text(tuple(prompt), len(prompt))
        whole = self._templated(messages)
        shared = next(
            (index for index, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), min(len(prompt), len(whole))
        )
        return Text(tuple(whole), shared)

    def _templated(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        try:
            made = self.tokenizer.apply_chat_template(list(messages), tokenize=True, **options)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"messages: the chat template fails: {error}") from None
        ids: list[int] = made if isinstance(made, list) else made["input_ids"]
        return ids


def _plain(written: str, encoder: Encoder, longest: int) -> Iterator[tuple[str, Text]]:
    """Split a text into pieces of at most `longest` tokens."""
    ids = encoder.text(written).token_ids
    for start in range(0, len(ids), longest):
        yield f"token {start}", Text(ids[start : start + longest], 1)


def _lines(written: str, path: Path, encoder: Encoder) -> Iterator[tuple[str, Text]]:
    for number, line in enumerate(written.splitlines(), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
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
    prompt = entry.get("prompt_length", 1)
    if isinstance(prompt, bool) or not isinstance(prompt, int) or not 0 <= prompt <= len(value):
        raise ValueError(f"prompt_length: got {prompt!r}, expected a whole number from 0 to {len(value)}")
    return Text(tuple(value), prompt)


def _checked(text: Text, where: str, vocab_size: int, longest: int, answered: bool) -> Text:
    wrong = [token for token in text.token_ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{where}: token_ids: got {wrong[0]}, expected ids from 0 to {vocab_size - 1}")
    kept = text.token_ids[:longest]
    return Text(kept, len(kept) if answered else max(1, min(text.prompt_length, len(kept))))
