"""Masks of automata against those of fresh xgrammar matchers: in every state of a grammar, and along random legal texts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar, AutomatonMatcher
from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.matchers.marker import Marker, MarkerMatcher
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammar, XGrammarMatcher
from tests.helpers.automaton_reference import ReferenceAutomaton

LONGEST_WALK = 100  # tokens of one text
TIME_OUT = "one step of the grammar took"  # start of the fault of a matcher that exceeded its time limit


@dataclass
class Comparison:
    """Positions that were compared, texts after which the masks differ, and positions where the library ran out of time."""

    compared: int = 0
    different: list[str] = field(default_factory=list)
    time_outs: int = 0
    unspelled: int = 0  # states that no sequence of single-byte tokens reaches


class Comparer:
    """Compares the masks of one grammar. A marker, before which text is free, is in the image and around the other matcher."""

    def __init__(self, grammar: AutomatonGrammar, library: XGrammar, marker: str | None = None) -> None:
        self.vocabulary: Vocabulary = grammar.vocabulary
        self._library, self._marker = library, Marker(marker, self.vocabulary) if marker else None
        self._marker_text, self._ids = marker, {token: token_id for token_id, token in enumerate(grammar.vocabulary.tokens) if marker}
        self._grammar = grammar.after(self._marker) if self._marker else grammar
        self._rows = torch.zeros((2, self.vocabulary.mask_words), dtype=torch.int32)
        self.result = Comparison()

    def _matchers(self) -> tuple[AutomatonMatcher, XGrammarMatcher, XGrammarMatcher | MarkerMatcher]:
        inner = self._library.matcher()
        return self._grammar.matcher(), inner, MarkerMatcher(inner, self._marker) if self._marker else inner

    def _compare(self, ours: AutomatonMatcher, inner: XGrammarMatcher, library: XGrammarMatcher | MarkerMatcher, text: object) -> bool:
        """Compares the masks at a position, which `text` describes. Returns whether the library has a mask."""
        status = ours.fill_next_token_bitmask(self._rows, 0), library.fill_next_token_bitmask(self._rows, 1)
        if inner.fault.startswith(TIME_OUT):
            self.result.time_outs += 1
            return False
        self.result.compared += 1
        if status[0] is not status[1] or not torch.equal(self._rows[0], self._rows[1]):
            self.result.different.append(repr(text))
        return status[1] is not MaskStatus.FAULT

    def _draw(self, state: int | None, draw: Random) -> int | None:
        """A token that both masks allow; in half of the draws one that continues the marker after its first `state` bytes."""
        row = (self._rows[0] & self._rows[1]).numpy().view(np.uint32)
        if state is not None and draw.random() < 0.5:
            rest = (self._marker_text or "").encode()[state:]
            ids = [self._ids[rest[:size]] for size in range(1, len(rest) + 1) if rest[:size] in self._ids]
            closer = [token for token in ids if row[token // BITS_PER_WORD] >> token % BITS_PER_WORD & 1]
            if closer:
                return draw.choice(closer)
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        return int(draw.choice(legal)) if len(legal) else None

    def states(self, byte_ids: dict[int, int], limit: float = float("inf")) -> None:
        """Compares the masks in every state, with all its counters and up to three stacks, after a shortest text of single-byte tokens.
        Texts with a byte that is in no token are left out. Ends after `limit` positions."""
        reference = ReferenceAutomaton(self._grammar.image)
        spelled = {reference.at(Field.CLASS_OF, byte): byte for byte in byte_ids}  # bytes of a class lead to the same states
        reached = {reference.at(Field.CLASS_OF, byte) for byte in set(b"".join(self.vocabulary.for_xgrammar))}
        for _, shortest in reference.texts():
            if self.result.compared >= limit:
                return
            if not all(reference.at(Field.CLASS_OF, byte) in reached for byte in shortest):
                continue
            text = bytes(byte if byte in byte_ids else spelled.get(reference.at(Field.CLASS_OF, byte), byte) for byte in shortest)
            if not all(byte in byte_ids for byte in text):
                self.result.unspelled += 1
                continue
            ours, inner, library = self._matchers()
            refused = [byte for byte in text if not (ours.accept_token(byte_ids[byte]) & library.accept_token(byte_ids[byte]))]
            if refused and not inner.fault.startswith(TIME_OUT):
                self.result.different.append(f"{text!r}: a byte is not accepted")
            self._compare(ours, inner, library, text)

    def walk(self, positions: int, draw: Random, seconds: float = float("inf")) -> None:
        """Compares the masks along random legal texts, until `positions` or `seconds` of processor time are reached. Half of the tokens
        before the end of a marker continue it."""
        end, until = self.result.compared + self.result.time_outs + positions, time.thread_time() + seconds
        while (seen := self.result.compared + self.result.time_outs) < end and time.thread_time() < until:
            ours, inner, library = self._matchers()
            history = list[int]()
            for _ in range(min(LONGEST_WALK, end - seen)):
                has_mask = self._compare(ours, inner, library, history)
                state = library.state if isinstance(library, MarkerMatcher) and not library.past_marker else None
                token = self._draw(state, draw) if has_mask else None
                if token is None or time.thread_time() > until:
                    break
                history.append(token)
                if not (ours.accept_token(history[-1]) & library.accept_token(history[-1])):
                    if not inner.fault.startswith(TIME_OUT):
                        self.result.different.append(f"{history!r}: a token is not accepted")
                    break
