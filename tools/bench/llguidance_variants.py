"""Variants with llguidance's own calls, in addition to grammar_variants.py. Needs llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import llguidance
import torch

from stepgraph.sampling.grammar import CompiledConstraint
from stepgraph.sampling.grammar.link.native import available_processors
from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceGrammar
from tools.bench.grammar_documents import RowRound
from tools.bench.grammar_variants import PythonLoop


class LLGuidanceLoop(PythonLoop):
    """(a) Row by row with the library's Python calls only; its wrong masks after a rollback are not corrected."""

    def start_document(self, slot: int, grammar: CompiledConstraint) -> None:
        self.matchers[slot : slot + 1] = [cast(LLGuidanceGrammar, grammar.grammar).start.deep_copy()]

    def run(self) -> None:
        masks, size = self.masks, self.masks.shape[2] * 4
        first, step, plane = masks.data_ptr(), size, masks.shape[1] * size
        for slot, turn in enumerate(self.turns):
            matcher, draft_index = self.matchers[slot], first + slot * step
            if turn.rollback:
                matcher.rollback(turn.rollback)
            if turn.token >= 0:
                assert matcher.consume_token(turn.token)
            matcher.unsafe_compute_mask_ptr(draft_index, size)
            for index, draft in enumerate(turn.drafts, 1):
                assert matcher.consume_token(draft)
                matcher.unsafe_compute_mask_ptr(draft_index + index * plane, size)


class LLGuidanceBatch(LLGuidanceLoop):
    """(b) The library's own call for a whole batch and its drafts, in its threads; matchers are not advanced."""

    name = "library batch"

    def __init__(self, rows: int, words: int, drafts: int) -> None:
        super().__init__(rows, words, drafts)
        self.executor = llguidance.LLExecutor(max(1, available_processors()))
        self.flat = torch.zeros(rows, drafts + 1, words, dtype=torch.int32)
        self.masks = self.flat.transpose(0, 1)
        self.pending_drafts: list[tuple[int, ...]] = [()] * rows

    def start_document(self, slot: int, grammar: CompiledConstraint) -> None:
        super().start_document(slot, grammar)
        self.pending_drafts[slot] = ()

    def prepare(self, turns: Sequence[RowRound]) -> None:
        self.fresh = [
            [*self.pending_drafts[slot][: turn.accepted], turn.token] if turn.token >= 0 else [] for slot, turn in enumerate(turns)
        ]
        self.pending_drafts = [turn.drafts for turn in turns]

    def run(self) -> None:
        rows, positions, words = self.flat.shape
        for matcher, tokens in zip(self.matchers, self.fresh, strict=True):
            assert not tokens or matcher.consume_tokens(tokens)
        work = [(matcher, slot * positions, list(self.pending_drafts[slot])) for slot, matcher in enumerate(self.matchers)]
        self.executor.unsafe_compute_mask_ptr_with_draft_token(work, self.flat.data_ptr(), words * 4, rows * positions)
