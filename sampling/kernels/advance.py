"""Grammar masks without matchers: rows follow the image of an automaton in device memory, and a mask is a row of its tables."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.matchers.forced import FORCED_BYTES
from stepgraph.sampling.grammar.status import TAG_FIELDS
from stepgraph.sampling.kernels.operation import Contiguous, Ints, Longs, StridedLongs, operation

MAX_PUSHES, MAX_SYMBOLS = 4, 1 << 16  # limits of an image: a Triton program keeps the symbols that a token pushes in one register
ENDED, TOO_DEEP = -1, -2  # in place of a state: a stop token ended the text; it nests deeper than IMAGE_DEPTH
PLACE_INTS = 8
HEADER_INTS = Field.CROSS + 1
TEXT_COLUMNS = 3  # of row_forced_text: start, size, count; then the tokens, and as bytes their ends and the text: forced_text of forced.h
TEXT_INTS = TEXT_COLUMNS + FORCED_BYTES + 2 * FORCED_BYTES // 4
FORCED_PUSHES = 64  # the most symbols that a forced text pushes


class PlaceColumn(IntEnum):
    """Columns of `row_places`. The last ones are not used."""

    STATE = 0
    DEPTH = 1  # symbols on the stack
    FIRST_COUNTER = 2


def _outputs(state: Tensor, images: Tensor, rows: Tensor, drafts: Tensor, *others: Any) -> None:
    *_, places, stacks, masks, tags, statuses, first, last, _, by_row, texts, slots, forced, _, takes_forced = others
    num_rows, positions, _ = masks.shape
    assert places.shape == (num_rows, positions + 1, PLACE_INTS), f"row_places {places.shape}, row_masks {masks.shape}"
    assert stacks.shape[:2] == (num_rows, positions + 1), f"row_stacks {stacks.shape}, row_masks {masks.shape}"
    assert tags.shape == (num_rows, positions, TAG_FIELDS), f"row_tags {tags.shape}, row_masks {masks.shape}"
    assert statuses.shape[0] == positions and statuses.shape[1] >= len(rows), f"batch_status {statuses.shape}, rows {rows.shape}"
    assert drafts.shape[1] == positions - 1 and len(drafts) >= (num_rows if by_row else len(rows)), f"drafts {drafts.shape}"
    assert 0 <= first <= last < positions, f"first {first}, last {last}, row_masks {masks.shape}"
    assert (texts is None) is (slots is None) and (texts is None or texts.shape == (num_rows, TEXT_INTS)), "row_forced_text"
    assert forced is not None or not takes_forced, "takes_forced without batch_forced"
    assert forced is None or (texts is not None and len(forced) == positions - 1 and forced.shape[1] >= len(rows)), f"forced {forced.shape}"


@operation(
    _outputs,
    writes=("row_places", "row_stacks", "row_masks", "row_tags", "batch_status", "row_forced_text", "batch_forced"),
    triton=True,
    c=True,
)
def advance_fill(
    state: StridedLongs,
    images: StridedLongs,
    rows: Longs,
    drafts: StridedLongs,
    arena: Ints,
    token_text: Contiguous,
    token_starts: Ints,
    plain_rows: Ints,
    stop_words: Ints,
    row_places: Ints,
    row_stacks: Ints,
    row_masks: Ints,
    row_tags: Longs,
    batch_status: Longs,
    first: int,
    last: int,
    fill_new: int = 0,
    by_row: int = 0,
    row_forced_text: Ints | None = None,
    token_slots: Longs | None = None,
    batch_forced: Longs | None = None,
    merges: int = 0,
    takes_forced: int = 0,
) -> None:
    """Masks `first` to `last` of every row that has an image, as the host link writes them with the matcher of that image.

    Of R rows, the batch has B; K drafts, W words of a mask.
    state [R, columns] int64: HostColumn. images [R] int64: offset of the row's image in `arena`; 0: no image, the row is not touched.
    rows [B] int64. drafts [B, K] int64, or [R, K] if by_row; negative: no draft. All of these may have any strides.
    arena [ints] int32: images at multiples of arena.ALIGNMENT. token_text [4 * n] uint8, token_starts [tokens + 1] int32, plain_rows
    [n, W] int32, stop_words [W] int32: the token table that the images were compiled for.
    row_places [R, K + 2, PLACE_INTS], row_stacks [R, K + 2, depth] int32: the place after n tokens, drafts included, is at n % (K + 2).
    So a rejected draft takes no work: the place before it is still there. `depth` is at least the IMAGE_DEPTH of every image.
    row_masks [R, K + 1, W] int32, row_tags [R, K + 1, TAG_FIELDS] int64. batch_status [K + 1, >= B] int64: written, the statuses of these
    masks, by batch row; NONE for a row without an image.

    Mask 0 follows the row's history (a row without tokens is at the start of its grammar), mask i > 0 its draft i, if mask i - 1
    is OK. A draft that is not legal gives an ILLEGAL tag; any other mask that cannot be filled gets a tag without owner, as do the
    masks of a row that is not running. A text that nests deeper than IMAGE_DEPTH has the status FAULT; if a draft caused it,
    the row continues without the draft. fill_new: also mask 0, before the others, of rows that do not have it yet.

    With forced tokens: row_forced_text [R, TEXT_INTS] int32, the forced text of each row as matchers.forced.ForcedText keeps it;
    token_slots [n, 2] int64, merges: of the vocabulary's TokenLookup. batch_forced [K, >= B] int64: written, the token that is forced
    after each of these masks, -1 where none is, of rows with an image; None: forced tokens are not searched. takes_forced: a token that
    is forced after mask i - 1 replaces draft i.

    The reference is the kernel in C, on copies in host memory: without the library there are no images.
    """
    inputs = (state, images, rows, drafts, arena, token_text, token_starts, plain_rows, stop_words)
    written = (row_places, row_stacks, row_masks, row_tags, batch_status)
    with torch._C.DisableTorchFunction():  # a tape checks the calls of a step, not those of an operation
        tensors = (*inputs, *written, row_forced_text, token_slots, batch_forced)
        copies = [None if each is None else each.cpu().contiguous() for each in tensors]
        run = advance_fill.prepare(*copies[:14], first, last, fill_new, by_row, *copies[14:], merges, takes_forced)
        assert run is not None, "images of grammars need the C library"
        run()
        for tensor, copy in zip((*written, row_forced_text, batch_forced), (*copies[9:15], copies[16]), strict=True):
            if tensor is not None and copy is not None and copy is not tensor:
                tensor.copy_(copy)
