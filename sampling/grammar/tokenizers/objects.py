"""Tokenizer objects of `tokenizers`, `transformers` and `sentencepiece`, recognised by their methods without importing the libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepgraph.sampling.grammar.tokenizers.spelling import SPACE_MARK, decode_byte_escape
from stepgraph.sampling.grammar.tokenizers.table import TokenTable
from stepgraph.sampling.grammar.tokenizers.tokenizer_json import parse_object, table_of_json


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
        _add_added(table, getattr(tokenizer, "added_tokens_decoder", {}))
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
        if pieces.is_control(token_id) or pieces.is_unknown(token_id) or pieces.is_unused(token_id):
            table.add_control(token_id, piece)
        else:
            table.add(token_id, decode_byte_escape(piece) if pieces.is_byte(token_id) else piece.replace(SPACE_MARK, " ").encode(), piece)
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


def _add_added(table: TokenTable, added: Mapping[int, Any]) -> None:
    for token_id, token in added.items():
        if token.special:
            table.add_control(token_id, token.content)
        else:
            table.add(token_id, token.content.encode(), token.content)


def _stop_ids(tokenizer: Any, pieces: Any) -> list[object]:
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None and hasattr(pieces, "eos_id"):
        eos = pieces.eos_id() if pieces.eos_id() >= 0 else None
    return [] if eos is None else [eos]
