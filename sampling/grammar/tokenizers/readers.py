"""Readers of tokenizers: tokenizer.json of the `tokenizers` library, with the token settings in the other files of a model folder; objects
of `tokenizers`, `transformers` and `sentencepiece`, recognised by their methods without importing the libraries; and tables of tiktoken,
which map the bytes of a token to its rank, which is its id."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from stepgraph.sampling.fields import check_value, checked_path, clip_repr, instance_of, is_int, optional
from stepgraph.sampling.grammar.tokenizers.table import TokenTable, decode_piece, token_decoder

MAX_JSON_BYTES = 256 << 20
_TIKTOKEN_STOPS = ("<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>")


def refuse_path(path: Path, name: str) -> NoReturn:
    """ValueError for a path that is no .gguf file and no folder with a file of this name."""
    there = next((f", such as {file}" for file in sorted(path.glob("*.gguf"))), "; nothing is downloaded")
    raise ValueError(f"path: got {str(path)!r}, expected a local folder with a {name}, or a .gguf file{there}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file."""
    if path.exists() and not path.is_file():  # reading from a pipe or a device may never end
        raise ValueError(f"{path}: expected a regular file")
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{path}: got {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
        return parse_json_object(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: not JSON: half of a surrogate pair in a string") from None
    except (ValueError, RecursionError) as error:  # int() raises ValueError for thousands of digits
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {type(value).__name__}, expected a JSON object")
    return value


def read_tokenizer_json(path: Path, logits_width: int | None) -> TokenTable:
    """A tokenizer.json, or a folder with one, whose other files name the stop tokens and the width of the logits."""
    if not path.is_dir():
        return table_of_tokenizer_json(read_json(path), str(path), logits_width)
    config = _read_json_if_exists(path / "config.json")
    return read_folder(path, config, _vocab_size(config) if logits_width is None else logits_width)


def read_folder(folder: Path, config: Mapping[str, Any], logits_width: int | None) -> TokenTable:
    """tokenizer.json of a model folder; the stop tokens from generation_config.json, else `config`, else tokenizer_config.json."""
    path, stated = folder / "tokenizer.json", _read_json_if_exists(folder / "tokenizer_config.json")
    tokenizer, added = read_json(path), stated_tokens(stated, str(folder / "tokenizer_config.json"))
    known = [entry["id"] for entry in added]
    own = [entry for entry in _added_tokens(tokenizer.get("added_tokens"), str(path)) if entry.get("id") not in known]
    table = table_of_tokenizer_json({**tokenizer, "added_tokens": own + added}, str(path), logits_width)
    eos_token_id = _read_json_if_exists(folder / "generation_config.json").get("eos_token_id")
    stop_ids = _as_list(_text_config(config).get("eos_token_id", config.get("eos_token_id")) if eos_token_id is None else eos_token_id)
    if not stop_ids:
        eos_token = stated.get("eos_token")
        stop_ids = _as_list(table.control_ids_by_name.get(str(eos_token.get("content") if isinstance(eos_token, dict) else eos_token)))
    table.stop_ids = stop_ids
    return table


def table_of_tokenizer_json(tokenizer: Mapping[str, Any], where: str, logits_width: int | None) -> TokenTable:
    decode = token_decoder(tokenizer.get("decoder"), tokenizer.get("pre_tokenizer"), where)
    table = TokenTable(where, logits_width)
    texts: dict[object, str] = {}
    for text, token_id in _model_tokens(tokenizer.get("model"), where):
        table.add(token_id, decode(text), text)
        _record_text(texts, token_id, text, f"{where}: model.vocab")
    for entry in _added_tokens(tokenizer.get("added_tokens"), where):
        text, token_id = entry["content"], entry.get("id")
        table.add(token_id, None if entry.get("special") else decode(text), text)
        _record_text(texts, token_id, text, f"{where}: added_tokens")
    for token_id, name in _unknown_token(tokenizer["model"]):
        table.add(token_id, None, name)
    return table


def _record_text(texts: dict[object, str], token_id: object, text: str, where: str) -> None:
    if texts.setdefault(token_id, text) != text:
        raise ValueError(f"{where}: got two texts for the id {token_id}, {texts[token_id]!r:.60} and {text!r:.60}")


def _unknown_token(model: Mapping[str, Any]) -> list[tuple[object, str]]:
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


def _added_tokens(entries: object, where: str) -> list[dict[str, Any]]:
    entries = entries or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and isinstance(entry.get("content"), str) for entry in entries):
        raise ValueError(f"{where}: added_tokens: got {clip_repr(entries)}, expected a list of objects with a content")
    return entries


def stated_tokens(config: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """`added_tokens_decoder` of a tokenizer_config.json, which takes precedence over tokenizer.json: entries with their ids, in order."""
    found = config.get("added_tokens_decoder") or {}
    if not isinstance(found, dict) or not all(key.isdecimal() and len(key) < 10 for key in found):
        raise ValueError(f"{where}: added_tokens_decoder: got {clip_repr(found)}, expected an object with the ids of tokens as names")
    entries = _added_tokens(list(found.values()), f"{where}: added_tokens_decoder")
    return sorted(({**entry, "id": int(key)} for key, entry in zip(found, entries, strict=True)), key=lambda entry: entry["id"])


def _read_json_if_exists(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text settings, which are in a separate section in multimodal models."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    width = _text_config(config).get("vocab_size")
    return width if is_int(width) else None


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def read_tokenizer_object(tokenizer: Any, logits_width: int | None) -> TokenTable:
    """The table of a tokenizer object; ValueError for an object of another kind."""
    where = f"{type(tokenizer).__module__.partition('.')[0]}.{type(tokenizer).__name__}"
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    pieces = getattr(tokenizer, "sp_model", None) or tokenizer
    if hasattr(backend, "to_str") and hasattr(backend, "get_added_tokens_decoder"):
        table = table_of_tokenizer_json(parse_json_object(backend.to_str(), where), where, logits_width)
    elif hasattr(pieces, "id_to_piece") and hasattr(pieces, "is_byte"):
        table = _piece_table(pieces, where, logits_width)
        _check_ids(tokenizer, pieces, where)
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            table.add(token_id, None if token.special else token.content.encode(), token.content)
    else:
        expected = "one of tokenizers, sentencepiece or transformers, whose bytes are known (for tiktoken: from_tiktoken)"
        raise ValueError(f"Vocabulary.from_tokenizer: got {where}, expected {expected}")
    table.stop_ids = _stop_ids(tokenizer, pieces)
    return table


def _piece_table(pieces: Any, where: str, logits_width: int | None) -> TokenTable:
    """The table of a sentencepiece.SentencePieceProcessor."""
    table = TokenTable(where, logits_width)
    for token_id in range(pieces.vocab_size()):
        piece: str = pieces.id_to_piece(token_id)
        no_text = pieces.is_control(token_id) or pieces.is_unknown(token_id) or pieces.is_unused(token_id)
        table.add(token_id, None if no_text else decode_piece(piece, pieces.is_byte(token_id)), piece)
    return table


def _check_ids(tokenizer: Any, pieces: Any, where: str) -> None:
    """ValueError if the ids of the tokenizer differ from those of its sentencepiece model (some insert ids before the pieces)."""
    if tokenizer is pieces:
        return
    for token_id in range(pieces.vocab_size()):
        try:
            token = tokenizer.convert_ids_to_tokens(token_id)
        except LookupError:
            token = None
        if token != pieces.id_to_piece(token_id):
            got = f"got {token!r:.60} for id {token_id}, {pieces.id_to_piece(token_id)!r:.60} in its sentencepiece model"
            raise ValueError(f"Vocabulary.from_tokenizer: {where}: {got}, expected the ids of the model")


def _stop_ids(tokenizer: Any, pieces: Any) -> list[object]:
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None and hasattr(pieces, "eos_id"):
        eos = pieces.eos_id() if pieces.eos_id() >= 0 else None
    return [] if eos is None else [eos]


def table_of_ranks(ranks: Any, special_tokens: Mapping[str, int] | None, logits_width: int | None) -> TokenTable:
    """The table of a .tiktoken file, of a dict of tokens and ranks, or of a tiktoken.Encoding."""
    check_value("special_tokens", special_tokens, optional(instance_of(Mapping, "a mapping of texts to ids")))
    if isinstance(ranks, (str, Path)):
        where, ranks_by_token = str(ranks), read_ranks(checked_path("ranks", ranks))
    elif isinstance(ranks, Mapping):
        where, ranks_by_token = "Vocabulary.from_tiktoken", dict(ranks)
    elif hasattr(ranks, "token_byte_values") and hasattr(ranks, "encode_single_token"):
        if special_tokens is not None:
            raise ValueError("Vocabulary.from_tiktoken.special_tokens: got a value beside an Encoding, expected None")
        where = f"tiktoken.{ranks.name}"
        special_tokens = {name: ranks.encode_single_token(name) for name in ranks.special_tokens_set}
        ranks_by_token = {token: ranks.encode_single_token(token) for token in ranks.token_byte_values()}
    else:
        raise ValueError(f"Vocabulary.from_tiktoken: got {type(ranks).__name__}, expected a .tiktoken file, its ranks, or an Encoding")
    table = TokenTable(where, logits_width)
    for token, rank in ranks_by_token.items():
        if not isinstance(token, bytes):
            raise ValueError(f"{where}: got the token {token!r:.60}, expected bytes")
        if is_int(rank) and rank in table.tokens:
            raise ValueError(f"{where}: got the rank {rank} for {table.tokens[rank]!r:.60} and {token!r:.60}, expected one token per rank")
        table.add(rank, token)
    for name, token_id in (special_tokens or {}).items():
        if not isinstance(name, str) or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"{where}: got the special token {name!r:.60}, expected text without surrogates")
        if is_int(token_id) and token_id in table.tokens and token_id not in table.control_ids_by_name.values():
            raise ValueError(f"{where}: special token {name!r:.60} has the id {token_id}, also that of {table.tokens[token_id]!r:.60}")
        table.add(token_id, None, name)
    table.stop_ids = [table.control_ids_by_name[name] for name in _TIKTOKEN_STOPS if name in table.control_ids_by_name]
    return table


def read_ranks(path: Path) -> dict[bytes, int]:
    """A .tiktoken file: one token in base64 and its rank per line."""
    ranks = dict[bytes, int]()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token, token_id = base64.b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}: line {number}: got {line[:60]!r}, expected a token in base64 and its rank") from None
        if ranks.setdefault(token, token_id) != token_id:
            raise ValueError(f"{path}: line {number}: got {token!r:.60} a second time, with the rank {token_id}, expected it once")
    return ranks
