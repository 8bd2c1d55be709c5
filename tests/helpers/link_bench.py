"""A round's host side without a device: two links over memory of their own, the same requests, and what a device would do."""

from __future__ import annotations

import gc
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, MaskStatus, Matcher, Vocabulary
from stepgraph.sampling.grammar.link.library import load
from stepgraph.sampling.grammar.link.native import NativeLink
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, HostStep, MatcherRow, advance, fill_new
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.forced import Forcing, token_table
from stepgraph.sampling.grammar.status import ROW_RUNNING, TAG_FIELDS, HostColumn
from tests.helpers.toy_engines import COMPILER, CONSTRAINTS, VOCABULARY

WORDS = VOCABULARY.mask_words
HAS_LLGUIDANCE = importlib.util.find_spec("llguidance") is not None
OTHER_COMPILER = GrammarCompiler(VOCABULARY, backend="llguidance")
A = VOCABULARY.tokens.index(b"a")
WALK = (BEGIN_ROUND, COMMIT, advance(1), advance(2), advance(3), END_ROUND)


@dataclass(frozen=True)
class Memory:
    """What a round pins."""

    state: Tensor
    drafts: Tensor
    masks: Tensor
    tags: Tensor
    forced: Tensor | None = None
    vocabulary: Vocabulary = field(default=VOCABULARY, kw_only=True)

    @classmethod
    def make(cls, slots: int, drafts: int, words: int = WORDS, vocabulary: Vocabulary = VOCABULARY) -> Memory:
        return cls(
            torch.zeros(slots, len(HostColumn), dtype=torch.int64),
            torch.full((drafts, slots), -1, dtype=torch.int64),
            torch.full((drafts + 1, slots, words), 0x5A5A5A5A, dtype=torch.int32),
            torch.full((drafts + 1, slots, TAG_FIELDS), 77, dtype=torch.int64),
            torch.full((drafts, slots), 77, dtype=torch.int64),
            vocabulary=vocabulary,
        )

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.state, self.drafts, self.masks, self.tags

    @property
    def forcing(self) -> Forcing | None:
        return None if self.forced is None else Forcing(token_table(self.vocabulary), self.forced)


def native_link(memory: Memory, depth: int = 4, threads: int | None = None) -> NativeLink:
    return NativeLink(load(), *memory.all, depth=depth, threads=threads, forcing=memory.forcing)


class Foreign:
    """A matcher that no native link knows: any other's, behind the bare protocol."""

    def __init__(self, inner: Matcher) -> None:
        self._inner = inner

    def accept_token(self, token_id: int) -> bool:
        return self._inner.accept_token(token_id)

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        return self._inner.fill_next_token_bitmask(masks, index)

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)

    @property
    def fault(self) -> str:
        return self._inner.fault


@dataclass
class Guest:
    """A request in its slot, as the device knows it, with a row of each link."""

    owner: int
    grammar: CompiledConstraint
    rows: tuple[MatcherRow, MatcherRow]
    history: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    accepted: int = 0
    finish: int = ROW_RUNNING


