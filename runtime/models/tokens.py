"""From a tokenizer's files to the table that grammars need: which bytes each id stands for, which ids are no text, which end it.

Byte-level tables (Llama 3, Qwen, SmolLM2) spell each byte as a letter; sentence pieces (Llama 2, Mistral) write a space as a
low line and bytes as <0x0A>. Encoding text is left to the tokenizer's own library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepgraph.runtime.models.gguf_file import GgufSource
from stepgraph.runtime.models.weights import read_json
from stepgraph.sampling.grammar.vocabulary import Vocabulary, is_int

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
# In a GGUF file's table of token types.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


def folder_vocabulary(folder: Path, config: Mapping[str, Any], logits_width: int) -> Vocabulary:
    """The table of tokenizer.json, with the stop ids that generation_config.json or config.json names."""
    path = folder / "tokenizer.json"
    read = read_json(path)
    model = read.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ValueError(f"{path}: got a tokenizer of another kind, want a model of type BPE with a vocab")
    added = read.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) and isinstance(entry.get("content"), str) for entry in added):
        raise ValueError(f"{path}: added_tokens: want a list of objects with a content")
    byte_level = '"ByteLevel"' in str([read.get("pre_tokenizer"), read.get("decoder")]).replace("'", '"')
    spelled = [(text, token_id, False) for text, token_id in model["vocab"].items()]
    spelled += [(entry["content"], entry.get("id"), True) for entry in added]
    table: dict[int, bytes] = {}
    for text, token_id, whole in spelled:
        if not is_int(token_id) or not 0 <= token_id < logits_width:
            raise ValueError(f"{path}: token {text!r:.60} has the id {token_id!r}, want one from 0 to {logits_width - 1}")
        table[token_id] = text.encode() if whole else token_bytes(text, byte_level)
    control = [entry["id"] for entry in added if entry.get("special")]
    stops = _folder_stops(folder, config)
    return _vocabulary(path, table, stops, control, logits_width)


def gguf_vocabulary(source: GgufSource, path: Path, logits_width: int) -> Vocabulary:
    """The table inside a GGUF file."""
    texts, types = source.field("tokenizer.ggml.tokens"), source.field("tokenizer.ggml.token_type")
    kind = source.field("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama") or not texts or not types or len(types) != len(texts) or len(texts) > logits_width:
        raise ValueError(f"{path}: tokenizer.ggml: got the model {kind!r:.60}, want 'gpt2' or 'llama' with tokens and their types")
    table = {
        token_id: text.encode() if types[token_id] == _USER_DEFINED else token_bytes(text, kind == "gpt2")
        for token_id, text in enumerate(texts)
    }
    control = [token_id for token_id, type_ in enumerate(types) if type_ in (_UNKNOWN, _CONTROL, _UNUSED)]
    ends = (source.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return _vocabulary(path, table, [end for end in ends if end is not None], control, logits_width)


def token_bytes(text: str, byte_level: bool) -> bytes:
    """What a token spells."""
    if byte_level:
        return b"".join(bytes([_LETTER_BYTES[letter]]) if letter in _LETTER_BYTES else letter.encode() for letter in text)
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


def _letter_bytes() -> dict[str, int]:
    """Byte-level spelling: a byte that prints in Latin-1 is its own letter, the others take letters from 256 on, in order."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_LETTER_BYTES = _letter_bytes()


def _folder_stops(folder: Path, config: Mapping[str, Any]) -> list[int]:
    generation = folder / "generation_config.json"
    named = read_json(generation).get("eos_token_id") if generation.exists() else None
    named = config.get("eos_token_id") if named is None else named
    return named if isinstance(named, list) else [] if named is None else [named]


def _vocabulary(where: Path, table: Mapping[int, bytes], stops: list[Any], control: Iterable[int], logits_width: int) -> Vocabulary:
    tokens = [table.get(token_id, b"") for token_id in range(max(table, default=-1) + 1)]
    try:
        return Vocabulary(tokens, stops, logits_width, [token_id for token_id in control if token_id not in stops])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
