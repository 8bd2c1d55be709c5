"""Small tokenizers of each kind, built with their own libraries, and a check that a vocabulary decodes as they do."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from stepgraph.sampling.grammar import Vocabulary

TEXTS = [
    "the cat sat on the mat",
    'na\u00efve caf\u00e9 \u6f22\u5b57 {"a": 1, "b": [true]}\n',
    "don't \u00ab\u00a0quote\u00a0\u00bb \U0001f600 ok",
] * 4
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
Ids = Sequence[int]


@functools.cache
def byte_level() -> Tokenizer:
    """Like Llama 3 and Qwen, with tokens that were added as text, some of which contain letters of the byte spelling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet))
    tokenizer.add_tokens(
        [AddedToken("<think>"), AddedToken("caf\u00e9 au lait"), AddedToken("caf\u00e9"), AddedToken("\u0120x"), AddedToken("\uff5c")]
    )
    return tokenizer


@functools.cache
def pieces(fallback: bool) -> Tokenizer:
    """Like Llama 2 and Mistral; without byte fallback <0x0A> is six characters of text."""
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "\u2581")})
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\u2581the", "a\u2581b", "\u2581\u2581"]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=fallback))
    steps: list[Any] = [decoders.Replace("\u2581", " "), *([decoders.ByteFallback()] if fallback else []), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<think>", "\u2581tail"])
    return tokenizer


@functools.cache
def unigram() -> Tokenizer:
    """Like T5."""
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "\u2581")})
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in [*SPECIAL, *letters, "\u2581the"]], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@functools.cache
def sentence_pieces() -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    options: dict[str, Any] = {"vocab_size": 330, "byte_fallback": True, "model_type": "bpe", "user_defined_symbols": ["<call>"]}
    options |= {"minloglevel": 9, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}  # as of Llama 2
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=written, **options)
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "pieces": functools.partial(pieces, True),
    "pieces without bytes": functools.partial(pieces, False),
    "unigram": unigram,
}


@functools.cache
def tokenizer_vocabulary(kind: str) -> Vocabulary:
    return Vocabulary.from_tokenizer(TOKENIZERS[kind]())


def is_text_of(table: Vocabulary, ids: Ids, text: str, stripped: bool) -> bool:
    """Sentencepiece decoders remove a leading space of the whole text. Replacements of broken characters differ."""
    found = table.decode(ids)
    try:
        return text in (found.decode(), found.decode().removeprefix(" " if stripped else ""))
    except UnicodeDecodeError:
        return "\ufffd" in text


def sequences(table: Vocabulary, rounds: int) -> list[list[int]]:
    """Random tokens, and some characters byte by byte."""
    random, some = Random(0), sorted(set(range(len(table.tokens))) - table.non_text_ids)
    single = {token: token_id for token_id, token in enumerate(table.tokens) if len(token) == 1 and token_id not in table.non_text_ids}

    def one() -> list[int]:
        spelled = random.choice(["a", "\u00e9", "\u6f22", "\U0001f600", "\n"]).encode()
        in_bytes = random.random() < 0.3 and all(bytes([byte]) in single for byte in spelled)
        return [single[bytes([byte])] for byte in spelled] if in_bytes else [random.choice(some)]

    return [[token_id for _ in range(random.randint(1, 8)) for token_id in one()] for _ in range(rounds)]


def differences(table: Vocabulary, decode: Callable[[list[int]], str], stripped: bool = False) -> int:
    """The number of random sequences that the table and the tokenizer decode differently."""
    return sum(not is_text_of(table, ids, decode(ids), stripped) for ids in sequences(table, 300))
