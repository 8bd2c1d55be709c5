"""TextCodec: compared with transformers on the same files; decoding of token streams."""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers

from stepgraph.runtime.models.files.tokenizer import open_tokenizer
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar import Vocabulary
from stepgraph.sampling.grammar.tokenizers.gguf import read_gguf_header
from tests.helpers.gguf_files import add_byte_level, add_pieces, write_gguf
from tests.helpers.made_tokenizers import TOKENIZERS, sentence_pieces
from tests.runtime.models.test_smollm2 import gguf_path

TEXTS = ["the cat sat", "na\u00efve \u6f22\u5b57 \U0001f600", 'don\'t {"a": 1}\n\n  x', "", "<|im_start|>user\nhi<|im_end|>"]
MESSAGES = [{"role": "system", "content": "be <short>"}, {"role": "user", "content": "the caf\u00e9?"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a\u00e9": {"type": "string"}}}}}]
TEMPLATES = {
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "blocks, breaks and marks": "{%- for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n"
    "{% generation %}{{ bos_token + m.content | trim }}{% endgeneration %}\n{% endfor %}\n{{ eos_token }}",
    "tools": "{% if tools %}{{ tools | tojson }}\n{{ tools[0] | tojson(indent=2) }}{% endif %}{{ messages[0].content }}",
}


def folder_of(tmp_path: Path, kind: str = "byte level", **fields: Any) -> Path:
    TOKENIZERS[kind]().save(str(tmp_path / "tokenizer.json"))
    ends = {"__type": "AddedToken", "content": "<|im_end|>"}
    config = {"bos_token": "<|im_start|>", "eos_token": ends, "tokenizer_class": "PreTrainedTokenizerFast"} | fields
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def hf_tokenizer(folder: Path, **options: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)


@pytest.mark.parametrize("kind", [kind for kind in TOKENIZERS if kind != "unigram"])
def test_encode_agrees_with_transformers_and_decodes_back(tmp_path: Path, kind: str) -> None:
    codec = TextCodec.open(folder_of(tmp_path, kind))
    tokenizer = hf_tokenizer(tmp_path)
    for text in TEXTS:
        ids = codec.encode(text)
        assert ids == tokenizer(text)["input_ids"]
        if kind == "byte level":
            assert codec.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_a_long_text_is_encoded_without_the_gil(tmp_path: Path) -> None:
    """Another thread runs meanwhile, although this one never gives way by itself."""
    codec, go, ran, interval = TextCodec.open(folder_of(tmp_path)), threading.Lock(), threading.Event(), sys.getswitchinterval()

    def run() -> None:
        with go:
            ran.set()

    other, text = threading.Thread(target=run), TEXTS[0] * 20_000
    go.acquire()
    sys.setswitchinterval(1000)
    try:
        other.start()
        go.release()
        ids, ran_meanwhile = codec.encode(text), ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert ran_meanwhile and ids == hf_tokenizer(tmp_path)(text)["input_ids"]


def test_tokens_of_the_config_are_added_as_in_transformers(tmp_path: Path) -> None:
    """One that tokenizer.json does not have, and one that is a control token in the config only."""
    codec = TextCodec.open(folder_of(tmp_path))
    size, call = len(codec.vocabulary.tokens), codec.encode("<|im_end|>")[0]
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    new = {"content": "<tool>", **options, "special": True}
    folder_of(tmp_path, added_tokens_decoder={size: new, call: {"content": "<|im_end|>", **options, "special": True, "lstrip": True}})
    codec, text = TextCodec.open(tmp_path), "a <tool>b  <|im_end|>"
    assert codec.encode(text) == hf_tokenizer(tmp_path)(text)["input_ids"]
    assert codec.vocabulary.tokens[size:] == (b"<tool>",) and size in codec.vocabulary.non_text_ids
    whole, parts = codec.encode(text), TextCodec.open(folder_of(tmp_path, split_special_tokens=True)).encode(text)
    assert len(parts) > len(whole) and parts == hf_tokenizer(tmp_path)(text)["input_ids"]
    for entries in ({size + 1: new}, {call: new}, {"x": new}, {"9" * 10: new}, {size: "<tool>"}, [new]):
        with pytest.raises(ValueError, match="added_tokens_decoder"):
            TextCodec.open(folder_of(tmp_path, added_tokens_decoder=entries))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_agrees_with_transformers(tmp_path: Path, name: str, tools: Any) -> None:
    codec = TextCodec.open(folder_of(tmp_path, chat_template=TEMPLATES[name]))
    tokenizer = hf_tokenizer(tmp_path)
    if tools and "tools" not in TEMPLATES[name]:
        with pytest.raises(ValueError, match=r"^tools: got 1 of them, expected none: the model's chat template does not read tools$"):
            codec.chat(MESSAGES, tools)
        return
    for answer in (True, False):
        expected = tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=answer, tokenize=True)
        assert codec.chat(MESSAGES, tools, answer) == list(expected["input_ids"])
        assert codec.has_chat


@pytest.mark.parametrize("name", ["plain", "trims", "closes reasoning"])
@pytest.mark.parametrize("text", ["the cat", "", "a\n", "the caf\u00e9 the"])
def test_an_answer_continues_the_last_message_as_in_transformers(tmp_path: Path, name: str, text: str) -> None:
    written = "{% for each in messages %}<|im_start|>{{ each.role }}"
    more = {
        "trims": written + "{{ each.content | trim }}<|im_end|>{% endfor %}",
        "closes reasoning": written + "<think></think>{{ each.content.split('</think>')[-1] }}<|im_end|>{% endfor %}",
    }
    codec = TextCodec.open(folder_of(tmp_path, chat_template={**TEMPLATES, **more}[name]))
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    if text.strip() != text or not text:  # transformers removes blanks, and refuses an empty text
        prefix = codec.chat([*MESSAGES, {"role": "assistant", "content": "cat"}], continues=True)
        assert codec.chat(messages, continues=True) == [*prefix[: -len(codec.encode("cat", False))], *codec.encode(text, False)]
        return
    expected = hf_tokenizer(tmp_path).apply_chat_template(messages, continue_final_message=True, tokenize=True)
    assert codec.chat(messages, continues=True) == list(expected["input_ids"])


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        ("x", MESSAGES, r"messages: got {'role': 'user', .* as the last one, expected the text of an assistant"),
        ("x", [{"role": "assistant", "content": None}], "as the last one, expected the text of an assistant"),
        ("x", [{"role": "assistant", "content": "a", "tool_calls": [{}]}], "as the last one, expected the text of an assistant"),
        ("x", [], "messages: got {} as the last one"),
        ("x", [{"role": "assistant", "content": "a"}], "the model's chat template does not write the last one"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(tmp_path: Path, template: str, messages: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        TextCodec.open(folder_of(tmp_path, chat_template=template)).chat(messages, continues=True)


def test_content_parts_are_one_text(tmp_path: Path) -> None:
    codec = TextCodec.open(folder_of(tmp_path, chat_template=TEMPLATES["plain"]))
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    assert codec.chat([{"role": "user", "content": parts}]) == codec.chat([{"role": "user", "content": "the cat"}])


def test_template_from_a_list_or_a_file(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools | length }}t"}]
    codec = TextCodec.open(folder_of(tmp_path, chat_template=named))
    assert (codec.decode(codec.chat(MESSAGES)), codec.decode(codec.chat(MESSAGES, TOOLS))) == ("d", "1t")
    hf_tokenizer(tmp_path).save_pretrained(tmp_path / "in files")
    codec = TextCodec.open(tmp_path / "in files")
    assert (codec.decode(codec.chat(MESSAGES)), codec.decode(codec.chat(MESSAGES, TOOLS))) == ("d", "1t")
    (tmp_path / "chat_template.jinja").write_text("in a file", encoding="utf-8")
    codec = TextCodec.open(tmp_path)
    assert codec.decode(codec.chat(MESSAGES)) == "in a file"


@pytest.mark.parametrize(
    "template",
    [
        "{% for each in documents or [] %}[{{ each.text }}]{% endfor %}the cat",
        "{{ messages[-1].content }}{{ 'content' in messages[-1] }}",
        "{{ {'a': '\u00e9'} | tojson(true) }}",
        "{{ {'b': '\u00e9', 'a': 1} | tojson(false, none, [',', ':'], true) }}",
        "{{ bos_token }}the cat{{ mask_token }}{{ cls_token }}{{ sep_token }}",
    ],
)
def test_names_in_templates_agree_with_transformers(tmp_path: Path, template: str) -> None:
    """The begin token is in the file of special tokens only, as earlier versions saved it."""
    folder = folder_of(tmp_path, chat_template=template, bos_token=None, mask_token="<unk>", cls_token="<|im_end|>", sep_token="<think>")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}), encoding="utf-8")
    messages: list[dict[str, Any]] = [*MESSAGES, {"role": "assistant", "content": None}]
    documents = [{"title": "a", "text": "the"}]
    expected = hf_tokenizer(folder).apply_chat_template(messages, documents=documents, tokenize=True)["input_ids"]
    assert TextCodec.open(folder).chat(messages, variables={"documents": documents}) == list(expected)


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        ("x", [{"role": "user", "content": [{"type": "image", "text": "x"}]}], r"messages\[0\].content: got .*, expected parts with"),
        (None, MESSAGES, "without chat template"),
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{{ messages.append(1) }}", MESSAGES, "not callable|unsafe"),
        ("x", [], "expected a list of objects with a role"),
        ("x", ["hi"], "expected a list of objects with a role"),
        ("x", [{"content": "hi"}], "expected a list of objects with a role"),
        ("{{ messages[0].content }}", [{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_invalid_chats_raise(tmp_path: Path, template: str | None, messages: Any, error: str) -> None:
    codec = TextCodec.open(folder_of(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=error):
        codec.chat(messages)


@pytest.mark.parametrize("template", ["{% if %}", "{{" * 9, {"a": 1}])
def test_invalid_template_raises_at_open(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ValueError, match="chat_template"):
        TextCodec.open(folder_of(tmp_path, chat_template=template))


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("begins", [False, True])
def test_begin_token_follows_tokenizer_json_as_in_transformers(tmp_path: Path, begins: bool, config: dict[str, Any]) -> None:
    folder, first = folder_of(tmp_path, chat_template="<|im_start|>the cat", **config), "<|im_start|>"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_id = tokenizer.token_to_id(first)
    if begins:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"{first} $A", special_tokens=[(first, token_id)])
        tokenizer.save(str(folder / "tokenizer.json"))
    codec = TextCodec.open(folder)
    ids = codec.encode("the cat")
    assert (ids[0] == token_id) == begins and ids == hf_tokenizer(folder)("the cat")["input_ids"]
    assert codec.chat(MESSAGES) == [token_id, *ids[begins:]], "the template determines the first token of a chat"


def test_truncation_of_the_tokenizer_file_is_ignored(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    content["padding"]["pad_token"] = "<unk>"
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert TextCodec.open(folder).decode(TextCodec.open(folder).encode("the cat sat on")) == "the cat sat on"


@pytest.mark.parametrize("repeats", [1, 20_000])
def test_a_text_that_the_tokenizer_cannot_encode_is_refused(tmp_path: Path, repeats: int) -> None:
    content = json.loads((folder_of(tmp_path, "unigram") / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["unk_id"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    codec = TextCodec.open(tmp_path)
    assert codec.encode("ab")
    with pytest.raises(ValueError, match=r"^text: the tokenizer cannot encode it: .*unk_id"):
        codec.encode("\u2603" * repeats)


def test_stream_agrees_with_decode_and_has_no_partial_characters() -> None:
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b"ab", "\u6f22".encode(), b"\x9f\x98\x80", b"<eos>"], [259])
    codec = TextCodec.of_bytes(vocabulary)
    drawn = random.Random(1)
    for _ in range(300):
        ids = [drawn.choice((drawn.randrange(260), 240, 258, 97, 226)) for _ in range(drawn.randrange(1, 12))]
        stream, cut = codec.stream(), drawn.randrange(13)
        assert stream.push(ids[:cut]) + "".join(stream.push([token]) for token in ids[cut:]) + stream.finish() == codec.decode(ids)
    stream = codec.stream()
    assert [stream.push([token]) for token in (97, 0xF0, 0x9F, 0x98, 0x80)] == ["a", "", "", "", "\U0001f600"]
    assert (stream.push([0xF0]), stream.finish(), stream.finish(), stream.push([97])) == ("", "\ufffd", "", "a")


def test_codec_of_bytes_round_trip() -> None:
    codec = TextCodec.of_bytes(Vocabulary.printable())
    assert codec.decode(codec.encode('{"name": true}')) == '{"name": true}'
    assert len(codec.encode("name")) == 1, "the longest token that fits"
    assert codec.decode(codec.chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant: "
    with pytest.raises(ValueError, match="byte 0xc3, for which the vocabulary has no token"):
        codec.encode("\u00e9")


def tokenizer_gguf(path: Path, pre: str, **fields: Any) -> Path:
    def add_tokens(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, pre)
        writer.add_chat_template(TEMPLATES["plain"])
        writer.add_array("some.numbers", [1.5, 2.5])
        for name, value in fields.items():
            getattr(writer, name)(value)

    return write_gguf(path, "llama", add_tokens)


def test_gguf_tokenizer_agrees_with_the_folder(tmp_path: Path) -> None:
    path = tokenizer_gguf(tmp_path / "made.gguf", "gpt-2")
    codec, folder = TextCodec.open(path), TextCodec.open(folder_of(tmp_path, chat_template=TEMPLATES["plain"]))
    assert [codec.encode(text) for text in TEXTS] == [folder.encode(text) for text in TEXTS]
    assert codec.chat(MESSAGES) == folder.chat(MESSAGES)
    assert [codec.decode(codec.encode(text)) for text in TEXTS] == [folder.decode(folder.encode(text)) for text in TEXTS]
    reader = gguf.GGUFReader(path)
    read = read_gguf_header(path).metadata
    assert {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")} == read
    assert TextCodec.open(tokenizer_gguf(path, "gpt-2", add_add_bos_token=True)).encode("a")[0] == 1
    assert TextCodec.open(tokenizer_gguf(path, "llama-bpe")).encode("a")[0] == 1, "the default of the family if the file has no setting"
    outside = tokenizer_gguf(path, "gpt-2", add_add_bos_token=True, add_bos_token_id=9999)
    assert TextCodec.open(outside).encode("a") == codec.encode("a"), "a begin token outside the table"


def test_gguf_template_for_tools_and_further_special_tokens(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ sep_token }}t{{ mask_token }}{# tools #}"}]
    path = tokenizer_gguf(tmp_path / "made.gguf", "gpt-2", add_chat_template=named, add_sep_token_id=2, add_mask_token_id=1)
    codec = TextCodec.open(path)
    assert (codec.chat(MESSAGES), codec.chat(MESSAGES, TOOLS)) == (codec.encode("d"), [2, *codec.encode("t"), 1])


@pytest.mark.parametrize(
    ("families", "pieces"),
    [
        ("gpt-2", "It 's \u0120 \u01202024 !? \u010a \u010a x . y \u0120don ' T"),
        ("smollm", "It 's \u0120\u0120 2 0 2 4 !? \u010a \u010a x . y \u0120don ' T"),
        ("qwen2 deepseek-r1-qwen tekken", "It 's \u0120 \u0120 2 0 2 4 !?\u010a\u010a x .y \u0120don 'T"),
        ("gpt-4o", "It's \u0120 \u0120 202 4 !?\u010a\u010a x .y \u0120don'T"),
        ("llama-bpe llama3 smaug-bpe dbrx", "It 's \u0120 \u0120 202 4 !?\u010a\u010a x .y \u0120don 'T"),
        ("deepseek-coder", "It ' s \u0120\u0120 2 0 2 4 !? \u010a \u010a x . y \u0120don ' T"),
    ],
)
def test_pre_tokenizer_of_each_gguf_family(tmp_path: Path, families: str, pieces: str) -> None:
    for pre in families.split():
        tokenizer = open_tokenizer(tokenizer_gguf(tmp_path / "made.gguf", pre)).tokenizer
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's  2024!?\n\nx.y don'T")] == pieces.split()


def test_damaged_metadata_is_refused_or_read(tmp_path: Path) -> None:
    path = tokenizer_gguf(tmp_path / "made.gguf", "gpt-2")
    whole, drawn, refused = path.read_bytes(), random.Random(2), 0
    for case in range(120):
        damaged = bytearray(whole[: drawn.randrange(len(whole))] if case % 3 == 0 else whole)
        for _ in range(drawn.choice((1, 4)) if damaged else 0):
            damaged[drawn.randrange(min(600, len(damaged)))] = drawn.choice((0, 127, 255, drawn.randrange(256)))
        path.write_bytes(damaged)
        try:
            read_gguf_header(path)
        except ValueError:
            refused += 1
    assert refused > 40


def test_missing_files_and_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected a local folder with a tokenizer.json, or a .gguf file"):
        TextCodec.open(tmp_path / "nowhere")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"with a tokenizer.json, or a .gguf file, such as .*model\.gguf"):
        TextCodec.open(tmp_path)
    folder_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        TextCodec.open(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja"):
        (tmp_path / name).write_bytes(b"\xff")
        with pytest.raises(ValueError, match=f"{name}: got bytes that are not UTF-8"):
            TextCodec.open(folder_of(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'stepgraph\[text\]'"):
        TextCodec.open(folder_of(tmp_path))


def test_malformed_gguf_tokens_are_refused(tmp_path: Path) -> None:
    def add_tokens(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
        writer.add_uint32("tokenizer.ggml.tokens", 5)

    with pytest.raises(ValueError, match=r"made.gguf: tokenizer.ggml: got .*, expected .* with tokens and their types"):
        TextCodec.open(write_gguf(tmp_path / "made.gguf", "llama", add_tokens))


def test_a_file_of_tekken_starts_with_a_begin_token_and_keeps_pieces_that_are_tokens(tmp_path: Path) -> None:
    """Its pattern separates words by their capital letters. A token that no merge makes is found as a whole."""
    path = tokenizer_gguf(tmp_path / "made.gguf", "tekken")
    opened, tokenizer = TextCodec.open(path), open_tokenizer(path).tokenizer
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("parseHTMLText a/\n/b")]
    assert pieces == ["parse", "HTMLText", "\u0120a", "/\u010a/", "b"]
    whole = next(text for text, _ in tokenizer.get_vocab().items() if text == "\u0120the")
    assert opened.encode(" the") == [1, tokenizer.token_to_id(whole)]


def test_files_of_gpt_4o_separate_words_by_capital_letters_and_keep_their_endings(tmp_path: Path) -> None:
    path = tokenizer_gguf(tmp_path / "made.gguf", "gpt-4o")
    pieces = [piece for piece, _ in open_tokenizer(path).tokenizer.pre_tokenizer.pre_tokenize_str("parseHTMLText's a/\n/b WE'LL")]
    assert pieces == ["parse", "HTMLText's", "\u0120a", "/\u010a/", "b", "\u0120WE'LL"]
    assert TextCodec.open(path).encode("the")[:1] != [1], "no begin token by default"


def test_an_end_of_turn_in_a_text_is_one_token_whatever_its_type(tmp_path: Path) -> None:
    def add_tokens(writer: gguf.GGUFWriter) -> None:
        texts = ["<unk>", "<end_of_turn>", *dict.fromkeys("\u2581a<end_of_turn>")]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores([0.0] * len(texts))
        writer.add_token_types([2, *[1] * (len(texts) - 1)])
        writer.add_add_bos_token(False)

    codec = TextCodec.open(write_gguf(tmp_path / "made.gguf", "gemma3", add_tokens))
    assert codec.encode("a<end_of_turn>") == [2, 3, 1] and codec.vocabulary.stop_token_ids == (1,)


def test_spaces_after_added_tokens_of_phi_3_are_ignored(tmp_path: Path) -> None:
    """As in its tokenizer.json, and in llama.cpp; the file does not state it. <s> is an exception."""
    phi, llama = (TextCodec.open(write_gguf(tmp_path / f"{kind}.gguf", kind, add_pieces)) for kind in ("phi3", "llama"))
    for text, stripped in (("a</s> \n the", "a</s>the"), ("<call>  the", "<call>the"), ("a<s> the", "a<s> the"), ("a  the", "a  the")):
        assert phi.encode(text) == llama.encode(stripped), text
        assert (llama.encode(text) == llama.encode(stripped)) is (text == stripped)


def test_pieces_of_gguf_are_those_of_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random texts, with spaces at their beginnings and in rows. The file of Llama 2 has no setting of the begin token."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    codec, pieces, drawn = TextCodec.open(write_gguf(tmp_path / "made.gguf", "llama", add_pieces)), sentence_pieces(), random.Random(1)
    words = ["the", " cat", "  ", " ", "\n", "na\u00efve", "\u6f22\u5b57", '{"a": 1', "\U0001f600", "don't", "mat", "\u00a0", "qu"]
    texts = ["".join(drawn.choices(words, k=drawn.randrange(1, 12))) for _ in range(300)]
    assert [codec.encode(text) for text in texts] == [[1, *pieces.encode(text)] for text in texts]


def test_pieces_without_a_space_before_a_text(tmp_path: Path) -> None:
    """The space is also not added after a control token; by default both are."""

    def add_tokens(writer: gguf.GGUFWriter) -> None:
        add_pieces(writer)
        writer.add_add_space_prefix(False)

    without, default = (TextCodec.open(write_gguf(tmp_path / "made.gguf", "llama", add)) for add in (add_tokens, add_pieces))
    assert [codec.decode(codec.encode("the cat</s>the cat")) for codec in (without, default)] == ["the cat" * 2, " the cat" * 2]


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", "unheard-of"])
def test_byte_pairs_with_another_pre_tokenizer_are_refused(tmp_path: Path, pre: str) -> None:
    """transformers splits their texts like those of GPT-2."""
    with pytest.raises(ValueError, match=f"made.gguf: tokenizer.ggml.pre: got '{pre}', expected one of gpt-2, smollm, qwen2, .*tekken"):
        TextCodec.open(tokenizer_gguf(tmp_path / "made.gguf", pre))


@pytest.mark.models
def test_real_gguf_agrees_with_transformers() -> None:
    """Except for blanks before digits: the file makes digits single tokens, which transformers ignores."""
    path = gguf_path()
    codec, tokenizer = TextCodec.open(path), hf_tokenizer(path.parent, gguf_file=path.name)
    texts = [text for text in (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8").split("\n\n") if text]
    assert [codec.encode(text) for text in texts] == [tokenizer(text)["input_ids"] for text in texts]
    assert codec.chat(MESSAGES) == list(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True)["input_ids"])
    assert [codec.decode(codec.encode(text)) for text in texts] == texts
    assert codec.encode("a  12") != tokenizer("a  12")["input_ids"]


@pytest.mark.parametrize("encode", [5, lambda text: [1], lambda text, begins, more: [1]])
def test_an_encoder_takes_a_text_and_a_begins_flag(encode: Any) -> None:
    with pytest.raises(ValueError, match=r"TextCodec.encode: got .*, expected a function of \(text, begins\)"):
        TextCodec(Vocabulary.printable(), encode)
    assert TextCodec(Vocabulary.printable(), lambda text, begins: [len(text)]).encode("abc") == [3]
