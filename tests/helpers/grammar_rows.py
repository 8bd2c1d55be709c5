"""Rows with images of grammars in one arena, in random rounds: `advance_fill` beside a host link with matchers of the same images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from torch import Tensor

from stepgraph.sampling.grammar.automaton.arena import ALIGNMENT
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar, token_tensors
from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostStep, MatcherRow, advance, fill_next, follow
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.forced import Forcing, token_lookup
from stepgraph.sampling.grammar.status import TAG_FIELDS, FinishCode, HostColumn, MaskStatus
from stepgraph.sampling.kernels.advance import PLACE_INTS, TEXT_INTS

Program = Callable[..., None]  # takes the arguments of advance_fill
BRACKETS = frozenset(b'{}[]()"')


def arena_of(grammars: Sequence[AutomatonGrammar]) -> tuple[Tensor, list[int]]:
    """All images one after another, and where each begins."""
    parts, offsets, size = [np.zeros(ALIGNMENT, np.int32)], list[int](), ALIGNMENT
    for grammar in grammars:
        offsets.append(size)
        parts += [grammar.image, np.zeros(-len(grammar.image) % ALIGNMENT, np.int32)]
        size += len(parts[-2]) + len(parts[-1])
    return torch.from_numpy(np.concatenate(parts)), offsets


@dataclass
class Request:
    """The grammar and the generated tokens of a row."""

    grammar: AutomatonGrammar
    matcher: MatcherRow
    history: list[int] = field(default_factory=list)

    def chain(self, rng: Random, count: int) -> list[int]:
        """Drafts, most of them legal, and some after a draft that is not."""
        matcher, mask, found = self.grammar.matcher(), torch.zeros(1, self.grammar.vocabulary.mask_words, dtype=torch.int32), list[int]()
        for token in self.history:
            assert matcher.accept_token(token)
        for _ in range(count):
            matcher.fill_next_token_bitmask(mask, 0)
            legal = pick(rng, mask[0], self.grammar)
            token = rng.choice([-1, -2, rng.randrange(len(self.grammar.vocabulary.tokens) + 40)])
            token = token if legal is None or rng.random() < 0.1 else legal
            found.append(token)
            matcher.accept_token(token)
        return found


def pick(rng: Random, mask: Tensor, grammar: AutomatonGrammar) -> int | None:
    """A legal token of a mask, often one with a bracket; None if no token is legal."""
    legal = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")).tolist()
    brackets = [token for token in legal if set(grammar.vocabulary.tokens[token]) & BRACKETS]
    return rng.choice(brackets if brackets and rng.random() < 0.6 else legal) if legal else None


class RowRounds:
    """Rows in random rounds. Every second row has a grammar; one that finishes is inert for some rounds, then it gets another request.

    Every program has its own copy of what the operation writes. After each call all copies are equal, and equal to what a host link
    has written with matchers. Drafts are chosen under masks if the seed is even; with `forced`, many of them are those that the grammar
    forces, and if the seed is a multiple of 4, these replace a proposed chain.
    """

    def __init__(
        self,
        grammars: Sequence[AutomatonGrammar],
        slots: int,
        drafts: int,
        seed: int,
        programs: Sequence[Program],
        forced: bool = False,
    ) -> None:
        self.masked = drafts > 0 and seed % 2 == 0
        self.grammars, self.slots, self.drafts, self.programs = grammars, slots, drafts, programs
        self.rng, positions, words = Random(seed), drafts + 1, grammars[0].vocabulary.mask_words
        self.counts = Counter[MaskStatus]()  # of the tags that were compared
        arena, self.offsets = arena_of(grammars)
        self.tables = (arena, *token_tensors(grammars[0].vocabulary, torch.device("cpu")))
        generator = self.generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(dtype)

        depth = max(int(grammar.image[Field.DEPTH]) for grammar in grammars)
        outputs = (
            noise(slots + 1, positions + 1, PLACE_INTS),
            noise(slots + 1, positions + 1, depth),
            noise(slots + 1, positions, words),
            noise(slots + 1, positions, TAG_FIELDS, dtype=torch.int64),
            noise(positions, slots + 1, dtype=torch.int64),
        )
        self.outputs = [[tensor.clone() for tensor in outputs] for _ in programs]
        self.state = torch.zeros(slots + 1, len(HostColumn) + 2, dtype=torch.int64)  # the last column is the offset of the image
        self.rows = torch.tensor(self.rng.sample(range(slots + 1), slots))
        self.row_drafts, self.batch_drafts = torch.full((slots + 1, drafts), -1), torch.full((drafts, slots), -1)
        self.host_state, self.host_drafts = torch.zeros(slots, len(HostColumn), dtype=torch.int64), torch.full((drafts, slots), -1)
        self.masks = torch.zeros(positions, slots, words, dtype=torch.int32)
        self.tags = torch.zeros(positions, slots, TAG_FIELDS, dtype=torch.int64)
        self.forced_host, self.num_forced = torch.full((drafts, slots), -1), 0
        self.texts: list[Tensor | None] = [None for _ in programs]
        self.forced: list[Tensor | None] = [None for _ in programs]
        forcing = None
        self.split: tuple[Tensor | None, int] = None, 0
        if forced:
            table = token_lookup(grammars[0].vocabulary)
            forcing, self.split = Forcing(table, self.forced_host), (torch.from_numpy(table.slots), int(table.merges))
            self.texts = [noise(slots + 1, TEXT_INTS) for _ in programs]
            self.forced = [torch.full((drafts, slots + 1), -1) for _ in programs]
        self.proposed = forced and seed % 4 == 0
        self.link = PythonLink(self.host_state, self.host_drafts, self.masks, self.tags, forcing=forcing)
        self.requests: dict[int, Request] = {}
        self.owner = 0
        for row in self.rows.tolist():
            self.admit(row)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            if self.masked:
                self.masked_round()
            else:
                self.unmasked_round()
            assert not any(request.matcher.fault for request in self.requests.values())

    def masked_round(self) -> None:
        last = self.drafts
        self.begin()
        self.call([BEGIN_ROUND, fill_next(last)], last, last, new=True)
        self.emit()
        self.call([COMMIT], 0, 0)
        chains = self.chains()
        if self.proposed and last > 1:
            self.batch_drafts.copy_(chains.T)
            self.call([follow(index) for index in range(1, last)], 1, last - 1)
        for index in range(1, last + 1):
            forced = self.forced_host[index - 1]
            replaced = (forced >= 0) & (self.proposed | (torch.rand(len(forced), generator=self.generator) < 0.7))
            chains[:, index - 1] = torch.where(replaced, forced, chains[:, index - 1])
            self.batch_drafts[index - 1] = chains[:, index - 1]
            if index < last and not self.proposed:
                self.call([advance(index)], index, index)
        self.link.node([END_ROUND])()
        self.row_drafts[self.rows] = chains

    def unmasked_round(self) -> None:
        last = self.drafts
        self.begin()
        self.call([BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, last + 1)), END_ROUND], 0, last, by_row=True)
        self.emit()
        self.row_drafts[self.rows] = self.chains()

    def begin(self) -> None:
        for row in self.rows.tolist():
            if self.state[row, HostColumn.FINISH] != FinishCode.RUNNING and self.rng.random() < 0.4:
                self.admit(row)
        self.link.push_batch([self.requests[row].matcher if row in self.requests else None for row in self.rows.tolist()])

    def call(self, steps: Sequence[HostStep], first: int, last: int, new: bool = False, by_row: bool = False) -> None:
        by_row |= new  # the head of a round reads the drafts of the round before
        drafts = self.row_drafts if by_row else self.batch_drafts.T
        self.host_state.copy_(self.state[self.rows, : len(HostColumn)])
        self.host_drafts.copy_(self.row_drafts[self.rows].T if by_row else self.batch_drafts)
        self.link.node(steps)()
        before = [tensor.clone() for tensor in self.outputs[0]]
        slots, merges = self.split
        for program, outputs, text, forced in zip(self.programs, self.outputs, self.texts, self.forced, strict=True):
            forcing = text, slots, None if by_row else forced, merges, int(self.proposed and first > 0 and not by_row)
            program(self.state, self.state[:, -1], self.rows, drafts, *self.tables, *outputs, first, last, int(new), int(by_row), *forcing)
        compared = range(5) if slots is None else (0, 2, 3, 4)  # a program may use the stack of a place that is not in use
        for other in self.outputs[1:]:
            assert all(torch.equal(self.outputs[0][each], other[each]) for each in compared)
        if slots is not None and not by_row:
            self.compare_forced(range(first, last + 1))
        for row in range(self.slots + 1):
            if self.state[row, -1] == 0 or row not in self.rows:
                assert all(torch.equal(now[row], then[row]) for now, then in zip(self.outputs[0][:4], before[:4], strict=True))
        self.compare(range(first, last + 1))

    def compare_forced(self, filled: range) -> None:
        on_device = self.state[self.rows, -1] > 0
        for forced in self.forced:
            assert forced is not None and torch.equal(
                forced[filled.start : filled.stop, : self.slots][:, on_device], self.forced_host[filled.start : filled.stop][:, on_device]
            )
        self.num_forced += int((self.forced_host[filled.start : filled.stop] >= 0).sum())

    def compare(self, filled: range) -> None:
        masks, tags, statuses = self.outputs[0][2:]
        for slot, row in enumerate(self.rows.tolist()):
            found = tags[row, filled.start : filled.stop, 3] if self.state[row, -1] else MaskStatus.NONE
            assert (statuses[filled.start : filled.stop, slot] == found).all()
            for stage in filled if self.state[row, -1] else ():
                expected = self.tags[stage, slot].tolist()
                index, status = expected[2], MaskStatus(expected[3])
                assert tags[row, index].tolist() == expected
                self.counts[status] += 1
                if status not in (MaskStatus.NONE, MaskStatus.ILLEGAL):
                    assert torch.equal(masks[row, index], self.masks[stage, slot])
                if index != stage:  # a new row has its first mask and no draft
                    assert tags[row, stage].tolist() == [0, 0, stage, 0]

    def status(self, row: int, index: int) -> MaskStatus:
        owner, generated, at, status = self.outputs[0][3][row, index].tolist()
        state = self.state[row]
        is_valid = (owner, generated, at) == (int(state[HostColumn.OWNER]), int(state[HostColumn.GENERATED]), index)
        return MaskStatus(status) if is_valid else MaskStatus.NONE

    def emit(self) -> None:
        """Some drafts are accepted, and a token is sampled after them."""
        for row in self.rows.tolist():
            state = self.state[row]
            if state[HostColumn.FINISH] != FinishCode.RUNNING or row not in self.requests:
                continue
            request, masks, drafts, held = self.requests[row], self.outputs[0][2][row], self.row_drafts[row].tolist(), 0
            assert self.status(row, 0) != MaskStatus.NONE
            while held < self.drafts and drafts[held] >= 0 and self.status(row, held) == MaskStatus.OK and self.rng.random() < 0.8:
                is_legal = drafts[held] < 32 * masks.shape[1] and masks[held, drafts[held] // 32] >> drafts[held] % 32 & 1
                if not is_legal or self.status(row, held + 1) in (MaskStatus.NONE, MaskStatus.ILLEGAL):
                    break
                held += 1
            sampled = pick(self.rng, masks[held], request.grammar) if self.status(row, held) == MaskStatus.OK else None
            emitted = drafts[:held] + ([] if sampled is None else [sampled])
            request.history += emitted
            state[HostColumn.GENERATED] += len(emitted)
            state[HostColumn.ACCEPTED] = held
            if sampled is None or self.rng.random() < 0.02:
                state[HostColumn.FINISH] = int(FinishCode.STOP)
            if emitted:
                state[HostColumn.LAST_TOKEN] = emitted[-1]

    def chains(self) -> Tensor:
        """[slots, drafts]"""
        empty, found = [-1] * self.drafts, list[list[int]]()
        for row in self.rows.tolist():
            running = row in self.requests and self.state[row, HostColumn.FINISH] == FinishCode.RUNNING
            found.append(self.requests[row].chain(self.rng, self.drafts) if running else empty)
        return torch.tensor(found, dtype=torch.int64).reshape(len(self.rows), self.drafts)

    def admit(self, row: int) -> None:
        """A new request. The row keeps the places, masks and tags of the previous request."""
        self.owner += 1
        self.requests.pop(row, None)
        self.state[row] = 0
        self.state[row, HostColumn.OWNER], self.state[row, HostColumn.FINISH] = self.owner, int(FinishCode.RUNNING)
        self.row_drafts[row] = -1
        if self.rng.random() < 0.8:
            which = self.rng.randrange(len(self.grammars))
            self.state[row, -1] = self.offsets[which]
            self.requests[row] = Request(self.grammars[which], self.link.row(self.owner, self.grammars[which].matcher()))
