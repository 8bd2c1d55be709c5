"""Variants that drive the matchers of a batch: the library's Python calls, its batch calls, and the host links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xgrammar
from torch import Tensor

from stepgraph.graphs.capture import host_call
from stepgraph.sampling.grammar import CompiledConstraint, Vocabulary, XGrammarMatcher
from stepgraph.sampling.grammar.link.native import NativeLink, available_processors, load
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, MatcherRow, advance
from stepgraph.sampling.grammar.matchers.forced import Forcing, token_lookup
from stepgraph.sampling.grammar.status import TAG_FIELDS, FinishCode, HostColumn
from stepgraph.sampling.native import Unavailable
from tools.bench.grammar_documents import RowRound
from tools.gpu.checks.stopwatch import wall_us


class PythonLoop:
    """(a) Row by row with the library's Python calls only: no tags, statuses, checks or limits."""

    name = "python loop"

    def __init__(self, rows: int, words: int, drafts: int) -> None:
        self.masks = torch.zeros(drafts + 1, rows, words, dtype=torch.int32)
        self.matchers: list[Any] = []

    def start_document(self, slot: int, grammar: CompiledConstraint) -> None:
        matcher = grammar.matcher()
        assert isinstance(matcher, XGrammarMatcher)
        self.matchers[slot : slot + 1] = [matcher.library_matcher]

    def prepare(self, turns: Sequence[RowRound]) -> None:
        self.turns, self.planes = turns, list(self.masks)

    def seconds(self) -> float:
        """One round."""
        return wall_us(self.run) / 1e6

    def run(self) -> None:
        planes = self.planes
        for slot, turn in enumerate(self.turns):
            matcher = self.matchers[slot]
            if turn.rollback:
                matcher.rollback(turn.rollback)
            if turn.token >= 0:
                assert matcher.accept_token(turn.token)
            matcher.fill_next_token_bitmask(planes[0], slot)
            for index, draft in enumerate(turn.drafts, 1):
                assert matcher.accept_token(draft)
                matcher.fill_next_token_bitmask(planes[index], slot)


class LibraryBatch(PythonLoop):
    """(b) The library's batch calls: fills run in its threads, accepts and rollbacks one by one."""

    name = "library batch"

    def __init__(self, rows: int, words: int, drafts: int) -> None:
        super().__init__(rows, words, drafts)
        self.batch = xgrammar.BatchGrammarMatcher(max_threads=max(1, available_processors()))

    def prepare(self, turns: Sequence[RowRound]) -> None:
        super().prepare(turns)
        self.drafts_by_position = [[turn.drafts[index] for turn in turns] for index in range(len(turns[0].drafts))]

    def run(self) -> None:
        matchers, batch = self.matchers, self.batch
        for matcher, turn in zip(matchers, self.turns, strict=True):
            if turn.rollback:
                matcher.rollback(turn.rollback)
            if turn.token >= 0:
                assert matcher.accept_token(turn.token)
        batch.batch_fill_next_token_bitmask(matchers, self.planes[0])
        for index, drafts in enumerate(self.drafts_by_position, 1):
            assert all(batch.batch_accept_token(matchers, drafts))
            batch.batch_fill_next_token_bitmask(matchers, self.planes[index])


class LinkVariant:
    """A host link, called like the round's host node, with all checks and tags. Grammars in `replacements` are replaced by their values."""

    def __init__(
        self,
        name: str,
        make: Callable[..., HostLink],
        rows: int,
        words: int,
        drafts: int,
        from_c: bool = False,
        replacements: Mapping[CompiledConstraint, CompiledConstraint] = MappingProxyType({}),
    ) -> None:
        self.name, self._from_c, self._replacements = name, from_c, replacements
        self.state = torch.zeros(rows, len(HostColumn), dtype=torch.int64)
        self.drafts = torch.full((drafts, rows), -1, dtype=torch.int64)
        self.masks = torch.zeros(drafts + 1, rows, words, dtype=torch.int32)
        tags = torch.zeros(drafts + 1, rows, TAG_FIELDS, dtype=torch.int64)
        self.link = make(self.state, self.drafts, self.masks, tags)
        self.rows: list[MatcherRow | None] = [None] * rows
        self.owners, self.generated = 0, [0] * rows
        self.node = self.link.node((BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, drafts + 1)), END_ROUND))
        self.run = host_call(name, self.node)
        if from_c:
            self.log = np.zeros((2, 3), np.int64)
            self.link.log_nodes(self.log)

    def start_document(self, slot: int, grammar: CompiledConstraint) -> None:
        self.owners += 1
        self.rows[slot], self.generated[slot] = self.link.row(self.owners, self._replacements.get(grammar, grammar).matcher()), 0

    def prepare(self, turns: Sequence[RowRound]) -> None:
        for slot, (turn, row) in enumerate(zip(turns, self.rows, strict=True)):
            assert row is not None and not row.fault, row
            self.generated[slot] += turn.accepted + 1 if turn.token >= 0 else 0
            self.state[slot] = torch.tensor([row.owner, self.generated[slot], turn.token, turn.accepted, FinishCode.RUNNING])
        self.drafts.copy_(torch.tensor([turn.drafts for turn in turns]).t())
        self.link.push_batch(self.rows)

    def seconds(self) -> float:
        if not self._from_c:
            return wall_us(self.run) / 1e6
        self.log[0, 0] = 0
        self.run()
        return float(self.log[1, 2] - self.log[1, 1]) / 1e9


def make_native_link(state: Tensor, drafts: Tensor, masks: Tensor, tags: Tensor) -> HostLink:
    return NativeLink(load(), state, drafts, masks, tags, depth=2)


def native_forcing(table: Vocabulary) -> Callable[..., HostLink]:
    """The native link, which also finds forced drafts."""

    def make(state: Tensor, drafts: Tensor, masks: Tensor, tags: Tensor) -> HostLink:
        return NativeLink(load(), state, drafts, masks, tags, depth=2, forcing=Forcing(token_lookup(table), torch.full_like(drafts, -1)))

    return make


def native_reason() -> str:
    try:
        load()
    except Unavailable as error:
        return str(error)
    return ""
