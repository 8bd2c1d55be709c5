"""tiktoken tables: a token is bytes with a rank, which is its id. Special tokens are passed separately, by name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepgraph.sampling.fields import is_int
from stepgraph.sampling.grammar.tokenizers.table import TokenTable

_STOP_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>")


def table_of_ranks(ranks: Any, special_tokens: Mapping[str, int] | None, logits_width: int | None) -> TokenTable:
    """The table of a .tiktoken file, of a dict of tokens and ranks, or of a tiktoken.Encoding."""
    if isinstance(ranks, (str, Path)):
        where, found = str(ranks), read_ranks(Path(ranks))
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
        table.add_control(token_id, name)
    table.stop_ids = [table.control[name] for name in _STOP_NAMES if name in table.control]
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
