"""The encoder of a model's folder or GGUF file, made by the `tokenizers` library, and the chat template beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.runtime.models.files.chat_template import ChatTemplate
from stepgraph.sampling.grammar.tokenizers.tokenizer_json import read_json
from stepgraph.sampling.grammar.vocabulary import Vocabulary

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class OpenedTokenizer(NamedTuple):
    tokenizer: Any  # of `tokenizers`
    begin_id: int | None  # put in front of every text where `begins` says so
    begins: bool | None  # None: as the tokenizer itself does
    template: ChatTemplate | None
    vocabulary: Callable[[], Vocabulary]

    def encode(self, text: str, begins: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=begins and self.begins is not False).ids
        if begins and self.begins and self.begin_id is not None and ids[:1] != [self.begin_id]:
            return [self.begin_id, *ids]
        return ids


def open_tokenizer(path: Path) -> OpenedTokenizer:
    """ValueError names the file, or the package that is missing."""
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".gguf" and path.is_file():
        from stepgraph.runtime.models.files.gguf_tokenizer import open_gguf

        return open_gguf(path)
    raise ValueError(f"path: got {str(path)!r}, want a local folder with a tokenizer.json, or a .gguf file")


def library(path: Path) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError(f"{path}: token ids of text need the tokenizers package: pip install 'stepgraph[text]'") from None
    return tokenizers


def _folder(folder: Path) -> OpenedTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; without it a text has no token ids")
    try:
        tokenizer = library(folder).Tokenizer.from_file(str(path))
    except ValueError:
        raise
    except Exception as error:  # the library raises bare ones
        raise ValueError(f"{path}: no tokenizer could be read: {error}") from None
    tokenizer.no_truncation()  # what a file was saved with is for training
    tokenizer.no_padding()
    told = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    special = {name: text for name in SPECIAL if (text := _text(told.get(name))) is not None}
    begins = told.get("add_bos_token")
    return OpenedTokenizer(
        tokenizer,
        tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        begins if isinstance(begins, bool) else None,
        _template(folder, told, special),
        lambda: Vocabulary.from_tokenizer_json(folder),
    )


def _template(folder: Path, told: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    """In a file of its own, or in tokenizer_config.json, alone or among several by name."""
    path = folder / "chat_template.jinja"
    given: Any = told.get("chat_template")
    if path.is_file():
        given = path.read_text(encoding="utf-8")
    if isinstance(given, list):
        named = {each["name"]: each.get("template") for each in given if isinstance(each, dict) and isinstance(each.get("name"), str)}
        given, with_tools = named.get("default"), named.get("tool_use")
    else:
        with_tools = None
    if given is None:
        return None
    if not isinstance(given, str) or not isinstance(with_tools, (str, type(None))):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template: got {given!r:.60}, want a template, or several by name")
    return ChatTemplate(given, special, with_tools)


def _text(entry: object) -> str | None:
    """A token's text, as written or in an object."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
