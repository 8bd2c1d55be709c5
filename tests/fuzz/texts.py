"""Fuzzing of tokenizer files: tokenizer.json and related files, chat templates, and tiktoken ranks."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence

from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar import Vocabulary
from tests.fuzz.folders import FolderDoor, put
from tests.fuzz.values import Value, blob
from tests.helpers.made_tokenizers import pieces, unigram

BYTE_LEVEL = {
    "model": {"type": "BPE", "vocab": {"a": 3, "b": 4, "\u0120": 5, "ab": 6, "<0x0A>": 7}, "merges": ["a b"]},
    "added_tokens": [
        {"id": 0, "content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
        {"id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
        {"id": 2, "content": "<call>", "special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<s>{{ message.content | trim }}{% else %}{{ raise_exception('no') }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}{% endif %}{{ tools | tojson }}{{ strftime_now('%d') }}"
)
TALK = [{"role": "user", "content": "ab a"}]


class TokenizerDoor(FolderDoor):
    """The tokenizer files and the chat template of a folder."""

    name = "tokenizer"
    words: Sequence[str] = (
        "model type BPE Unigram vocab merges added_tokens id content special pre_tokenizer decoder ByteLevel Sequence Replace ByteFallback"
        " Fuse Strip Metaspace decoders pretokenizers pattern String replacement unk_token unk_id byte_fallback WordPiece normalizer NFC"
        " chat_template eos_token_id eos_token </s> <s> vocab_size text_config post_processor truncation padding max_length Split Digits"
        " Regex behavior Isolated ignore_merges dropout fuse_unk end_of_word_suffix continuing_subword_prefix bos_token add_bos_token"
        " {% %} {{ }} for in if endif endfor set loop.index range(9) namespace() messages message.__class__ [0] | ~ * ** + - not is"
        " defined macro endmacro generation endgeneration tojson break continue strftime_now import include extends cycler joiner lipsum()"
    ).split()
    named = re.compile(r"(/|path: |Vocabulary\.|text: |messages: |tools: |chat_template: )")
    _written = ("tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        others = {"config.json": {"vocab_size": 12, "eos_token_id": 1}, "generation_config.json": {"eos_token_id": [1]}}
        config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": TEMPLATE}
        small = {"tokenizer.json": BYTE_LEVEL}
        named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
        self.seeds = [
            small | others,
            small | {"tokenizer_config.json": config},
            small | {"tokenizer_config.json": config | {"chat_template": named}, "config.json": {"text_config": {"vocab_size": 9}}},
            small | {"chat_template.jinja": TEMPLATE, "tokenizer_config.json": config},
            *({"tokenizer.json": json.loads(made.to_str()), "tokenizer_config.json": config} for made in (pieces(True), unigram())),
        ]

    def prepare(self, given: Value) -> None:
        for name in self._written:
            put(self.folder / name, given.get(name) if isinstance(given, dict) else given)

    def enter(self, given: Value) -> None:
        table = Vocabulary.from_tokenizer_json(self.folder)
        known = range(len(table.tokens))
        assert len(table.decode(known)) == sum(len(table.tokens[token]) for token in known if token not in table.non_text_ids)
        assert table.stop_token_ids and table.non_text_ids <= {*known} and table.logits_width >= len(table.tokens)
        assert len(table.text_words) == len(table.stop_words) == table.mask_words
        codec = TextCodec.open(self.folder, table)
        for text in ("ab a", "<s>\n\u00e9</s>", ""):
            assert all(token >= 0 for token in codec.encode(text))
        if codec.has_chat:
            codec.chat(TALK)
            codec.chat(TALK, [{"type": "function"}], answer=False)


class RanksDoor(FolderDoor):
    """A .tiktoken file, with special tokens, a width and stop tokens."""

    name = "ranks"
    hostile = True
    words: Sequence[str] = ["YQ==", " 0\n", "YWI= 3\n", "=", "\n", "<|endoftext|>", "<|im_end|>", " -1", "99999999999999999999"]
    named = re.compile(r"(/|Vocabulary\.)")

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        ranks = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(97, 123))
        self.seeds = [
            {"file": blob(ranks), "special": {"<|endoftext|>": 200, "<|im_end|>": 201}, "width": 256, "stops": None},
            {"file": blob(ranks[:60]), "special": {}, "width": None, "stops": [97]},
        ]

    def prepare(self, given: Value) -> None:
        put(self.folder / "a.tiktoken", given.get("file") if isinstance(given, dict) else given)

    def enter(self, given: Value) -> None:
        document = given if isinstance(given, dict) else {}
        special, width, stops = document.get("special"), document.get("width"), document.get("stops")
        table = Vocabulary.from_tiktoken(
            self.folder / "a.tiktoken", special if isinstance(special, dict) else None, width, stops if isinstance(stops, list) else None
        )
        assert len(table.text_words) == table.mask_words and table.stop_token_ids
