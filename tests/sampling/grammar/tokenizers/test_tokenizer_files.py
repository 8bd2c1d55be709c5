"""Tokenizer files and ranks: stop tokens, the width of the logits, ids without text, and errors."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Vocabulary
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.tokenizers.table import MAX_IDS
from tests.helpers.c_library import EACH_BACKEND
from tests.helpers.grammar_texts import fill_mask
from tests.helpers.made_tokenizers import byte_level, differences

# tiktoken

RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}


def written(path: Path, ranks: Mapping[bytes, int]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


def test_ranks_are_ids_and_special_tokens_are_added(tmp_path: Path) -> None:
    path = written(tmp_path / "made.tiktoken", RANKS)
    special = {"<|endoftext|>": 262, "<|im_start|>": 260, "<|im_end|>": 261}
    for ranks in (path, str(path), RANKS):
        table = Vocabulary.from_tiktoken(ranks, special, logits_width=300)
        assert table.tokens[:259] == tuple(RANKS) and table.tokens[259] == b"" and table.logits_width == 300
        assert table.stop_token_ids == (262, 261) and table.control_token_ids == (260,)
        assert table.non_text_ids == {259, 260, 261, 262}
    assert Vocabulary.from_tiktoken(path, special, stop_token_ids=[260]).stop_token_ids == (260,)


def test_encoding_equals_its_ranks() -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="pip install 'stepgraph[vocabularies]'")
    special = {"<|endoftext|>": 262, "<|im_start|>": 260}
    encoding = tiktoken.Encoding("made", pat_str=r"\p{L}+|\s+", mergeable_ranks=RANKS, special_tokens=special)
    table = Vocabulary.from_tiktoken(encoding)
    assert (table.tokens, table.stop_token_ids, table.control_token_ids) == (
        Vocabulary.from_tiktoken(RANKS, special).tokens,
        (262,),
        (260,),
    )
    assert differences(table, encoding.decode) == 0
    with pytest.raises(ValueError, match="special_tokens: got a value beside an Encoding"):
        Vocabulary.from_tiktoken(encoding, special)


# GGUF


def gguf_of(path: Path, kind: str, tokens: Mapping[str, int], **ends: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    for name, token_id in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_token_types(tmp_path: Path) -> None:
    tokens = {
        "<unk>": 2,
        "</s>": 3,
        "<|eot_id|>": 3,
        "<|pad|>": 5,
        "<call>": 4,
        "<0x0A>": 6,
        "<0x0B>": 1,
        "\u2581caf\u00e9": 1,
        "\u0120x": 1,
    }
    found = Vocabulary.from_gguf(gguf_of(tmp_path / "pieces.gguf", "llama", tokens, eos=1), logits_width=20)
    assert found.tokens[4:] == (b"<call>", b"\n", b"<0x0B>", " caf\u00e9".encode(), "\u0120x".encode())
    assert found.stop_token_ids == (1, 2) and found.control_token_ids == (0, 3) and found.logits_width == 20
    level = Vocabulary.from_gguf(gguf_of(tmp_path / "level.gguf", "gpt2", tokens, eos=1, eot=2, eom=1))
    assert level.tokens[4:] == (b"<call>", b"<0x0A>", b"<0x0B>", "\u2581caf\u00e9".encode(), b" x")
    with pytest.raises(ValueError, match=r"other.gguf: tokenizer.ggml: got the model 'bert', expected 'gpt2' or 'llama'"):
        Vocabulary.from_gguf(gguf_of(tmp_path / "other.gguf", "bert", tokens))
    with pytest.raises(ValueError, match=r"gone.gguf: No such file or directory, expected a .gguf file"):
        Vocabulary.from_gguf(tmp_path / "gone.gguf")


@pytest.mark.parametrize(
    ("names", "stops"),
    [("<|end|> <|endoftext|> <|user|>", (0, 1)), ("<|end|> <|endoftext|> <|return|> <|call|>", (1, 2, 3))],
)
def test_ends_of_turns_that_gguf_files_do_not_state(tmp_path: Path, names: str, stops: tuple[int, ...]) -> None:
    """As in the generation_config.json of Phi and of GPT-OSS, where <|end|> ends a message."""
    path = gguf_of(tmp_path / "model.gguf", "gpt2", dict.fromkeys(names.split(), 3), eos=1)
    assert sorted(Vocabulary.from_gguf(path).stop_token_ids) == list(stops)


def test_an_end_of_turn_is_a_control_token_whatever_its_type(tmp_path: Path) -> None:
    """Some files of Gemma 3 state that <end_of_turn> is text; llama.cpp overrides it, too."""
    found = Vocabulary.from_gguf(gguf_of(tmp_path / "model.gguf", "llama", {"<eos>": 3, "<end_of_turn>": 1, "<start_of_turn>": 4}, eos=0))
    assert found.stop_token_ids == (0, 1) and found.tokens[2] == b"<start_of_turn>"


# stop tokens, width of the logits


def folder_with(folder: Path, **files: Mapping[str, Any]) -> Path:
    folder.mkdir()
    byte_level().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "stops", "width"),
    [
        ({"generation_config": {"eos_token_id": [7, 9]}, "config": {"eos_token_id": 8}}, (7, 9, 2), None),
        ({"generation_config": {"eos_token_id": 7}}, (7, 2), None),
        ({"config": {"eos_token_id": [8, 2], "vocab_size": 400}}, (8, 2), 400),
        ({"config": {"text_config": {"eos_token_id": 8, "vocab_size": 500}, "vocab_size": 3}}, (8, 2), 500),
        ({"tokenizer_config": {"eos_token": "<|im_start|>"}}, (1, 2), None),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_start|>"}}}, (1, 2), None),
        ({"tokenizer_config": {"eos_token": None}}, (2,), None),
    ],
)
def test_folder_names_stop_tokens_and_logits_width(tmp_path: Path, files: Any, stops: tuple[int, ...], width: int | None) -> None:
    folder = folder_with(tmp_path / "model", **files)
    table = Vocabulary.from_tokenizer_json(folder)
    assert table.stop_token_ids == stops and table.logits_width == (width or len(table.tokens))
    assert Vocabulary.from_tokenizer_json(folder, stop_token_ids=[5], logits_width=600).stop_token_ids == (5,)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_control_tokens_gaps_and_padding_are_never_text(backend: BackendChoice) -> None:
    ranks = {token: rank for token, rank in RANKS.items() if rank != 300} | {b"the end": 290, b"<|im_start|>": 291}
    table = Vocabulary.from_tiktoken(ranks, {"<|im_start|>": 295, "<|im_end|>": 296}, logits_width=330)
    matcher = GrammarCompiler(table, max_threads=1, backend=backend).compile(Constraint.regex('"[^"]*"')).matcher()
    assert matcher.accept_token(ord('"'))
    _, legal = fill_mask(matcher, table.mask_words)
    assert {290, 291, 258} <= set(legal), "tokens among the ranks are text, even with the name of a control token"
    assert not set(legal) & ({*range(259, 290), *range(292, 330)})


# files that raise an error


def changed(**parts: Any) -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads(byte_level().to_str())
    return tokenizer | parts


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
        "model: got the type 'WordPiece', expected a model of type BPE",
    ),
    ({"model": {"type": "WordLevel", "vocab": {"a": 0}}}, "model: got the type 'WordLevel'"),
    ({"model": {"type": "Unigram", "vocab": {"a": 0}}}, "model: got the type 'Unigram'"),
    ({"model": None}, "model: got the type None"),
    ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}}}, "model.vocab: got two texts for the id 0, 'a' and 'b'"),
    ({"added_tokens": [{"id": 65, "content": "<x>"}]}, "added_tokens: got two texts for the id 65, '_' and '<x>'"),
    ({"added_tokens": [{"id": 65, "content": "<x>", "special": True}]}, "added_tokens: got two texts for the id 65, '_' and '<x>'"),
    ({"added_tokens": [{"id": 900, "content": text} for text in "ab"]}, "added_tokens: got two texts for the id 900, 'a' and 'b'"),
    ({"decoder": {"type": "WordPiece", "prefix": "##"}}, r"decoder: got 'WordPiece' in \['WordPiece'\], expected ByteLevel"),
    ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "decoder: got 'BPEDecoder'"),
    ({"decoder": {"type": "CTC"}}, "decoder: got 'CTC'"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}}, "decoder: got 'ByteFallback'"),
    *(
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, step]}}, f"decoder: got '{step['type']}'")
        for step in ({"type": "Replace", "pattern": {"String": "a"}, "content": "b"}, {"type": "Metaspace"})
    ),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Strip"}, {"type": "Fuse"}]}}, "decoder: got 'Strip'"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}}, "decoder: got 'ByteLevel'"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": []}]}}, r"got 'ByteLevel' in \['ByteLevel', \[\]\]"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}]}}, "decoder: Replace: got the pattern None, expected a String"),
    ({"decoder": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}}, "Replace: got the pattern {'Regex': 'a\\+'}"),
    ({"decoder": None, "pre_tokenizer": {"type": "Whitespace"}}, "decoder: got none, which joins tokens with spaces, expected ByteLevel"),
    ({"added_tokens": [{"id": 1}]}, "added_tokens: got .*, expected a list of objects with a content"),
    ({"added_tokens": [{"id": -1, "content": "<x>"}]}, "token '<x>' has the id -1, expected one from 0 to"),
    ({"added_tokens": [{"id": MAX_IDS, "content": "<x>"}]}, f"token '<x>' has the id {MAX_IDS}, expected one from 0 to {MAX_IDS - 1}"),
    ({"added_tokens": [{"id": True, "content": "<x>", "special": True}]}, "token '<x>' has the id True"),
    ({"added_tokens": []}, "stop_token_ids: got none, expected at least one"),
]


@pytest.mark.parametrize(("parts", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_unsupported_tokenizer_files_raise(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed(**parts)), encoding="utf-8")
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}"):
        Vocabulary.from_tokenizer_json(path)


def test_unsupported_objects_files_and_widths_raise(tmp_path: Path) -> None:
    made, broken = byte_level(), tmp_path / "broken.tiktoken"
    size = made.get_vocab_size()
    with pytest.raises(ValueError, match=rf"has the id {size - 1}, expected one from 0 to {size - 2}, within the width of the logits"):
        Vocabulary.from_tokenizer(made, logits_width=size - 1)
    with pytest.raises(ValueError, match=r"from_tokenizer: got builtins.dict, expected one of tokenizers, sentencepiece or transformers"):
        Vocabulary.from_tokenizer({})
    with pytest.raises(ValueError, match=r"from_tiktoken: got int, expected a .tiktoken file, its ranks, or an Encoding"):
        Vocabulary.from_tiktoken(3)
    with pytest.raises(ValueError, match="from_tiktoken: got the token 'a', expected bytes"):
        Vocabulary.from_tiktoken({"a": 0})
    with pytest.raises(ValueError, match="from_tiktoken: got the rank 0 for b'a' and b'b', expected one token per rank"):
        Vocabulary.from_tiktoken({b"a": 0, b"b": 0})
    with pytest.raises(ValueError, match="special token '<x>' has the id 5, also that of b'"):
        Vocabulary.from_tiktoken(RANKS, {"<x>": 5})
    with pytest.raises(ValueError, match=r"gone.tiktoken: No such file"):
        Vocabulary.from_tiktoken(tmp_path / "gone.tiktoken")
    for content, message in (
        (b"YQ== 0\nYg==", "line 2: got b'Yg==', expected a token in base64"),
        (b"YQ== 0\nYQ== 1", "got b'a' a second time"),
    ):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=f"broken.tiktoken: line 2: .*{message.removeprefix('line 2: ')}"):
            Vocabulary.from_tiktoken(broken)
