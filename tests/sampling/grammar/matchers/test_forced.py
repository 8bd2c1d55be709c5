"""Forced tokens: text without alternatives is proposed in the tokens of the tokenizer, up to the point where these are ambiguous."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, MaskStatus, Vocabulary
from stepgraph.sampling.grammar.matchers import forced as module
from stepgraph.sampling.grammar.matchers.forced import FORCED_BYTES, MAX_LEGAL, ForcedText, TokenLookup, token_lookup
from tests.helpers.c_library import needs_c
from tests.helpers.toy_engines import COMPILER, CONSTRAINTS, VOCABULARY

NAMES = ["name", "email_address", "HTTPStatusCode", "isActive", "postal_code", "übersetzung", "created_at", "x1"]


def schema_of(names: list[str], kind: str = "integer") -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind} for name in names}, "required": names, "additionalProperties": False}


def bpe(texts: list[str], size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer trained on these texts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    return tokenizer


def vocabulary_of(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in plain]
    byte_of = {chr(code): code for code in plain} | {chr(256 + index): code for index, code in enumerate(others)}
    spelled = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [bytes(byte_of[letter] for letter in text) for text, _ in spelled]
    return Vocabulary([*tokens, b"<end>"], [len(tokens)])


class Walk:
    """A matcher and its history; at every position the forced token comes from a kept ForcedText or a new one."""

    def __init__(self, grammar: CompiledConstraint) -> None:
        self.grammar, self.matcher = grammar, grammar.matcher()
        self.table, self.text, self.history = token_lookup(grammar.vocabulary), ForcedText(), list[int]()
        self.masks, self.looks = torch.zeros(1, grammar.vocabulary.mask_words, dtype=torch.int32), 0

    def find(self) -> bytes:
        self.looks += 1
        return self.matcher.forced_bytes()

    def fill(self) -> list[int]:
        status = self.matcher.fill_next_token_bitmask(self.masks, 0)
        return module._legal_tokens(self.masks[0].numpy()) if status == MaskStatus.OK else []

    def forced(self, fresh: bool = False) -> int:
        text = ForcedText() if fresh else self.text
        return text.propose(len(self.history), self.masks[0].numpy(), self.table, self.find)

    def accept(self, token: int) -> None:
        assert self.matcher.accept_token(token)
        self.text.accepted(len(self.history), token)
        self.history.append(token)

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)
        del self.history[len(self.history) - count :]

    def follow(self) -> list[int]:
        """Accept proposals for as long as there are any."""
        followed = []
        while self.fill() and (token := self.forced()) >= 0:
            self.accept(token)
            followed.append(token)
        return followed


def words(ids: list[int], vocabulary: Vocabulary = VOCABULARY) -> list[bytes]:
    return [vocabulary.tokens[token] for token in ids]


def compiler_with(*extra: str) -> GrammarCompiler:
    return GrammarCompiler(Vocabulary.printable([token.encode() for token in extra]))


# proposals


def test_proposals_are_the_tokens_of_the_tokenizer() -> None:
    """At every forced position along tokenized texts. The longest legal token would be wrong at some of them."""
    random = Random(1)
    documents = [{name: random.randint(0, 99) for name in random.sample(NAMES, 4)} for _ in range(60)]
    texts = [json.dumps(document, ensure_ascii=False) for document in documents]
    tokenizer = bpe([*["Status", "Start", "State", "HTTP"] * 60, *["HTTPS", "postage", "email", '{"name": 1, "code": 2}'] * 40], 330)
    compiler, num_forced, num_not_longest = GrammarCompiler(vocabulary_of(tokenizer)), 0, 0
    for document, text in zip(documents[:20], texts, strict=False):
        walk = Walk(compiler.compile(Constraint.json_schema(schema_of(list(document)))))
        for token in tokenizer.encode(text).ids:
            legal = walk.fill()
            forced = walk.forced()
            if forced >= 0:
                assert forced == token, (text, words([*walk.history[-3:], token, forced], compiler.vocabulary))
                num_forced += 1
                num_not_longest += max(legal, key=lambda legal_id: len(compiler.vocabulary.tokens[legal_id])) != token
            walk.accept(token)
    assert token_lookup(compiler.vocabulary).merges and num_forced > 200 and num_not_longest > 5, (num_forced, num_not_longest)


def test_nothing_is_proposed_if_a_longer_token_is_legal() -> None:
    """`alpha` is forced, but the text may be `alphabet`, which is a token."""
    choice = Constraint.choice(["alpha", "alphabet"])
    walk = Walk(compiler_with("alpha", "alphabet").compile(choice))
    assert walk.fill() and walk.matcher.forced_bytes() == b"alpha" and walk.forced() == -1
    without = Walk(compiler_with("alpha", "bet").compile(choice))
    assert words(without.follow(), without.grammar.vocabulary) == [b"alpha"], "no token extends beyond it"
    illegal = Walk(compiler_with("alpha", "alphabet").compile(Constraint.choice(["alpha1", "alpha2"])))
    assert words(illegal.follow(), illegal.grammar.vocabulary) == [b"alpha"], "a longer token that is illegal is ignored"


def test_a_forced_text_stops_short_of_its_ambiguous_end() -> None:
    """A digit or a sign follows `": `. If a token contains the space and the sign, the space is not proposed."""
    schema, letters = Constraint.json_schema(schema_of(["sum"])), [*map(chr, range(0x20, 0x7F)), "sum", '":']
    for more, end in ((["<end>"], [b" "]), ([" -", "<end>"], [])):
        tokens = [token.encode() for token in [*letters, *more]]
        walk = Walk(GrammarCompiler(Vocabulary(tokens, [len(tokens) - 1])).compile(schema))
        assert words(walk.follow(), walk.grammar.vocabulary) == [b"{", b'"', b"sum", b'":', *end]


@pytest.mark.parametrize("ids", ["lowest", "highest"])
def test_of_tokens_with_equal_text_the_tokenizers_choice_is_proposed(ids: str) -> None:
    """A byte fallback token has a lower id than the token of the character; the second token of a merged text was added later."""
    base = Vocabulary.printable()
    duplicate = b"a" if ids == "highest" else b"name"
    vocabulary = Vocabulary([*base.tokens[:-1], duplicate, base.tokens[-1]], [len(base.tokens)])
    found = [index for index, token in enumerate(vocabulary.tokens) if token == duplicate]
    assert len(found) == 2 and TokenLookup(vocabulary).split(duplicate) == [found[-1] if ids == "highest" else found[0]]


def test_the_only_legal_token_is_forced_without_calling_the_matcher() -> None:
    """Also a token without text, such as the control token of a marker."""
    table, masks = token_lookup(VOCABULARY), torch.zeros(1, VOCABULARY.mask_words, dtype=torch.int32)
    text = ForcedText()
    not_called: Any = None
    for token in (0, 31, 112):
        masks.zero_()
        masks.numpy().view("uint32")[0, token // 32] = 1 << token % 32
        assert text.propose(3, masks[0].numpy(), table, not_called) == token
    masks.zero_()
    masks[0, 4] = 1 << 3  # padding of the logits
    assert text.propose(3, masks[0].numpy(), table, not_called) == -1
    masks[0, 4], masks[0, 0] = 0, -1
    assert text.propose(3, masks[0].numpy(), table, not_called) == -1


def test_too_many_legal_tokens_force_nothing() -> None:
    runs = compiler_with(*(" " * length for length in range(2, MAX_LEGAL + 2)))
    blanks = Walk(runs.compile(Constraint.regex(f" {{{MAX_LEGAL + 30}}}")))
    assert len(blanks.fill()) > MAX_LEGAL and blanks.forced() == -1
    assert blanks.matcher.forced_bytes() == b" " * (MAX_LEGAL + 30)


# searches


def test_a_text_that_is_followed_is_searched_once() -> None:
    walk = Walk(COMPILER.compile(Constraint.json_schema(schema_of(["first_name", "last_name"]))))
    assert b"".join(words(walk.follow())) == b'{"first_name": ' and len(walk.history) > 8
    assert walk.looks == 1


def test_a_long_text_is_searched_in_parts() -> None:
    """The last tokens of a part may depend on the rest; they are proposed after the next search."""
    random = Random(3)
    text = "".join(random.choices(["name", "the ", "true", "null", ", ", "x", "10", "nam"], k=400))
    walk = Walk(COMPILER.compile(Constraint.choice([text])))
    proposed = walk.follow()
    assert walk.table.split(text.encode()) == proposed
    assert walk.looks <= len(text) // (FORCED_BYTES - module.TAIL_BYTES - 4) + 1


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_a_kept_text_proposes_what_a_new_search_finds(seed: int) -> None:
    """Along random tokens and proposals, with rollbacks."""
    random = Random(seed)
    constraint = random.choice([*filter(None, CONSTRAINTS), Constraint.json_schema(schema_of(random.sample(NAMES[:5], 3)))])
    walk = Walk(COMPILER.compile(constraint))
    for _ in range(40):
        legal = walk.fill()
        if legal:
            forced = walk.forced()
            assert forced == walk.forced(fresh=True) and (forced < 0 or forced in legal)
            walk.accept(forced if forced >= 0 and random.random() < 0.6 else random.choice(legal))
        if walk.history and (not legal or random.random() < 0.3):
            walk.rollback(random.randint(1, min(len(walk.history), 6)))


@pytest.mark.parametrize("bug", ["never invalidated", "invalidated by rollbacks only"])
def test_the_comparison_detects_a_text_that_is_kept_too_long(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    def accepted(text: ForcedText, position: int, token: int) -> None:
        if bug != "never invalidated" and position < text.start:
            text.tokens.clear()

    monkeypatch.setattr(ForcedText, "accepted", accepted)
    with pytest.raises(AssertionError):
        test_a_kept_text_proposes_what_a_new_search_finds()


@pytest.mark.parametrize("constraint", [*filter(None, CONSTRAINTS)], ids=lambda constraint: constraint.kind)
def test_forced_bytes_leaves_the_matcher_unchanged(constraint: Constraint) -> None:
    """Masks, acceptance and rollback are those of a matcher without such calls."""
    grammar, random = COMPILER.compile(constraint), Random(5)
    queried, reference = grammar.matcher(), grammar.matcher()
    masks, count = torch.zeros(2, VOCABULARY.mask_words, dtype=torch.int32), 0
    for _ in range(150):
        statuses = [matcher.fill_next_token_bitmask(masks, row) for row, matcher in enumerate((queried, reference))]
        queried.forced_bytes()
        assert statuses[0] == statuses[1] and torch.equal(masks[0], masks[1])
        legal = module._legal_tokens(masks[1].numpy())
        if legal and random.random() < 0.75:
            token = random.choice(legal)
            assert queried.accept_token(token) and reference.accept_token(token)
            count += 1
        elif count:
            back = random.randint(1, min(count, 5))
            queried.rollback(back)
            reference.rollback(back)
            count -= back


# matchers


@needs_c
def test_a_part_of_a_character_can_be_forced() -> None:
    vocabulary = Vocabulary([*(bytes([code]) for code in range(256)), b"<end>"], [256])
    walk = Walk(GrammarCompiler(vocabulary).compile(Constraint.choice(["é!", "è!"])))
    assert walk.matcher.forced_bytes() == "é".encode()[:1] and words(walk.follow(), vocabulary) == ["é".encode()[:1]]


def test_llguidance_forces_nothing() -> None:
    assert COMPILER.compile(Constraint.choice(["name"], "llguidance")).matcher().forced_bytes() == b""


def test_marker_and_check_use_the_inner_matcher() -> None:
    grammar = Constraint.choice(["name"])
    after = COMPILER.compile(grammar.after("|")).matcher()
    assert after.forced_bytes() == b""
    assert after.accept_token(VOCABULARY.tokens.index(b"|")) and after.forced_bytes() == b"name"
    checked = GrammarCompiler(VOCABULARY, check_masks=True).compile(grammar).matcher()
    assert checked.forced_bytes() == b"name"


def test_a_matcher_out_of_fuel_forces_nothing() -> None:
    matcher: Any = COMPILER.compile(Constraint.choice(["name"], "xgrammar")).matcher()
    matcher.fuel_seconds = -1.0
    assert matcher.forced_bytes() == b"" and matcher.fault.startswith("one step of the grammar took")


def test_text_with_a_byte_that_no_token_has_is_not_split() -> None:
    table = TokenLookup(Vocabulary([b"a", b"ab", b"b", b""], stop_token_ids=[3]))
    assert table.split(b"aba") == [1, 0] and table.split(b"abc") == []
    assert TokenLookup(Vocabulary([b"</s>"], stop_token_ids=[0])).split(b"a") == []


def test_a_text_is_split_by_parts_of_the_size_of_a_token() -> None:
    class Parts(bytes):
        size = 0

        def __getitem__(self, index: Any) -> Any:
            part = super().__getitem__(index)
            Parts.size += len(part)
            return Parts(part)

    table = TokenLookup(Vocabulary([b"a", b"ab", b"b", b"abba", b""], stop_token_ids=[4]))
    assert table.split_longest(Parts(b"abbab" * 100)) == [3, 2] * 100
    assert Parts.size < 500 * sum(range(table.max_token_bytes + 1))
