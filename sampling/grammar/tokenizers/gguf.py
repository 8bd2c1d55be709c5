"""GGUF files: the header (metadata and tensor table), and the vocabulary inside it.

The `gguf` package needs 5 s for the metadata of 49,000 tokens, and does not terminate on some files with wrong lengths. This
reader needs 0.1 s and checks every length against the size of the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.sampling.grammar.tokenizers.table import END_OF_TURN, MAX_IDS, TokenTable, decode_byte_letters, decode_piece

MAX_GGUF_ENTRIES = 2 * MAX_IDS  # tensors, metadata entries and array values of one file
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by value type
_STRING, _ARRAY = 8, 9
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # token types

_GPT_OSS_STOPS = ("<|return|>", "<|call|>", "<|endoftext|>")


class GgufTensor(NamedTuple):
    shape: tuple[int, ...]  # outermost dimension first
    kind: int  # ggml tensor type
    offset: int  # in bytes from the start of the file


class GgufHeader(NamedTuple):
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ValueError for a file that is incomplete, inconsistent or not GGUF version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(data).read()
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file or directory, expected a .gguf file") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not a complete GGUF file: {error}") from None


class _HeaderReader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._entries = data, 0

    def read(self) -> GgufHeader:
        magic, version = self._bytes(4), self._number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"got magic {magic!r} and version {version}, expected GGUF and version 2 or 3, little-endian")
        num_tensors = self._count()
        metadata = {self._text(): self._value(self._number("I")) for _ in range(self._count())}
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = self._text()
            if name in tensors:
                raise ValueError(f"got the tensor {name!r:.100} twice")
            shape = tuple(reversed([self._number("Q") for _ in range(self._number("I"))]))
            tensors[name] = GgufTensor(shape, self._number("I"), self._number("Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment: got {alignment!r:.100}, expected a power of two")
        start = -(-self._data.tell() // alignment) * alignment
        return GgufHeader(metadata, {name: entry._replace(offset=start + entry.offset) for name, entry in tensors.items()})

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._format(kind))
        item_kind, count = self._number("I"), self._count()
        if item_kind == _STRING:
            return [self._text() for _ in range(count)]
        return list(self._unpack(f"{count}{self._format(item_kind)}"))

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"got a value of type {kind} before byte {self._data.tell()}, expected one of GGUF's scalar types")
        return _NUMBERS[kind]

    def _count(self) -> int:
        count: int = self._number("Q")
        self._entries += count
        if self._entries > MAX_GGUF_ENTRIES:
            raise ValueError(f"got {self._entries} tensors, metadata entries and array values, expected at most {MAX_GGUF_ENTRIES}")
        return count

    def _text(self) -> str:
        length = self._number("Q")
        start, content = self._data.tell(), self._bytes(length)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the text at byte {start} is not UTF-8 ({error.reason})") from None

    def _number(self, struct_format: str) -> Any:
        return self._unpack(struct_format)[0]

    def _unpack(self, struct_format: str) -> tuple[Any, ...]:
        return struct.unpack("<" + struct_format, self._bytes(struct.calcsize("<" + struct_format)))

    def _bytes(self, size: int) -> bytes:
        start = self._data.tell()
        if size > len(self._data) - start:
            raise ValueError(f"the file ends at byte {len(self._data)}, inside a value of {size} bytes that starts at byte {start}")
        return self._data.read(size)


def table_of_gguf_metadata(metadata: Mapping[str, Any], path: Path, logits_width: int | None) -> TokenTable:
    """The token table of a GGUF file, from its metadata."""
    kind, texts, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "tokens", "token_type"))
    complete = isinstance(texts, list) and isinstance(types, list) and 0 < len(texts) == len(types)
    if kind not in ("gpt2", "llama") or not complete or not all(isinstance(text, str) for text in texts or ()):
        raise ValueError(f"{path}: tokenizer.ggml: got the model {kind!r:.60}, expected 'gpt2' or 'llama' with tokens and their types")
    table = TokenTable(str(path), logits_width)
    for token_id, (text, type_) in enumerate(zip(texts or (), types or (), strict=True)):
        if type_ in (_UNKNOWN, _CONTROL, _UNUSED) or text in END_OF_TURN:  # some files of Gemma 3 state that it is text
            table.add(token_id, None, text)
        elif type_ == _USER_DEFINED:
            table.add(token_id, text.encode(), text)
        else:
            table.add(token_id, decode_byte_letters(text) if kind == "gpt2" else decode_piece(text, type_ == _BYTE), text)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    names = table.control_ids_by_name
    # Files of Phi do not state that <|end|> ends a turn. In those of GPT-OSS it ends a message, after which others may come.
    ends += map(names.get, _GPT_OSS_STOPS if _GPT_OSS_STOPS[0] in names else ("<|end|>",))
    table.stop_ids = [end for end in ends if end is not None]
    return table
