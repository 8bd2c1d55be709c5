"""The tokenizer inside a GGUF file, as one of the `tokenizers` library.

Reads the metadata itself: the gguf package takes seconds for what is 50,000 short texts.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.runtime.models.files.chat_template import ChatTemplate
from stepgraph.runtime.models.files.tokenizer import SPECIAL, OpenedTokenizer, library
from stepgraph.sampling.grammar.tokenizers.gguf_fields import table_of_fields
from stepgraph.sampling.grammar.vocabulary import Vocabulary

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by the format's type
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4  # token types
_LONG = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _Split(NamedTuple):
    """How a family cuts a text before it merges letters."""

    pattern: str = ""  # empty: GPT-2's own
    single_digits: bool = False
    whole_words: bool = False  # a piece that is a token is taken as it is
    composed: bool = False  # letters and accents become one
    begins: bool = False  # a text begins with the begin token, where the file does not say


_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "qwen2": _Split(_WORDS + r"\p{N}" + _REST, composed=True),
    "llama-bpe": _Split(_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True, begins=True),
}


def open_gguf(path: Path) -> OpenedTokenizer:
    fields = read_metadata(path)
    texts = fields.get("tokenizer.ggml.tokens") or []
    ids = {name: fields.get(f"tokenizer.ggml.{_LONG[name]}_token_id") for name in SPECIAL}
    special = {name: texts[place] for name, place in ids.items() if isinstance(place, int) and 0 <= place < len(texts)}
    split = _SPLITS.get(str(fields.get("tokenizer.ggml.pre"))) if fields.get("tokenizer.ggml.model") == "gpt2" else None
    template = fields.get("tokenizer.chat_template")
    begins = fields.get("tokenizer.ggml.add_bos_token", None if split is None else split.begins)
    return OpenedTokenizer(
        _converted(path) if split is None else _made(path, fields, split),
        ids["bos_token"],
        begins if isinstance(begins, bool) else None,
        ChatTemplate(template, special) if isinstance(template, str) else None,
        lambda: Vocabulary.from_table(table_of_fields(fields.get, path, None)),
    )


def _made(path: Path, fields: dict[str, Any], split: _Split) -> Any:
    made = library(path)
    try:
        texts, types, merges = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
        merges = [tuple(merge.split(" ")) for merge in merges]
        model = made.models.BPE({text: place for place, text in enumerate(texts)}, merges, ignore_merges=split.whole_words)
        tokenizer = made.Tokenizer(model)
        added = {place: type_ for place, type_ in enumerate(types) if type_ in (_CONTROL, _USER_DEFINED)}
        tokenizer.add_tokens([made.AddedToken(texts[place], special=type_ == _CONTROL, normalized=False) for place, type_ in added.items()])
    except Exception as error:  # the library raises bare ones
        raise ValueError(f"{path}: tokenizer.ggml: no tokenizer could be made: {error!r:.200}") from None
    pieces = made.pre_tokenizers
    steps = [pieces.Digits(individual_digits=True)] if split.single_digits else []
    if split.pattern:
        steps.append(pieces.Split(made.Regex(split.pattern), "isolated"))
    tokenizer.pre_tokenizer = pieces.Sequence([*steps, pieces.ByteLevel(add_prefix_space=False, use_regex=not split.pattern)])
    if split.composed:
        tokenizer.normalizer = made.normalizers.NFC()
    return tokenizer


def _converted(path: Path) -> Any:
    """Of the other kinds `transformers` knows more."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError(f"{path}: a tokenizer of this kind needs the transformers package: pip install transformers") from None
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        found = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        return found.backend_tokenizer
    except Exception as error:  # the library raises whatever its parsers raise
        raise ValueError(f"{path}: no tokenizer could be read: {error}") from None


def read_metadata(path: Path) -> dict[str, Any]:
    """The entries of a GGUF file by name. ValueError where it is cut off or lies about a size."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Reader(mapped).entries()
    except (ValueError, struct.error, KeyError, OSError) as error:
        raise ValueError(f"{path}: no whole GGUF file: {error}") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place = data, 0

    def entries(self) -> dict[str, Any]:
        magic, _, version = self._data[:4], self._number("I"), self._number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"got the beginning {magic!r}, version {version}, want GGUF of version 2 or 3")
        self._number("Q")  # of tensors
        return {self._text(): self._value(self._number("I")) for _ in range(self._count(1))}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        inner = self._number("I")
        if inner == _STRING:
            return [self._text() for _ in range(self._count(8))]
        size = struct.calcsize("<" + _NUMBERS[inner])
        count = self._count(size)
        values = struct.unpack_from(f"<{count}{_NUMBERS[inner]}", self._data, self._place)
        self._place += count * size
        return list(values)

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self._data, self._place)
        self._place += struct.calcsize("<" + form)
        return value

    def _text(self) -> str:
        length = self._count(1)
        self._place += length
        return self._data[self._place - length : self._place].decode("utf-8", "replace")

    def _count(self, least: int) -> int:
        """How many follow, of at least so many bytes each."""
        count: int = self._number("Q")
        if count > (len(self._data) - self._place) // least:
            raise ValueError(f"got {count} entries at byte {self._place}, where the file is too short for them")
        return count
