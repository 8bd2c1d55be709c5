"""The token table that a tokenizer reader fills."""

from __future__ import annotations

from stepgraph.sampling.fields import clip_repr, is_int

MAX_IDS = 1 << 21  # eight times the largest tokenizer; the table that a single wrong id creates takes half a second and 400 MB
# Control tokens that only ever end a turn, whether or not the file lists them as stop tokens.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


class TokenTable:
    """Token bytes by id, in any order and with gaps. Error messages begin with `where`, a path or the name of an object."""

    def __init__(self, where: str, logits_width: int | None) -> None:
        if logits_width is not None and not (is_int(logits_width) and 1 <= logits_width <= MAX_IDS):
            raise ValueError(f"{where}: logits_width: got {clip_repr(logits_width)}, expected a whole number from 1 to {MAX_IDS}, or None")
        self.where, self.logits_width = where, logits_width
        self.tokens = dict[int, bytes]()
        self.control = dict[str, int]()  # ids without text, by name
        self.stop_ids = list[object]()  # as the tokenizer names them, unchecked
        self._control_ids = set[int]()

    def add(self, token_id: object, text: bytes | None, name: str | None = None) -> None:
        """Store the bytes of an id, or None for a control token; ValueError for an id that is no int or out of range."""
        last = (MAX_IDS if self.logits_width is None else self.logits_width) - 1
        if not is_int(token_id) or not 0 <= token_id <= last:
            token = repr((text or b"").decode(errors="replace") if name is None else name)
            within = "" if self.logits_width is None else ", within the width of the logits"
            raise ValueError(f"{self.where}: token {token:.60} has the id {token_id!r:.40}, expected one from 0 to {last}{within}")
        if text is None:
            assert name is not None
            self.control.setdefault(name, token_id)
            self._control_ids.add(token_id)
            text = name.encode()
        self.tokens[token_id] = text

    @property
    def token_list(self) -> list[bytes]:
        """The bytes of all ids in order; b"" for an id that is missing."""
        return [self.tokens.get(token_id, b"") for token_id in range(max(self.tokens, default=-1) + 1)]

    @property
    def all_stop_ids(self) -> list[object]:
        """The stop ids of the tokenizer, and the control tokens that always end a turn."""
        return list(dict.fromkeys([*self.stop_ids, *(self.control[name] for name in END_OF_TURN if name in self.control)]))

    def control_ids(self, stop_ids: list[int]) -> list[int]:
        """The ids without text besides these stop tokens, ascending."""
        return sorted(self._control_ids - set(stop_ids))
