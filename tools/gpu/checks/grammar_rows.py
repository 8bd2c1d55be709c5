"""Calls of advance_fill: rows in the middle of texts under several grammars, whose images share an arena."""

from __future__ import annotations

import functools
from random import Random

import torch
from torch import Tensor

from stepgraph import Constraint
from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.automaton.arena import ImageArena
from stepgraph.sampling.grammar.automaton.grammar import AutomatonBuilder, TokenTensors, split_tensors, token_tensors
from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.status import TAG_FIELDS, FinishCode, HostColumn, MaskStatus
from stepgraph.sampling.kernels.advance import PLACE_INTS, TEXT_INTS, advance_fill
from tools.gpu.checks.operations import Call
from tools.gpu.checks.shapes import vocabulary_of

ENTRY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "size": {"type": "integer"}, "tags": {"type": "array", "items": {}}},
    "required": ["name", "size", "tags"],
}
CONSTRAINTS = (  # mask rows stored as changes and whole, counters, a stack and tokens that depend on it, forced text
    Constraint.json_schema(ENTRY),
    Constraint.json_object(),
    Constraint.regex("([a-z ]{3,40}[.,])+"),
    Constraint.ebnf('root ::= "(" list ")" | [a-z]+\nlist ::= root | root "," list'),
    Constraint.regex("([ab], and then so on; )+"),
)
POSITIONS, TOKENS = 3, 12
ARENA_INTS = 1 << 22


@functools.cache
def tables_of(width: int) -> tuple[Tensor, list[int], int, TokenTensors]:
    """The arena, the offset of each image, the largest stack depth, and the token tensors."""
    vocabulary, arena = vocabulary_of(width), ImageArena(ARENA_INTS)
    builder, blocks, depth = AutomatonBuilder(vocabulary, GrammarLimits()), list[int](), 0
    memory = torch.zeros(ARENA_INTS, dtype=torch.int32)
    for constraint in CONSTRAINTS:
        image = builder.build(constraint).image
        block = arena.acquire(image)
        assert block is not None, f"{len(image)} more int32 than the arena has room for"
        memory[block.offset : block.offset + len(image)] = torch.from_numpy(image.copy())
        blocks.append(block.offset)
        depth = max(depth, int(image[Field.DEPTH]))
    return memory, blocks, depth, token_tensors(vocabulary, torch.device("cpu"))


def call_of(device: torch.device, batch: int, width: int, index: int = 1, forces: bool = False) -> Call:
    """Mask 1 after a draft, or mask 0 after a token that was emitted, of rows with up to TOKENS random legal tokens.

    Of every eight rows the first has an illegal draft, and the second is inert. forces: also find the token that the grammar forces next.
    """
    arena, offsets, depth, tokens = tables_of(width)
    words, draw = tokens.stop_words.shape[0], Random(batch)
    state, images = torch.zeros(batch, len(HostColumn), dtype=torch.int64), torch.tensor(offsets).repeat(batch)[:batch]
    state[:, HostColumn.OWNER], state[:, HostColumn.FINISH] = torch.arange(batch) + 1, int(FinishCode.RUNNING)
    rows, drafts = torch.randperm(batch, generator=torch.Generator().manual_seed(batch)), torch.full((batch, POSITIONS - 1), -1)
    written = (
        torch.zeros(batch, POSITIONS + 1, PLACE_INTS, dtype=torch.int32),
        torch.zeros(batch, POSITIONS + 1, depth, dtype=torch.int32),
        torch.zeros(batch, POSITIONS, words, dtype=torch.int32),
        torch.zeros(batch, POSITIONS, TAG_FIELDS, dtype=torch.int64),
        torch.zeros(POSITIONS, batch, dtype=torch.int64),
    )
    *_, masks, tags, _ = written
    for turn in range(TOKENS + 1):
        advance_fill.out(state, images, rows, drafts, arena, *tokens, *written, 0, 0, 0, 1, None, None, None, 0, 0)
        for row in range(batch):
            if tags[row, 0, 3] != MaskStatus.OK:
                continue
            legal = bitmask.unpack(masks[row, 0], width).nonzero()
            drafts[row, 0] = legal[draw.randrange(len(legal))]
            if turn < TOKENS - row % 5 or (turn == TOKENS and index == 0):
                state[row, HostColumn.GENERATED] += 1
                state[row, HostColumn.LAST_TOKEN] = drafts[row, 0]
    drafts[::8, 0] = words * 32
    state[1::8, HostColumn.FINISH] = int(FinishCode.STOP)
    inputs = (state, images, rows, drafts[rows] if index else drafts, arena, *tokens, *written)  # as a round's own drafts are
    least = 2 * 4 * words * batch  # a row of the tables is read and the mask written; the rest is small
    on_device = tuple(tensor.to(device) for tensor in inputs)
    name, flags, writes = f"B={batch} V={width} mask {index}", (index, index, 0, int(index == 0)), (9, 10, 11, 12, 13)
    if not forces:
        return Call(advance_fill, name, (*on_device, *flags, None, None, None, 0, 0), (), least, writes=writes)
    split = split_tensors(vocabulary_of(width), device)
    texts = torch.zeros(batch, TEXT_INTS, dtype=torch.int32, device=device)
    found = texts, split.token_slots, torch.full((POSITIONS - 1, batch), -1, device=device), int(split.merges), 0
    # `texts` is a cache: where no text was forced, its content may differ
    return Call(advance_fill, f"{name} forced", (*on_device, *flags, *found), (), least, writes=(*writes, 20))
