"""Opens the tokenizer of a model folder or GGUF file as one of the `tokenizers` library, with its chat template.

The template is a Jinja program that formats a conversation. It is untrusted and runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from stepgraph.runtime.models.files.gguf_tokenizer import PRE_TOKENIZERS, build_gguf_tokenizer
from stepgraph.sampling.fields import clip_error, clip_repr
from stepgraph.sampling.grammar.tokenizers.gguf import read_gguf_header, table_of_gguf_metadata
from stepgraph.sampling.grammar.tokenizers.readers import read_json, refuse_path, stated_tokens
from stepgraph.sampling.grammar.vocabulary import Vocabulary

LONG_TEXT = 16 << 10  # characters, which take about 10 ms to encode
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}  # and their names in GGUF
_SPECIAL_TOKENS |= {"sep_token": "seperator", "cls_token": "cls", "mask_token": "mask"}  # "seperator": the spelling of GGUF
_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the parts that the model is trained on; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it like this

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, with_tools: str | None = None) -> None:
        """special_tokens: texts of bos_token and others, by name. with_tools: the template for conversations with tools."""
        self._special_tokens, self._source = dict(special_tokens or {}), source + (with_tools or "")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._without_tools = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools) if with_tools is not None else self._without_tools
        except Exception as error:  # deep nesting raises RecursionError or MemoryError
            raise ValueError(f"chat_template: not a Jinja template: {error}") from None

    def mentions(self, word: str) -> bool:
        return word in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        answer: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the conversation; with `answer`, up to where the model's answer starts. variables: further ones, by name."""
        nonempty = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages)
        if not nonempty or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):
            raise ValueError(f"messages: got {clip_repr(messages)}, expected a list of objects with a role and a content")
        if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
            raise ValueError(f"tools: got {clip_repr(tools)}, expected a list of objects in the format of OpenAI's API")
        if tools and not self.mentions("tools"):
            raise ValueError(f"tools: got {len(tools)} of them, expected none: the model's chat template does not read tools")
        if not isinstance(variables, (Mapping, type(None))) or not all(isinstance(name, str) for name in variables or ()):
            raise ValueError(f"variables: got {clip_repr(variables)}, expected a mapping of names to values, or None")
        stated = [{name: value for name, value in each.items() if value is not None} for each in messages]  # as in transformers
        for index, each in enumerate(stated):
            if "content" in each:
                each["content"] = joined_parts(each["content"], f"messages[{index}].content")
        base_variables = {"messages": stated, "tools": list(tools) if tools else None, "add_generation_prompt": answer}
        if own := sorted(base_variables.keys() & (variables or {}).keys()):
            raise ValueError(f"variables: got {own[0]!r}, expected names other than {', '.join(base_variables)}")
        names = {**self._special_tokens, "documents": None, **(variables or {}), **base_variables}
        try:
            return (self._with_tools if tools else self._without_tools).render(names)
        except Exception as error:  # a template can raise anything
            empty = [f"messages[{index}] has no content, " for index, each in enumerate(messages) if each.get("content") is None]
            raise ValueError(f"messages: {''.join(empty[:1])}the model's chat template fails: {error}") from None


def joined_parts(content: Any, name: str) -> Any:
    """The text of a list of content parts as in OpenAI's API; any other content unchanged. ValueError for a part that is no text."""
    if not isinstance(content, (list, tuple)):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.keys() != {"type", "text"} or part["type"] != "text" or not isinstance(part["text"], str):
            raise ValueError(f"{name}: got {clip_repr(part)}, expected parts with the type text, their text and no other field")
    return "".join(part["text"] for part in content)


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Replaces Jinja's filter, which escapes < as &lt;."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class OpenedTokenizer(NamedTuple):
    tokenizer: Any  # tokenizers.Tokenizer
    begin_id: int | None
    adds_begin_id: bool | None  # of a .gguf file: whether a text starts with begin_id; None: the tokenizer's own post-processor decides
    template: ChatTemplate | None
    vocabulary: Callable[[], Vocabulary]

    def encode(self, text: str, add_begin: bool) -> list[int]:
        options = {"add_special_tokens": add_begin and self.adds_begin_id is not False}
        # encode() holds the GIL, which stops all threads; encode_batch() does not, but it starts a thread per processor.
        long = len(text) > LONG_TEXT
        try:
            encoded = self.tokenizer.encode_batch([text], **options)[0] if long else self.tokenizer.encode(text, **options)
        except Exception as error:  # the library raises plain Exception, e.g. for a character without a token
            raise ValueError(f"text: the tokenizer cannot encode it: {clip_error(error)}") from None
        ids: list[int] = encoded.ids
        if add_begin and self.adds_begin_id and self.begin_id is not None and ids[:1] != [self.begin_id]:
            return [self.begin_id, *ids]
        return ids


