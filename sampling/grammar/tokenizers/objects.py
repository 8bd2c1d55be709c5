"""Tokenizer objects of `tokenizers`, `transformers` and `sentencepiece`, recognised by their methods without importing the libraries, and
tables of tiktoken, in which a token is bytes with a rank, which is its id."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepgraph.sampling.fields import check_value, checked_path, instance_of, is_int, optional
from stepgraph.sampling.grammar.tokenizers.table import TokenTable, decode_piece
from stepgraph.sampling.grammar.tokenizers.tokenizer_json import parse_object, table_of_json

_TIKTOKEN_STOPS = ("<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>")


def read_object(tokenizer: Any, logits_width: int | None) -> TokenTable:
    """The table of a tokenizer object; ValueError for an object of another kind."""
    where = f"{type(tokenizer).__module__.partition('.')[0]}.{type(tokenizer).__name__}"
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    pieces = getattr(tokenizer, "sp_model", None) or tokenizer
    if hasattr(backend, "to_str") and hasattr(backend, "get_added_tokens_decoder"):
        table = table_of_json(parse_object(backend.to_str(), where), where, logits_width)
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
    """ValueError where the tokenizer numbers tokens differently from its sentencepiece model (some insert ids before the pieces)."""
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
        where, found = str(ranks), read_ranks(checked_path("ranks", ranks))
    elif isinstance(ranks, Mapping):
        where, found = "Vocabulary.from_tiktoken", dict(ranks)
    elif hasattr(ranks, "token_byte_values") and hasattr(ranks, "encode_single_token"):
        if special_tokens is not None:
            raise ValueError("Vocabulary.from_tiktoken.special_tokens: got a value beside an Encoding, expected None")
        where = f"tiktoken.{ranks.name}"
        special_tokens = {name: ranks.encode_single_token(name) for name in ranks.special_tokens_set}
        found = {token: ranks.encode_single_token(token) for token in ranks.token_byte_values()}
    else:
        raise ValueError(f"Vocabulary.from_tiktoken: got {type(ranks).__name__}, expected a .tiktoken file, its ranks, or an Encoding")
    table = TokenTable(where, logits_width)
    for token, rank in found.items():
        if not isinstance(token, bytes):
            raise ValueError(f"{where}: got the token {token!r:.60}, expected bytes")
        table.add(rank, token)
    for name, token_id in (special_tokens or {}).items():
        if not isinstance(name, str) or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"{where}: got the special token {name!r:.60}, expected text without surrogates")
        if is_int(token_id) and token_id in table.tokens and token_id not in table.control.values():
            raise ValueError(f"{where}: special token {name!r:.60} has the id {token_id}, also that of {table.tokens[token_id]!r:.60}")
        table.add(token_id, None, name)
    table.stop_ids = [table.control[name] for name in _TIKTOKEN_STOPS if name in table.control]
    return table


def read_ranks(path: Path) -> dict[bytes, int]:
    """A .tiktoken file: one token in base64 and its rank per line."""
    found = dict[bytes, int]()
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
        if found.setdefault(token, token_id) != token_id:
            raise ValueError(f"{path}: line {number}: got {token!r:.60} a second time, with the rank {token_id}, expected it once")
    return found
