"""A small vocabulary, one constraint of each kind with an accepted and a rejected text, and functions to try them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import cast

import numpy as np
import torch

from stepgraph.sampling.grammar import Claim, Constraint, GrammarCompiler, MaskStatus, Matcher, Vocabulary, XGrammarMatcher
from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceMatcher

CONTROL = b"<|im_start|>"
PRINTABLE = Vocabulary.printable([b"abc", b"\xc3\xa9"])
STOP = PRINTABLE.stop_token_ids[0]
COMPILER = GrammarCompiler(PRINTABLE, max_threads=1, backend="xgrammar")  # for constraints that name none
AnyMatcher = XGrammarMatcher | LLGuidanceMatcher
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
}
TAGS = {
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "array", "items": {"type": "null"}}, "end": "</f>"},
    ],
}
EXAMPLES = {
    "json_schema": (Constraint.json_schema(PERSON), b'{"name": "abc", "age": 10}', b'{"age": 10}'),
    "json_object": (Constraint.json_object(), b'{"a": [{"b": "c"}]}', b"[1]"),
    "regex": (Constraint.regex("[a-c]{2}-[0-9]+"), b"ab-10", b"a-1"),
    "choice": (Constraint.choice(["yes", "no", 'a "quoted" \\ é\n']), b'a "quoted" \\ \xc3\xa9\n', b"maybe"),
    "ebnf": (Constraint.ebnf('start ::= "(" start ")" | "x"', root="start"), b"((x))", b"(x"),
    "structural_tag": (Constraint.structural_tag(TAGS), b"so <f=a>10</f> < <f=b>[null]</f>.", b"so <f=a>null</f>"),
}
_BY_OTHERS = [kind for kind in EXAMPLES if kind != "ebnf"]
EXAMPLES |= {f"{kind}, llguidance": (replace(EXAMPLES[kind][0], backend="llguidance"), *EXAMPLES[kind][1:]) for kind in _BY_OTHERS}
EXAMPLES["lark"] = (replace(Constraint.lark('start: "(" start ")" | "x"'), backend="llguidance"), b"((x))", b"(x")


def encode(text: bytes, vocabulary: Vocabulary = PRINTABLE) -> list[int]:
    """Longest match first, so that the longer tokens are used."""
    ids, start = [], 0
    by_length = sorted(
        (i for i in range(len(vocabulary.tokens)) if i not in vocabulary.non_text_ids), key=lambda i: -len(vocabulary.tokens[i])
    )
    while start < len(text):
        token_id = next(i for i in by_length if text.startswith(vocabulary.tokens[i], start))
        ids.append(token_id)
        start += len(vocabulary.tokens[token_id])
    return ids


def matcher_of(constraint: Constraint) -> AnyMatcher:
    return cast(AnyMatcher, COMPILER.compile(constraint).matcher())


def accepts(constraint: Constraint, text: bytes) -> bool:
    matcher = matcher_of(constraint)
    return all(matcher.accept_token(token_id) for token_id in encode(text)) and matcher.accept_token(STOP)


def fill_mask(matcher: Matcher, words: int = PRINTABLE.mask_words) -> tuple[MaskStatus, list[int]]:
    masks = torch.full((3, words), 0x5A5A5A5A, dtype=torch.int32)
    status, rows = matcher.fill_next_token_bitmask(masks, 1), masks.numpy()
    assert (rows[::2] == 0x5A5A5A5A).all()
    return status, np.flatnonzero(np.unpackbits(rows[1].view(np.uint8), bitorder="little")).tolist()


def random_text(
    matcher: Matcher, random: Random, vocabulary: Vocabulary, longest: int = 100, *, likely: bytes = b'"}]\\', share: float = 0.3
) -> bytes | None:
    """A random text along the masks, with a preference for its end and for some bytes; None where it is too long."""
    ids, stop, likely_ids = list[int](), vocabulary.stop_token_ids[0], {*likely}
    while len(ids) < longest:
        _, legal = fill_mask(matcher, vocabulary.mask_words)
        assert legal, f"a dead end after {vocabulary.decode(ids)!r}"
        preferred = [token_id for token_id in legal if token_id in likely_ids] if random.random() < share else []
        ids.append(stop if stop in legal and random.random() < 0.5 else random.choice(preferred or legal))
        assert matcher.accept_token(ids[-1]), vocabulary.decode(ids)
        if ids[-1] == stop:
            return vocabulary.decode(ids)
    return None


def take_claim(compiler: GrammarCompiler, constraint: Constraint) -> Claim:
    claim = Claim(compiler, constraint)
    claim.take()
    return claim