def open_tokenizer(path: Path) -> OpenedTokenizer:
    """Open a folder or .gguf file. Raises ValueError that names the file, or the missing package."""
    if (path / "tokenizer.json").is_file():
        return _open_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path)
    refuse_path(path, "tokenizer.json")


def _import_tokenizers(path: Path) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError(f"{path}: encoding text needs the tokenizers package: pip install 'stepgraph[text]'") from None
    return tokenizers


def _open_folder(folder: Path) -> OpenedTokenizer:
    path = folder / "tokenizer.json"
    library = _import_tokenizers(folder)
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: the tokenizer cannot be read: {error}") from None
    tokenizer.no_truncation()  # training scripts save these settings
    tokenizer.no_padding()
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True  # whether control tokens in texts are text
    _add_tokens(tokenizer, stated_tokens(config, str(folder / "tokenizer_config.json")), library, folder)
    if "added_tokens_decoder" not in config and (folder / "special_tokens_map.json").exists():  # of earlier versions of transformers
        config = {**config, **read_json(folder / "special_tokens_map.json")}
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    return OpenedTokenizer(
        tokenizer,
        None,
        None,  # tokenizer.json decides: the add_bos_token of the config is ignored, as by transformers 5
        _folder_template(folder, config, special),
        lambda: Vocabulary.from_tokenizer_json(folder),
    )


def _add_tokens(tokenizer: Any, stated: Sequence[Mapping[str, Any]], library: Any, folder: Path) -> None:
    """Add tokens that tokenizer.json does not have, or has with other options, as transformers does."""
    own = {token_id: repr(token) for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    for entry in stated:
        options = {name: bool(entry[name]) for name in _TOKEN_OPTIONS if name in entry}
        token, text, token_id = library.AddedToken(entry["content"], **options), entry["content"], entry["id"]
        if own.get(token_id) != repr(token):
            tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(text)) != token_id:
            name, expected = folder / "tokenizer_config.json", f"the id {found} that it has in tokenizer.json, or the first unused one"
            raise ValueError(f"{name}: added_tokens_decoder: got the id {token_id} for {text!r:.60}, expected {expected}")


def _folder_template(folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    """The template in .jinja files or in tokenizer_config.json, which holds one template or a list of named ones."""
    texts: list[Any] = []
    for path in (folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"):
        try:
            texts.append(path.read_text(encoding="utf-8") if path.is_file() else None)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: got bytes that are not UTF-8: {error}") from None
    source, with_tools = config.get("chat_template") if texts[0] is None else texts[0], texts[1]
    if isinstance(source, list):
        named = {each["name"]: each.get("template") for each in source if isinstance(each, dict) and isinstance(each.get("name"), str)}
        source, with_tools = named.get("default"), named.get("tool_use")
    if source is None:
        return None
    if not isinstance(source, str) or not isinstance(with_tools, (str, type(None))):
        name = folder / "tokenizer_config.json"
        raise ValueError(f"{name}: chat_template: got {source!r:.60}, expected a template, or a list of templates with names")
    return ChatTemplate(source, special, with_tools)


def _token_text(entry: object) -> str | None:
    """The text of a special token, which is stored as such or as an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _open_gguf(path: Path) -> OpenedTokenizer:
    metadata = read_gguf_header(path).metadata
    table, texts = table_of_gguf_metadata(metadata, path, None), metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{stored}_token_id") for name, stored in _SPECIAL_TOKENS.items()}
    special = {name: texts[index] for name, index in ids.items() if isinstance(index, int) and 0 <= index < len(texts)}
    pre_tokenizer, name = None, metadata.get("tokenizer.ggml.pre")
    if metadata["tokenizer.ggml.model"] == "gpt2" and (pre_tokenizer := PRE_TOKENIZERS.get(str(name))) is None:
        # Without the family's pattern the tokens of a text would be others than in training.
        raise ValueError(f"{path}: tokenizer.ggml.pre: got {clip_repr(name)}, expected one of {', '.join(PRE_TOKENIZERS)}")
    template, with_tools = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    adds_begin_id = metadata.get("tokenizer.ggml.add_bos_token", True if pre_tokenizer is None else pre_tokenizer.adds_begin_id)
    return OpenedTokenizer(
        build_gguf_tokenizer(_import_tokenizers(path), path, metadata, pre_tokenizer),
        ids["bos_token"] if "bos_token" in special else None,
        adds_begin_id if isinstance(adds_begin_id, bool) else None,
        ChatTemplate(template, special, with_tools if isinstance(with_tools, str) else None) if isinstance(template, str) else None,
        lambda: Vocabulary.from_table(table),
    )