class Twins:
    """The Python link and the native one through the same schedule; `check` compares all that they wrote."""

    def __init__(self, slots: int, drafts: int, random: Random, threads: int | None = None, vocabulary: Vocabulary = VOCABULARY) -> None:
        self.slots, self.drafts, self.random, self.vocabulary = slots, drafts, random, vocabulary
        first, second = (Memory.make(slots, drafts, vocabulary.mask_words, vocabulary) for _ in range(2))
        self.memories = first, second
        self.links: tuple[HostLink, HostLink] = (
            PythonLink(*self.memories[0].all, forcing=self.memories[0].forcing),
            native_link(self.memories[1], threads=threads),
        )
        self.guests: list[Guest | None] = [None] * slots
        self.owners = self.proposed = 0

    def seat(self, slot: int) -> None:
        constraint = self.random.choice([one for one in CONSTRAINTS if one] + [Constraint.regex("(ab|ac)+")])
        grammar = COMPILER.compile(constraint)
        if self.random.random() < 0.3 and HAS_LLGUIDANCE and constraint.kind in ("json_schema", "json_object", "regex", "choice"):
            grammar = OTHER_COMPILER.compile(constraint)
        foreign = self.random.random() < 0.1
        self.sit(slot, grammar, [Foreign(grammar.matcher()) if foreign else grammar.matcher() for _ in self.links])

    def sit(self, slot: int, grammar: CompiledConstraint, matchers: list[Matcher]) -> None:
        self.owners += 1
        first, second = (link.row(self.owners, matcher) for link, matcher in zip(self.links, matchers, strict=True))
        self.guests[slot] = Guest(self.owners, grammar, (first, second))

    def push_batch(self) -> None:
        for place, link in enumerate(self.links):
            link.push_batch([guest.rows[place] if guest else None for guest in self.guests])

    def node(self, *steps: HostStep) -> None:
        for link in self.links:
            link.node(steps)()

    def show_state(self) -> None:
        for memory in self.memories:
            for slot, guest in enumerate(self.guests):
                if guest:
                    last = guest.history[-1] if guest.history else 0
                    values = [guest.owner, len(guest.history), last, guest.accepted, guest.finish]
                    memory.state[slot] = torch.tensor(values)

    def show_draft(self, index: int) -> None:
        for memory in self.memories:
            for slot, guest in enumerate(self.guests):
                drafts = guest.drafts if guest else []
                memory.drafts[index - 1, slot] = drafts[index - 1] if index <= len(drafts) else -1

    def round(self, masked: bool) -> None:
        """One round as `graphs/round.py` makes it."""
        self.turnover()
        self.push_batch()
        self.show_state()
        if not masked or not self.drafts:
            for guest in filter(None, self.guests):
                guest.drafts.clear()
                self.draft(guest, self.drafts)
            for index in range(1, self.drafts + 1):
                self.show_draft(index)
            self.node(BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, self.drafts + 1)), END_ROUND)
            self.accept()
            self.check()
            return
        self.show_draft(self.drafts)
        self.node(BEGIN_ROUND, fill_new(self.drafts), advance(self.drafts))
        self.accept()
        self.show_state()
        for guest in filter(None, self.guests):
            guest.drafts.clear()
        for index in range(self.drafts):
            if index:
                self.show_draft(index)
            steps = [advance(index) if index else COMMIT]
            self.node(*steps, *([END_ROUND] if index == self.drafts - 1 else []))
            self.check()
            for guest in filter(None, self.guests):
                self.draft(guest, index + 1, guided=True)

    def turnover(self) -> None:
        """Requests end and others take their slots; a slot may be shown before its row is, as a stale one."""
        for slot, guest in enumerate(self.guests):
            if guest is None or guest.finish != ROW_RUNNING or self.random.random() < 0.03:
                self.guests[slot] = None
                if self.random.random() < 0.8:
                    self.seat(slot)
            elif self.random.random() < 0.02:
                guest.finish = ROW_RUNNING + 1  # cancelled: the row is inert while its rounds are still on their way

    def legal(self, guest: Guest, drafts: int) -> list[int]:
        """What a fresh matcher allows behind the history and so many drafts."""
        matcher, mask = guest.grammar.matcher(), torch.zeros(1, self.vocabulary.mask_words, dtype=torch.int32)
        if not all(matcher.accept_token(token) for token in [*guest.history, *guest.drafts[:drafts]]):
            return []
        matcher.fill_next_token_bitmask(mask, 0)
        return [token for token in range(self.vocabulary.logits_width) if int(mask[0, token // 32]) >> (token % 32) & 1]

    def draft(self, guest: Guest, count: int, guided: bool = False) -> None:
        """Extend the drafts to `count`: forced ones where the host says so, mostly legal ones, and all that a drafter may get wrong."""
        del guest.drafts[count:]
        while len(guest.drafts) < count:
            legal, luck, place = self.legal(guest, len(guest.drafts)), self.random.random(), len(guest.drafts)
            told = self.memories[0].forced if guided and guest.finish == ROW_RUNNING else None
            forced = -1 if told is None else int(told[place, self.guests.index(guest)])
            self.proposed += forced >= 0
            assert forced < 0 or forced in legal
            if luck < 0.5 and forced >= 0:
                guest.drafts.append(forced)
            elif luck < 0.75 and legal:
                guest.drafts.append(self.random.choice(legal))
            elif luck < 0.85:
                guest.drafts.append(self.vocabulary.stop_token_ids[0])
            else:
                width = self.vocabulary.logits_width
                wrong = [-1, self.random.randrange(width), width + 5, 2**32 + 5, 2**62]
                guest.drafts.append(self.random.choice(wrong))

    def accept(self) -> None:
        """What verification makes of the drafts: some hold, one token follows; now and then a history that cannot be."""
        for guest in filter(None, self.guests):
            row = guest.rows[0]
            pending_drafts = int(getattr(row, "pending_drafts", 0))
            if guest.finish != ROW_RUNNING:
                continue
            guest.accepted = self.random.randint(0, min(pending_drafts, len(guest.drafts)))
            legal = self.legal(guest, guest.accepted)
            wrong = self.random.random() < 0.02
            if not legal and not wrong:
                guest.finish = ROW_RUNNING + 2
                continue
            guest.history += [*guest.drafts[: guest.accepted], self.random.randrange(300) if wrong else self.random.choice(legal)]
            if self.random.random() < 0.01:
                guest.history.append(0)
            if self.random.random() < 0.01:
                guest.accepted += 1

    def check(self) -> None:
        ours, theirs = self.memories
        assert torch.equal(ours.masks, theirs.masks)
        assert torch.equal(ours.tags, theirs.tags)
        assert ours.forced is not None and theirs.forced is not None and torch.equal(ours.forced, theirs.forced)
        for guest in filter(None, self.guests):
            first, second = (
                [getattr(row, name) for name in ("fault", "last_mask_status", "committed", "pending_drafts", "fills")] for row in guest.rows
            )
            assert first == second
        assert self.links[0].stats == self.links[1].stats


def running(memory: Memory, row: MatcherRow, slot: int = 0, history: int = 0, last: int = 0, accepted: int = 0) -> None:
    memory.state[slot] = torch.tensor([row.owner, history, last, accepted, ROW_RUNNING])


def letters(link: HostLink, owner: int = 9, compiler: GrammarCompiler = COMPILER) -> Any:
    return link.row(owner, compiler.compile(Constraint.regex("[a-z]+")).matcher())


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
