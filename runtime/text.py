"""Text to token ids and back, around an engine that knows ids only: what a command, a demonstration or a server needs of a tokenizer.

Decoding needs the vocabulary's bytes and nothing else. Encoding needs the `tokenizers` library (pip install 'stepgraph[text]').
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgraph.runtime.models.files.chat_template import ChatTemplate
from stepgraph.sampling.grammar.vocabulary import Vocabulary

Message = Mapping[str, Any]


class TextCodec:
    """A model's tokenizer and chat template. Safe to share between threads; a stream belongs to one text."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str, bool], Sequence[int]],
        template: ChatTemplate | None = None,
    ) -> None:
        """encode(text, begins): the ids of a text, and where it begins one, with what the tokenizer puts in front of every text."""
        self.vocabulary = vocabulary
        self._encode = encode
        self._template = template

    @classmethod
    def open(cls, path: str | Path, vocabulary: Vocabulary | None = None) -> TextCodec:
        """The tokenizer of a Hugging Face folder or a .gguf file. ValueError names the file, or the package that is missing.

        vocabulary: the model's, where it is at hand; else it is read from the same files.
        """
        from stepgraph.runtime.models.files.tokenizer import open_tokenizer  # a library that only this needs

        opened = open_tokenizer(Path(path))
        return cls(vocabulary or opened.vocabulary(), opened.encode, opened.template)

    @classmethod
    def of_bytes(cls, vocabulary: Vocabulary) -> TextCodec:
        """For a vocabulary without a tokenizer, as the toys have: the longest token that fits, again and again. Chats are plain lines."""
        return cls(vocabulary, _Longest(vocabulary), ChatTemplate(_PLAIN_CHAT))

    @property
    def has_chat(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self._template is not None

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """The ids of a prompt, or, without `begins`, of a piece of one, which has no begin token in front.

        What is spelled like a control token (`<|im_end|>`) becomes one, whoever wrote it, and so it does in chat().
        """
        return self._checked(text, "text", begins)

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, answer: bool = True) -> list[int]:
        """The ids of a conversation in the model's own form, up to where its answer begins (or, without `answer`, as it stands).

        messages: objects with a role, and the content or whatever else the template reads. tools: as OpenAI's API has them.
        """
        if self._template is None:
            raise ValueError("messages: this model has no chat template, want a plain prompt or token ids")
        return self._checked(self._template.render(messages, tools, answer), "messages", False)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids; control and stop tokens stand for none, and U+FFFD for bytes that are no UTF-8."""
        return self.vocabulary.decode(token_ids).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """Decodes one text while it comes."""
        return TextStream(self.vocabulary)

    def _checked(self, text: str, name: str, begins: bool) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"{name}: got {type(text).__name__}, want a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: got half of a surrogate pair at position {error.start}, want text") from None
        return list(self._encode(text, begins))


class TextStream:
    """The text of tokens as they come: characters that are not whole yet wait for the next push."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(self._vocabulary.decode(token_ids))

    def finish(self) -> str:
        """What was still waiting: U+FFFD where a character was cut short, nothing otherwise. The stream is as new afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


_PLAIN_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


class _Longest:
    """Longest match over a token table. Not how a tokenizer splits, but the same text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        silent = vocabulary.non_text_ids
        self._ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token_id not in silent}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str, begins: bool) -> list[int]:
        written, place, found = text.encode(), 0, []
        while place < len(written):
            fits = (written[place : place + length] for length in range(self._longest, 0, -1))
            token = next((piece for piece in fits if piece in self._ids), None)
            if token is None:
                raise ValueError(f"text: got the byte 0x{written[place]:02x}, for which the vocabulary has no token")
            found.append(self._ids[token])
            place += len(token)
        return found
