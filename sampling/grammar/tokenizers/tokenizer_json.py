"""tokenizer.json of the `tokenizers` library, and the token settings in the other files of a model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepgraph.sampling.fields import clip_repr, is_int
from stepgraph.sampling.grammar.tokenizers.table import TokenTable, spelling_of

MAX_JSON_BYTES = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file."""
    if path.exists() and not path.is_file():  # reading a pipe or a device might never end
        raise ValueError(f"{path}: expected a regular file")
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{path}: got {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
        return parse_object(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None


def parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: not JSON: half of a surrogate pair in a string") from None
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: got {type(found).__name__}, expected a JSON object")
    return found


def read_tokenizer_json(path: Path, logits_width: int | None) -> TokenTable:
    """A tokenizer.json, or a folder with one, whose other files name the stop tokens and the width of the logits."""
    if not path.is_dir():
        return table_of_json(read_json(path), str(path), logits_width)
    config = _optional(path / "config.json")
    return read_folder(path, config, _width(config) if logits_width is None else logits_width)


def read_folder(folder: Path, config: Mapping[str, Any], logits_width: int | None) -> TokenTable:
    """tokenizer.json of a model folder; the stop tokens from generation_config.json, else `config`, else tokenizer_config.json."""
    path = folder / "tokenizer.json"
    table = table_of_json(read_json(path), str(path), logits_width)
    named = _optional(folder / "generation_config.json").get("eos_token_id")
    stop_ids = _listed(_text_part(config).get("eos_token_id", config.get("eos_token_id")) if named is None else named)
    if not stop_ids:
        written = _optional(folder / "tokenizer_config.json").get("eos_token")
        stop_ids = _listed(table.control.get(str(written.get("content") if isinstance(written, dict) else written)))
    table.stop_ids = stop_ids
    return table


def table_of_json(tokenizer: Mapping[str, Any], where: str, logits_width: int | None) -> TokenTable:
    """The table of a parsed tokenizer.json."""
    spell = spelling_of(tokenizer.get("decoder"), tokenizer.get("pre_tokenizer"), where)
    table = TokenTable(where, logits_width)
    texts: dict[object, str] = {}
    for text, token_id in _model_tokens(tokenizer.get("model"), where):
        table.add(token_id, spell(text), text)
        _record_text(texts, token_id, text, f"{where}: model.vocab")
    for entry in _added(tokenizer.get("added_tokens"), where):
        text, token_id = entry["content"], entry.get("id")
        table.add(token_id, None if entry.get("special") else spell(text), text)
        _record_text(texts, token_id, text, f"{where}: added_tokens")
    for token_id, name in _unknown(tokenizer["model"]):
        table.add(token_id, None, name)
    return table


def _record_text(texts: dict[object, str], token_id: object, text: str, where: str) -> None:
    if texts.setdefault(token_id, text) != text:
        raise ValueError(f"{where}: got two texts for the id {token_id}, {texts[token_id]!r:.60} and {text!r:.60}")


def _unknown(model: Mapping[str, Any]) -> list[tuple[object, str]]:
    """The token for unknown input, which represents no text whether or not it is also an added token."""
    vocab, name, token_id = model["vocab"], model.get("unk_token"), model.get("unk_id")
    if isinstance(vocab, dict):
        return [(vocab[name], name)] if isinstance(name, str) and name in vocab else []
    return [(token_id, vocab[token_id][0])] if is_int(token_id) and 0 <= token_id < len(vocab) else []


def _model_tokens(model: object, where: str) -> list[tuple[str, object]]:
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    kind = model.get("type") if isinstance(model, Mapping) else None
    if kind == "BPE" and isinstance(vocab, dict):
        return list(vocab.items())
    if kind == "Unigram" and isinstance(vocab, list) and all(isinstance(one, list) and one and isinstance(one[0], str) for one in vocab):
        return [(piece, token_id) for token_id, (piece, *_) in enumerate(vocab)]
    expected = "expected a model of type BPE or Unigram with a vocab (in WordPiece and WordLevel the text depends on adjacent tokens)"
    raise ValueError(f"{where}: model: got the type {kind!r:.60}, {expected}")


def _added(entries: object, where: str) -> list[dict[str, Any]]:
    entries = entries or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and isinstance(entry.get("content"), str) for entry in entries):
        raise ValueError(f"{where}: added_tokens: got {clip_repr(entries)}, expected a list of objects with a content")
    return entries


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal models keep the text settings in a section of their own."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _width(config: Mapping[str, Any]) -> int | None:
    width = _text_part(config).get("vocab_size")
    return width if is_int(width) else None


def _listed(named: object) -> list[object]:
    return named if isinstance(named, list) else [] if named is None else [named]
