"""The tokenizer of a GGUF file as one of the `tokenizers` library."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.sampling.grammar.tokenizers.table import END_OF_TURN

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types of GGUF
_PHI_3_KEPT = ("<unk>", "<s>", "<|endoftext|>")  # spaces after other added tokens are ignored; files do not state it
_WORD_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = (rf"[{letters}\p{{Lm}}\p{{Lo}}\p{{M}}]" for letters in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_CASE_PATTERNS = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{some}{_LOWER}{more}" for some, more in ("*+", "+*")]
_CASE_ENDINGS = [rf"{each}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for each in _CASE_PATTERNS]
_REST_PATTERN = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How a family splits a text before byte-pair merges."""

    patterns: tuple[str, ...] = ()  # each splits the pieces of the one before; empty: GPT-2's own
    single_digits: bool = False
    ignore_merges: bool = False  # a piece that is a token stays whole
    nfc: bool = False
    adds_begin_id: bool = False  # used if the file has no add_bos_token


_QWEN_2 = PreTokenizer((_WORD_PATTERN + r"\p{N}" + _REST_PATTERN,), nfc=True)
_LLAMA_3 = PreTokenizer((_WORD_PATTERN + r"\p{N}{1,3}" + _REST_PATTERN,), ignore_merges=True, adds_begin_id=True)
PRE_TOKENIZERS = {  # by tokenizer.ggml.pre, as in llama.cpp
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN_2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA_3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA_3._replace(ignore_merges=False, adds_begin_id=False)),
    "tekken": _LLAMA_3._replace(patterns=("|".join((*_CASE_PATTERNS, r"\p{N}")) + _REST_PATTERN.replace(r"[\r\n]*", r"[\r\n/]*"),)),
    "gpt-4o": PreTokenizer(("|".join((*_CASE_ENDINGS, r"\p{N}{1,3}")) + _REST_PATTERN.replace(r"[\r\n]*", r"[\r\n/]*"),)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
}


def build_gguf_tokenizer(library: Any, path: Path, metadata: Mapping[str, Any], pre_tokenizer: PreTokenizer | None) -> Any:
    """library: `tokenizers`. pre_tokenizer: of byte pairs; None: a SentencePiece tokenizer."""
    try:
        texts, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
        tokenizer = _pieces(library, metadata) if pre_tokenizer is None else _byte_pairs(library, metadata, pre_tokenizer)
        types = [_CONTROL if text in END_OF_TURN else type_ for text, type_ in zip(texts, types, strict=True)]  # as in the token table
        added = [(texts[token_id], type_ == _CONTROL) for token_id, type_ in enumerate(types) if type_ in (_CONTROL, _USER_DEFINED)]
        phi_3 = pre_tokenizer is None and metadata.get("general.architecture") == "phi3"
        strips = [phi_3 and text not in _PHI_3_KEPT for text, _ in added]
        token = functools.partial(library.AddedToken, normalized=False)
        tokenizer.add_tokens([token(text, special=special, rstrip=strip) for (text, special), strip in zip(added, strips, strict=True)])
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: tokenizer.ggml: the tokenizer cannot be built: {error!r:.200}") from None
    return tokenizer


def _byte_pairs(library: Any, metadata: Mapping[str, Any], pre_tokenizer: PreTokenizer) -> Any:
    ids = {text: token_id for token_id, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = library.Tokenizer(library.models.BPE(ids, merges, ignore_merges=pre_tokenizer.ignore_merges))
    pre = library.pre_tokenizers
    steps = [pre.Digits(individual_digits=True)] if pre_tokenizer.single_digits else []
    steps += [pre.Split(library.Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    tokenizer.pre_tokenizer = pre.Sequence([*steps, pre.ByteLevel(add_prefix_space=False, use_regex=not pre_tokenizer.patterns)])
    if pre_tokenizer.nfc:
        tokenizer.normalizer = library.normalizers.NFC()
    return tokenizer


def _pieces(library: Any, metadata: Mapping[str, Any]) -> Any:
    """Merges are all pairs of tokens that together are a token, those of the highest score first."""
    texts, types, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    ids = {text: token_id for token_id, text in enumerate(texts)}
    known = {text for text, type_ in zip(texts, types, strict=True) if type_ == _NORMAL}
    pairs = [(text, place) for text in known for place in range(1, len(text)) if text[:place] in known and text[place:] in known]
    pairs.sort(key=lambda pair: (-scores[ids[pair[0]]], ids[pair[0]], pair[1]))
    merges = [(text[:place], text[place:]) for text, place in pairs]
    unknown = texts[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    tokenizer = library.Tokenizer(library.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace, prepend = library.normalizers.Replace(" ", "\u2581"), library.normalizers.Prepend("\u2581")
    # As in llama.cpp, a text after a control token starts with a space, too.
    steps = [prepend, replace] if metadata.get("tokenizer.ggml.add_space_prefix", True) else [replace]
    tokenizer.normalizer = library.normalizers.Sequence(steps)
    return tokenizer
