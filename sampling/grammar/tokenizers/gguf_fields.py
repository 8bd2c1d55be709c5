"""The token table inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepgraph.sampling.grammar.tokenizers.spelling import LOW_LINE, by_letters, one_byte
from stepgraph.sampling.grammar.tokenizers.table import Table
from stepgraph.sampling.grammar.vocabulary import Vocabulary

# Token types.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
# What the gguf package's reader raises on a file that is cut off or lies about its sizes.
BROKEN = (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError, OSError, MemoryError)


def from_gguf(path: Path, logits_width: int | None, stop_token_ids: Sequence[int] | None) -> Vocabulary:
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError(f"{path}: reading GGUF needs the gguf package: pip install 'stepgraph[gguf]'") from None
    try:
        fields = gguf.GGUFReader(path).fields
    except BROKEN as error:
        raise ValueError(f"{path}: no whole GGUF file: {error}") from None
    return from_fields(lambda name: fields[name].contents() if name in fields else None, path, logits_width, stop_token_ids)


def from_fields(
    read: Callable[[str], Any], path: Path, logits_width: int | None, stop_token_ids: Sequence[int] | None = None
) -> Vocabulary:
    """`read` gives a metadata entry, or None."""
    kind, texts, types = (read(f"tokenizer.ggml.{name}") for name in ("model", "tokens", "token_type"))
    if kind not in ("gpt2", "llama") or not texts or not types or len(types) != len(texts):
        raise ValueError(f"{path}: tokenizer.ggml: got the model {kind!r:.60}, want 'gpt2' or 'llama' with tokens and their types")
    table = Table(str(path), logits_width)
    for token_id, (text, type_) in enumerate(zip(texts, types, strict=True)):
        if type_ in (_UNKNOWN, _CONTROL, _UNUSED):
            table.add_control(token_id, text)
        elif type_ == _USER_DEFINED:
            table.add(token_id, text.encode(), text)
        elif kind == "gpt2":
            table.add(token_id, by_letters(text), text)
        else:
            table.add(token_id, one_byte(text) if type_ == _BYTE else text.replace(LOW_LINE, " ").encode(), text)
    ends = (read(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return table.vocabulary(list(dict.fromkeys(end for end in ends if end is not None)), stop_token_ids)
