"""The token table inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepgraph.sampling.grammar.tokenizers.spelling import SPACE_MARK, decode_byte_escape, decode_byte_letters
from stepgraph.sampling.grammar.tokenizers.table import TokenTable

# Token types.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
# What the gguf package raises on a file that is truncated or has wrong sizes.
BROKEN = (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError, OSError, MemoryError)


def read_gguf(path: Path, logits_width: int | None) -> TokenTable:
    """Read the file with the gguf package; ValueError where it is missing or the file is broken."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError(f"{path}: reading GGUF needs the gguf package: pip install 'stepgraph[gguf]'") from None
    try:
        fields = gguf.GGUFReader(path).fields
    except BROKEN as error:
        raise ValueError(f"{path}: not a complete GGUF file: {error}") from None
    return table_of_fields(lambda name: fields[name].contents() if name in fields else None, path, logits_width)


def table_of_fields(read: Callable[[str], Any], path: Path, logits_width: int | None) -> TokenTable:
    """`read` returns a metadata entry by name, or None."""
    kind, texts, types = (read(f"tokenizer.ggml.{name}") for name in ("model", "tokens", "token_type"))
    if kind not in ("gpt2", "llama") or not texts or not types or len(types) != len(texts):
        raise ValueError(f"{path}: tokenizer.ggml: got the model {kind!r:.60}, expected 'gpt2' or 'llama' with tokens and their types")
    table = TokenTable(str(path), logits_width)
    for token_id, (text, type_) in enumerate(zip(texts, types, strict=True)):
        if type_ in (_UNKNOWN, _CONTROL, _UNUSED):
            table.add_control(token_id, text)
        elif type_ == _USER_DEFINED:
            table.add(token_id, text.encode(), text)
        elif kind == "gpt2":
            table.add(token_id, decode_byte_letters(text), text)
        else:
            table.add(token_id, decode_byte_escape(text) if type_ == _BYTE else text.replace(SPACE_MARK, " ").encode(), text)
    ends = (read(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    table.stop_ids = [end for end in ends if end is not None]
    return table
