"""A tokenizer's table while it is read, and the vocabulary that comes of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from stepgraph.sampling.fields import clip_repr, is_int
from stepgraph.sampling.grammar.vocabulary import Vocabulary

MOST_IDS = 1 << 21  # eight times the largest tokenizer; the table that a single wrong id makes takes half a second and 400 MB
# Control tokens that only ever end a turn, whether or not a file says that they do.
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


class Table:
    """Ids in any order, holes among them. `where` is what errors begin with."""

    def __init__(self, where: str, logits_width: int | None) -> None:
        if logits_width is not None and not (is_int(logits_width) and 1 <= logits_width <= MOST_IDS):
            raise ValueError(f"{where}: logits_width: got {clip_repr(logits_width)}, want a whole number from 1 to {MOST_IDS}, or None")
        self.where, self._width = where, logits_width
        self.tokens = dict[int, bytes]()
        self.control = dict[str, int]()  # by name: ids that are no text
        self._control_ids = set[int]()

    def add(self, token_id: object, text: bytes, name: str | None = None) -> int:
        most = MOST_IDS if self._width is None else self._width
        if not is_int(token_id) or not 0 <= token_id < most:
            told = repr(text.decode(errors="replace") if name is None else name)
            why = "" if self._width is None else ", within the width of the logits"
            raise ValueError(f"{self.where}: token {told:.60} has the id {token_id!r:.40}, want one from 0 to {most - 1}{why}")
        self.tokens[token_id] = text
        return token_id

    def add_control(self, token_id: object, name: str) -> None:
        found = self.add(token_id, name.encode(), name)
        self.control.setdefault(name, found)
        self._control_ids.add(found)

    def vocabulary(self, stops: Collection[Any], asked: Sequence[int] | None) -> Vocabulary:
        """`stops` are what the tokenizer names; `asked` are the caller's own, in their place."""
        ends = [self.control[name] for name in ENDS_OF_TURN if name in self.control]
        tokens = [self.tokens.get(token_id, b"") for token_id in range(max(self.tokens, default=-1) + 1)]
        try:
            found = list(dict.fromkeys([*stops, *ends])) if asked is None else list(asked)
            return Vocabulary(tokens, found, self._width, sorted(self._control_ids - set(found)))
        except (ValueError, TypeError) as error:  # TypeError: a stop id that is a list
            raise ValueError(f"{self.where}: {error}") from None
