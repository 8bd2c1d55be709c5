"""Columns of the state of a row, and of the result that a round writes for it."""

from __future__ import annotations

import itertools
import operator
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Column(IntEnum):
    """Columns of `row_state`. The first ones are copied to the host nodes: status.HostColumn."""

    OWNER = 0  # serial of the request that owns the row
    GENERATED = 1  # tokens emitted so far
    LAST_TOKEN = 2  # last token of the history, the only one without a cache entry
    ACCEPTED = 3  # drafts accepted in the latest round
    FINISH = 4  # FinishCode
    DRAFT_COUNT = 5  # drafts for the next target_verify
    LENGTH = 6  # tokens in the history
    MAX_LENGTH = 7  # length at which the row finishes
    CONSTRAINED = 8  # 1 if the request has a constraint
    DRAFT_LIMIT = 9  # maximum drafts per round
    SEED = 10  # of the request's random number generator
    IMAGE = 11  # offset of its grammar in grammar_arena; 0: it has none on the device
    SKIPPED = 12  # last tokens of the history that the draft model has not processed: rounds without drafts added them
    LORA = 13  # slot of its adapter; 0: none
    DRAFT_SEED = 14  # rng.draft_seed of SEED


REFUSED = -2  # in `row_drafts`: the grammar does not allow the proposed token


class ResultRecord(NamedTuple):
    """Result of one round for one row."""

    emitted: int  # how many of `tokens` the round emitted
    finish: int  # FinishCode
    accepted: int  # drafts that were accepted
    draft_count: int  # drafts that were verified
    tokens: list[int]  # [K + 1]
    statuses: list[int]  # [K + 1] MaskStatus of each position
    drafts: list[int]  # [K], -1 or REFUSED after the last one
    forced: int  # one bit per draft: forced by the grammar; written by constrained rounds only
    looked_up: int  # one bit per draft: found by the look-up and not forced
    relaxed: int  # one bit per draft: accepted, but not the target's choice; of sampled rounds with `row_relaxed`
    logprobs: list[list[Any]]  # [K + 1] raw and masked, with the most probable tokens of each where the request asks; of sampled rounds


class ResultLayout:
    """Columns of `results`, int64: the fields of a ResultRecord, for the stage that writes them and the host that reads them.

    Log-probabilities are float32 and have buffers of their own.
    """

    def __init__(self, num_drafts: int) -> None:
        sizes = {"tokens": num_drafts + 1, "statuses": num_drafts + 1, "drafts": num_drafts}
        self.columns: dict[str, slice] = {}
        self.width = 0
        for name in ResultRecord._fields[:-1]:
            self.columns[name] = slice(self.width, self.width + sizes.get(name, 1))
            self.width = self.columns[name].stop
        self._fields_of = operator.itemgetter(*(each if name in sizes else each.start for name, each in self.columns.items()))

    def write(self, lines: Tensor, **fields: Tensor) -> None:
        """Write adjacent fields, [B] or [B, columns] each, into lines [B, width] with one copy."""
        columns = [self.columns[name] for name in fields]
        assert all(a.stop == b.start for a, b in itertools.pairwise(columns)), "adjacent fields in the order of ResultRecord"
        values = [value if value.dim() == 2 else value[:, None] for value in fields.values()]
        lines[:, columns[0].start : columns[-1].stop].copy_(torch.cat(values, 1) if len(values) > 1 else values[0])

    def read(self, line: list[int], logprobs: list[list[Any]]) -> ResultRecord:
        return tuple.__new__(ResultRecord, (*self._fields_of(line), logprobs))  # `_make` is a call in Python, for each row and round
