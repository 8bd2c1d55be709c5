"""The host side of a round without a device: both host links, each with its own memory, the same requests, and a simulated device."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, Matcher, Vocabulary
from stepgraph.sampling.grammar.link.native import NativeLink, NativeRow, load
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, HostStep, MatcherRow, advance, fill_next
from stepgraph.sampling.grammar.link.python import PythonLink, PythonRow
from stepgraph.sampling.grammar.matchers.forced import Forcing, token_lookup
from stepgraph.sampling.grammar.status import TAG_FIELDS, FinishCode, HostColumn
from tests.helpers.toy_engines import CONSTRAINTS, VOCABULARY

WORDS = VOCABULARY.mask_words
HAS_LLGUIDANCE = importlib.util.find_spec("llguidance") is not None
XGRAMMAR_COMPILER = GrammarCompiler(VOCABULARY, backend="xgrammar")
LLGUIDANCE_COMPILER = GrammarCompiler(VOCABULARY, backend="llguidance")
AUTOMATON_COMPILER = GrammarCompiler(VOCABULARY, backend="automaton")
A = VOCABULARY.tokens.index(b"a")
ROUND_STEPS = (BEGIN_ROUND, COMMIT, advance(1), advance(2), advance(3), END_ROUND)


@dataclass(frozen=True)
class Memory:
    """The pinned memory of a round."""

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
        return None if self.forced is None else Forcing(token_lookup(self.vocabulary), self.forced)


def native_link(memory: Memory, depth: int = 4, threads: int | None = None) -> NativeLink:
    return NativeLink(load(), *memory.all, depth=depth, threads=threads, forcing=memory.forcing)


@dataclass
class Request:
    """A request in its slot as the device sees it, with one row of each link."""

    owner: int
    grammar: CompiledConstraint
    rows: tuple[PythonRow, NativeRow]
    history: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    accepted: int = 0
    finish: int = FinishCode.RUNNING


class LinkPair:
    """The Python and the native link in the same random schedule; `check` compares everything that they wrote."""

    def __init__(self, slots: int, drafts: int, random: Random, threads: int | None = None, vocabulary: Vocabulary = VOCABULARY) -> None:
        self.slots, self.drafts, self.random, self.vocabulary = slots, drafts, random, vocabulary
        first, second = (Memory.make(slots, drafts, vocabulary.mask_words, vocabulary) for _ in range(2))
        self.memories = first, second
        self.links: tuple[PythonLink, NativeLink] = (
            PythonLink(*self.memories[0].all, forcing=self.memories[0].forcing),
            native_link(self.memories[1], threads=threads),
        )
        self.requests: list[Request | None] = [None] * slots
        self.num_admitted = 0

    def admit_random(self, slot: int) -> None:
        constraint = self.random.choice([constraint for constraint in CONSTRAINTS if constraint] + [Constraint.regex("(ab|ac)+")])
        grammar = XGRAMMAR_COMPILER.compile(constraint)
        if self.random.random() < 0.3 and HAS_LLGUIDANCE and constraint.kind in ("json_schema", "json_object", "regex", "choice"):
            grammar = LLGUIDANCE_COMPILER.compile(constraint)
        elif self.random.random() < 0.4:
            grammar = AUTOMATON_COMPILER.compile(constraint)
        self.admit(slot, grammar, [grammar.matcher() for _ in self.links])

    def admit(self, slot: int, grammar: CompiledConstraint, matchers: list[Matcher]) -> None:
        self.num_admitted += 1
        python, native = self.links
        rows = python.row(self.num_admitted, matchers[0]), native.row(self.num_admitted, matchers[1])
        self.requests[slot] = Request(self.num_admitted, grammar, rows)

    def push_batch(self) -> None:
        links: tuple[HostLink, HostLink] = self.links
        for which, link in enumerate(links):
            link.push_batch([request.rows[which] if request else None for request in self.requests])

    def node(self, *steps: HostStep) -> None:
        for link in self.links:
            link.node(steps)()

    def copy_state(self) -> None:
        for memory in self.memories:
            for slot, request in enumerate(self.requests):
                if request:
                    last = request.history[-1] if request.history else 0
                    values = [request.owner, len(request.history), last, request.accepted, request.finish]
                    memory.state[slot] = torch.tensor(values)

    def copy_draft(self, index: int) -> None:
        for memory in self.memories:
            for slot, request in enumerate(self.requests):
                drafts = request.drafts if request else []
                memory.drafts[index - 1, slot] = drafts[index - 1] if index <= len(drafts) else -1

    def run(self, rounds: int, masked: bool) -> None:
        for _ in range(rounds):
            self.round(masked)

    def round(self, masked: bool) -> None:
        """One round with the host nodes of `graphs/round.py`. `masked`: each draft is chosen under its mask."""
        self.replace_requests()
        self.push_batch()
        self.copy_state()
        if not masked or not self.drafts:
            for request in filter(None, self.requests):
                request.drafts.clear()
                self.draft(request, self.drafts)
            for index in range(1, self.drafts + 1):
                self.copy_draft(index)
            self.node(BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, self.drafts + 1)), END_ROUND)
            self.accept()
            self.check()
            return
        self.copy_draft(self.drafts)
        self.node(BEGIN_ROUND, fill_next(self.drafts))
        self.accept()
        self.copy_state()
        for request in filter(None, self.requests):
            request.drafts.clear()
        for index in range(self.drafts):
            if index:
                self.copy_draft(index)
            steps = [advance(index) if index else COMMIT]
            self.node(*steps, *([END_ROUND] if index == self.drafts - 1 else []))
            self.check()
            for request in filter(None, self.requests):
                self.draft(request, index + 1, guided=True)

    def replace_requests(self) -> None:
        """Requests end and others take their slots."""
        for slot, request in enumerate(self.requests):
            if request is None or request.finish != FinishCode.RUNNING or self.random.random() < 0.03:
                self.requests[slot] = None
                if self.random.random() < 0.8:
                    self.admit_random(slot)
            elif self.random.random() < 0.02:
                request.finish = FinishCode.RUNNING + 1  # cancelled: the row is inert in the rounds already launched

    def legal(self, request: Request, drafts: int) -> list[int]:
        """The tokens that a fresh matcher allows after the history and the first `drafts` drafts."""
        matcher, mask = request.grammar.matcher(), torch.zeros(1, self.vocabulary.mask_words, dtype=torch.int32)
        if not all(matcher.accept_token(token) for token in [*request.history, *request.drafts[:drafts]]):
            return []
        matcher.fill_next_token_bitmask(mask, 0)
        words = mask[0].tolist()
        return [token for token in range(self.vocabulary.logits_width) if words[token // 32] >> (token % 32) & 1]

    def draft(self, request: Request, count: int, guided: bool = False) -> None:
        """Extend the drafts to `count`: some forced, most legal, and all kinds of illegal ones."""
        del request.drafts[count:]
        while len(request.drafts) < count:
            index = len(request.drafts)
            legal, rng = self.legal(request, index), self.random.random()
            forced_host = self.memories[0].forced if guided and request.finish == FinishCode.RUNNING else None
            forced = -1 if forced_host is None else int(forced_host[index, self.requests.index(request)])
            assert forced < 0 or forced in legal
            if rng < 0.5 and forced >= 0:
                request.drafts.append(forced)
            elif rng < 0.75 and legal:
                request.drafts.append(self.random.choice(legal))
            elif rng < 0.85:
                request.drafts.append(self.vocabulary.stop_token_ids[0])
            else:
                width = self.vocabulary.logits_width
                wrong = [-1, self.random.randrange(width), width + 5, 2**32 + 5, 2**62]
                request.drafts.append(self.random.choice(wrong))

    def accept(self) -> None:
        """Verification: a random prefix of the drafts is accepted and one token added; sometimes the history is impossible."""
        for request in filter(None, self.requests):
            if request.finish != FinishCode.RUNNING:
                continue
            request.accepted = self.random.randint(0, min(request.rows[0].pending_drafts, len(request.drafts)))
            legal = self.legal(request, request.accepted)
            wrong = self.random.random() < 0.02
            if not legal and not wrong:
                request.finish = FinishCode.RUNNING + 2
                continue
            request.history += [*request.drafts[: request.accepted], self.random.randrange(300) if wrong else self.random.choice(legal)]
            if self.random.random() < 0.01:
                request.history.append(0)
            if self.random.random() < 0.01:
                request.accepted += 1

    def check(self) -> None:
        python, native = self.memories
        assert torch.equal(python.masks, native.masks)
        assert torch.equal(python.tags, native.tags)
        assert python.forced is not None and native.forced is not None and torch.equal(python.forced, native.forced)
        for request in filter(None, self.requests):
            row, native_row = request.rows
            assert row.fault == native_row.fault
            for name in ("last_mask_status", "committed", "pending_drafts", "next_mask"):
                assert getattr(row, name) == getattr(native_row.struct, name)
        assert self.links[0].stats == self.links[1].stats


def set_running(memory: Memory, row: MatcherRow, slot: int = 0, history: int = 0, last: int = 0, accepted: int = 0) -> None:
    memory.state[slot] = torch.tensor([row.owner, history, last, accepted, FinishCode.RUNNING])


def run_round(
    memory: Memory,
    link: HostLink,
    rows: Sequence[MatcherRow],
    drafts: Sequence[int] = (),
    history: int = 0,
    last: int = 0,
    accepted: int = 0,
    steps: Sequence[HostStep] = ROUND_STEPS,
) -> None:
    """A round of running rows with equal histories. `drafts`: of each row; the others are those in memory."""
    for slot, row in enumerate(rows):
        set_running(memory, row, slot, history, last, accepted)
    for index, token in enumerate(drafts):
        memory.drafts[index] = token
    link.push_batch(rows)
    link.node(steps)()


LETTERS = Constraint.regex("[a-z]+")


def letters_row(link: HostLink, owner: int = 9, compiler: GrammarCompiler = XGRAMMAR_COMPILER, constraint: Constraint = LETTERS) -> Any:
    return link.row(owner, compiler.compile(constraint).matcher())


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
