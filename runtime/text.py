"""Converts between text and token ids.

Decoding needs the vocabulary only. Encoding needs the `tokenizers` library (pip install 'stepgraph[text]').
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgraph.runtime.demo.pair import model_path
from stepgraph.runtime.models.files.tokenizer import ChatTemplate, open_tokenizer
from stepgraph.sampling.fields import (
    BOOL,
    TOKEN_IDS,
    Check,
    callable_with,
    check_value,
    checked_path,
    clip_repr,
    instance_of,
    is_list_like,
    optional,
)
from stepgraph.sampling.grammar.matchers.forced import token_lookup
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.lifetimes import BoundToProcess

Message = Mapping[str, Any]
_CONTENT_END = "\ue000end\ue000"  # private-use characters, which templates copy; a template may remove blanks at the end of a content


class TextCodec(BoundToProcess):
    """A model's tokenizer and chat template. Safe to share between threads; a stream belongs to one text."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str, bool], Sequence[int]],
        template: ChatTemplate | None = None,
    ) -> None:
        """encode(text, begins) returns the ids of a text; `begins` adds the tokens that the tokenizer puts before every text."""
        check_value("TextCodec.vocabulary", vocabulary, instance_of(Vocabulary, "a Vocabulary"))
        check_value("TextCodec.encode", encode, Check(callable_with("text", True), "a function of (text, begins)"))
        check_value("TextCodec.template", template, optional(instance_of(ChatTemplate, "a ChatTemplate")))
        self.vocabulary = vocabulary
        self._encode = encode
        self._template = template

    def __repr__(self) -> str:
        return f"<TextCodec: {len(self.vocabulary.tokens)} tokens, {'with' if self._template else 'without'} a chat template>"

    @classmethod
    def open(cls, path: str | Path, vocabulary: Vocabulary | None = None) -> TextCodec:
        """Open the tokenizer of a Hugging Face folder or a .gguf file. ValueError names the file or the missing package.

        vocabulary: the model's, if it is loaded already; None reads it from the same files.
        """
        opened = open_tokenizer(checked_path("path", model_path(path)))
        return cls(opened.vocabulary() if vocabulary is None else vocabulary, opened.encode, opened.template)

    @classmethod
    def of_bytes(cls, vocabulary: Vocabulary) -> TextCodec:
        """A codec for a vocabulary without a tokenizer, as in the toy models: encodes by longest match; chats are plain lines.

        A tokenizer may split differently, but the text is the same.
        """

        def encode(text: str, begins: bool) -> list[int]:
            content, ids = text.encode(), token_lookup(vocabulary).split_longest(text.encode())
            if rest := content[len(vocabulary.decode(ids)) :]:
                raise ValueError(f"text: got the byte 0x{rest[0]:02x}, for which the vocabulary has no token")
            return ids

        return cls(vocabulary, encode, ChatTemplate(_PLAIN_CHAT))

    def with_text(self, spellings: Iterable[str]) -> TextCodec:
        """The codec with a vocabulary in which these control tokens are text, so that answers and grammars contain their spellings.
        Stop tokens, and spellings of other tokens, are not changed."""
        check_value("TextCodec.with_text.spellings", spellings, Check(is_list_like, "a sequence of texts"))
        old, texts = self.vocabulary, dict[int, bytes]()
        for spelling in spellings:
            ids = self.encode(spelling, begins=False)
            if len(ids) == 1 and ids[0] in {*old.control_token_ids} - {*old.stop_token_ids}:
                texts[ids[0]] = spelling.encode()
        tokens = [texts.get(index, token) for index, token in enumerate(old.tokens)] if texts else old.tokens
        control = [index for index in old.control_token_ids if index not in texts]
        vocabulary = Vocabulary(tokens, old.stop_token_ids, old.logits_width, control) if texts else old
        return TextCodec(vocabulary, self._encode, self._template)

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """The ids of a prompt; without `begins`, of a part of a prompt, which gets no begin token.

        The spelling of a control token (`<|im_end|>`) becomes that token, here and in chat(): escape untrusted text.
        """
        return self._encode_checked(text, "text", begins)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> list[int]:
        """The ids of a conversation in the model's chat format, up to the beginning of the answer unless `answer` is False, or with
        `continues` up to the end of the last message, which is the beginning of the answer.

        messages: objects with a role, a content and any other field that the template reads. tools: in the format of OpenAI's API.
        variables: further variables of the template, such as enable_thinking.
        """
        if self._template is None:
            raise ValueError("messages: got a conversation for a model without chat template, expected a plain prompt or token ids")
        check_value("TextCodec.chat.continues", continues, BOOL)
        if continues:
            last = messages[-1] if isinstance(messages, Sequence) and messages and isinstance(messages[-1], Mapping) else {}
            if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or last.get("tool_calls"):
                raise ValueError(f"messages: got {clip_repr(last)} as the last one, expected the text of an assistant")
            messages, answer = [*messages[:-1], {**last, "content": last["content"] + _CONTENT_END}], False
        text = self._template.render(messages, tools, answer, variables)
        if continues and _CONTENT_END not in text:
            raise ValueError("messages: the model's chat template does not write the last one, expected a template that does")
        return self._encode_checked(text.rpartition(_CONTENT_END)[0] if continues else text, "messages", False)

    def template_mentions(self, word: str) -> bool:
        """Whether the word occurs in the model's chat template."""
        check_value("TextCodec.template_mentions.word", word, instance_of(str, "a string"))
        return self._template is not None and self._template.mentions(word)

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        return self.encode(prompt) if isinstance(prompt, str) else self.chat(prompt)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids. Control and stop tokens have no text; bytes that are not UTF-8 become U+FFFD."""
        return self.vocabulary.decode(token_ids).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """A decoder for one text that arrives in pieces."""
        return TextStream(self.vocabulary)

    def _encode_checked(self, text: str, name: str, begins: bool) -> list[int]:
        check_value(name, text, instance_of(str, "a string"))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: got half of a surrogate pair at position {error.start}, expected valid text") from None
        ids = self._encode(text, begins)
        check_value("TextCodec.encode()", ids, TOKEN_IDS)
        return list(ids)


def partial_match(text: str, delimiters: Sequence[str]) -> int:
    """Characters at the end of a text that may begin a delimiter."""
    longest = max(map(len, delimiters), default=1) - 1
    tail, found = text[-longest:] if longest else "", 0
    for each in delimiters:
        start = tail.find(each[0])
        while start >= 0 and not each.startswith(tail[start:]):
            start = tail.find(each[0], start + 1)
        found = max(found, len(tail) - start if start >= 0 else 0)
    return found


class TextStream:
    """Decodes tokens as they arrive, up to a stop string and without `stop_ids`. An incomplete character, or what may begin a stop string,
    is held back."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = (), stop_ids: Sequence[int] = ()) -> None:
        self._vocabulary, self._stop, self._stop_ids = vocabulary, stop, tuple(stop_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending_text = ""
        self.found_stop = ""  # the stop string that was found; nothing after it is returned

    def push(self, token_ids: Iterable[int]) -> str:
        check_value("TextStream.push", token_ids, TOKEN_IDS)
        return self._release(self._decoder.decode(self._vocabulary.decode([token for token in token_ids if token not in self._stop_ids])))

    def up_to_stop(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Push these tokens up to the one that completes a stop string, and return them."""
        before = self._decoder.getstate(), self._pending_text
        self.push(token_ids)  # together, as nearly always no string is complete
        if not self.found_stop:
            return token_ids
        self._decoder.setstate(before[0])
        self._pending_text, self.found_stop, count = before[1], "", 0
        while not self.found_stop:
            self.push(token_ids[count : count + 1])
            count += 1
        return token_ids[:count]

    def finish(self) -> str:
        """The rest, with U+FFFD for an incomplete character. Resets the stream."""
        rest = self._release(self._decoder.decode(b"", final=True)) + self._pending_text
        self._decoder.reset()
        self._pending_text = self.found_stop = ""
        return rest

    def _release(self, text: str) -> str:
        """`text`, and what was kept, up to a stop string or what may begin one."""
        if not self._stop:
            return text
        text = "" if self.found_stop else self._pending_text + text
        found = [(index + len(stop), index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            _, end, self.found_stop = min(found)
        else:
            end = len(text) - partial_match(text, self._stop)
        self._pending_text = "" if found else text[end:]
        return text[:end]


_PLAIN_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
