"""The Triton program of advance_fill, and its launch. Imported only where Triton can launch.

One program follows one row. Threads read what other threads stored only after a barrier.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from stepgraph.sampling.grammar.automaton.arena import ALIGNMENT
from stepgraph.sampling.grammar.automaton.library import IMAGE_VERSION, Field
from stepgraph.sampling.grammar.status import TAG_FIELDS, HostColumn
from stepgraph.sampling.kernels import advance
from stepgraph.sampling.kernels.advance import PlaceColumn
from stepgraph.sampling.kernels.triton.automaton import _ALIGNMENT, _CLASS_OF, _ENDED, crossing_of, fill, follow, symbol_at
from stepgraph.sampling.kernels.triton.choice import _ILLEGAL, _NONE, _OK, _RUNNING
from stepgraph.sampling.kernels.triton.forced import follow_text, token_of, within_limit, write_forced_token

_VERSION = tl.constexpr(IMAGE_VERSION)
_HEADER_INTS = tl.constexpr(advance.HEADER_INTS)
_PLACE_INTS = tl.constexpr(advance.PLACE_INTS)
_TAG_FIELDS = tl.constexpr(TAG_FIELDS)
_TOO_DEEP = tl.constexpr(advance.TOO_DEEP)
_POSITIONS = tl.constexpr(16)  # a power of two, at least those of 8 drafts

_OWNER = tl.constexpr(int(HostColumn.OWNER))
_GENERATED = tl.constexpr(int(HostColumn.GENERATED))
_LAST_TOKEN = tl.constexpr(int(HostColumn.LAST_TOKEN))
_FINISH = tl.constexpr(int(HostColumn.FINISH))
_STATE = tl.constexpr(int(PlaceColumn.STATE))
_DEPTH = tl.constexpr(int(PlaceColumn.DEPTH))
_COUNTER = tl.constexpr(int(PlaceColumn.FIRST_COUNTER))
_START = tl.constexpr(int(Field.START))
_START_COUNTERS = tl.constexpr(int(Field.START_COUNTERS))
_MAX_DEPTH = tl.constexpr(int(Field.DEPTH))

WARPS = 8
REGISTERS = (168, 128)  # per thread; 128: aligned words, no merges; others would spill with ptxas of Triton 3.6. 129 to 255 leave one block
WORDS = 4096  # mask words at a time
LEGAL_WORDS = 512  # the same, where its tokens are compared with a forced text
LANES = 512  # crossing tokens, changed words or symbols at a time


@triton.jit
def _status_of(tag, owner, generated, index):
    """The status of a tag, NONE where it names another owner, history or index."""
    valid = (tl.load(tag) == owner) & (tl.load(tag + 1) == generated) & (tl.load(tag + 2) == index)
    return tl.where(valid, tl.load(tag + 3), _NONE)


@triton.jit
def _write_status(tag, owner, generated, index, own_status, is_own, status):
    """Write the tag of a mask, without owner and history if the mask is not valid, and where `is_own` its status."""
    valid = status != _NONE
    tl.store(tag, tl.where(valid, owner, 0))
    tl.store(tag + 1, tl.where(valid, generated, 0))
    tl.store(tag + 2, index.to(tl.int64))
    tl.store(tag + 3, status)
    tl.store(own_status, status, mask=is_own)
    tl.debug_barrier()  # the next step reads the tag and the place


@triton.jit
def _select(when, three, others):
    """Three numbers where `when`, else three others."""
    return tl.where(when, three[0], others[0]), tl.where(when, three[1], others[1]), tl.where(when, three[2], others[2])


@triton.jit
def _first_token(drafted, forced, first, is_new, FILL_NEW: tl.constexpr, TAKES_FORCED: tl.constexpr):
    """The token before the first mask, and the index of this mask: `first`, or 0 with FILL_NEW where `is_new`."""
    read, index = token_of(drafted, forced, first, TAKES_FORCED), tl.full([], first, tl.int32)
    if FILL_NEW:
        last = token_of(drafted, forced, index * 0, TAKES_FORCED)
        token, begin, end = _select(is_new, last, read)
        read, index = (token, begin, end, tl.where(is_new, last[3], read[3])), tl.where(is_new, 0, index)
    return read, index


@triton.jit
def _image_at(arena, offset, arena_ints):
    """An image, whether there is one, and its depth. A branch on these waits until all of the header that `follow` needs first is read."""
    inside, image = (offset > 0) & (offset <= arena_ints - _HEADER_INTS), arena + offset
    version, has_tables = tl.load(image, mask=inside, other=0), tl.load(image + _CLASS_OF, mask=inside, other=0) > 0
    return image, (version == _VERSION) & has_tables, tl.load(image + _MAX_DEPTH, mask=inside, other=0)


@triton.jit
def _origin(tags, row_places, row, owner, generated, index, known, before, positions):
    """Where mask `index` comes from: the index of the mask before it, whether that is OK, and the place there with its stack's number. Of
    mask 0, if it is `known`, its own place. These loads depend neither on the image nor on each other."""
    is_draft = index > 0
    guide = tl.where(is_draft, index - 1, tl.minimum(tl.maximum(generated - before - 1, 0), positions - 1).to(tl.int32))
    is_open = _status_of(tags + guide * _TAG_FIELDS, owner, tl.where(is_draft, generated, before), guide) == _OK
    tokens = tl.maximum((generated + index).to(tl.int32) - (is_draft | ~known).to(tl.int32), 0)
    source = row * (positions + 1) + tokens % (positions + 1)
    line = row_places + source * _PLACE_INTS
    counters = tl.load(line + _COUNTER), tl.load(line + _COUNTER + 1), tl.load(line + _COUNTER + 2)
    return guide, is_open, (tl.load(line + _STATE), counters, tl.load(line + _DEPTH)), source


@triton.jit
def _kind_of(index, token, is_open, known, generated, before, positions, running):
    """How the place of mask `index` is reached: by a token from the place before, at the start of the grammar, or known already."""
    is_draft, emitted = index > 0, generated - before
    advances = ~known & (generated > 0) & (emitted > 0) & (emitted <= positions)
    by_token = is_open & ((is_draft & (token >= 0)) | (~is_draft & advances))
    return running & by_token, running & ~is_draft & ~known & (generated == 0), running & ~is_draft & known


@triton.jit
def _accept(image, mask, vocabulary, stop_words, active, read, place, tokens):
    """Append a token to a place with this mask where `active`. Returns whether it is legal, and the place, after `tokens` tokens."""
    token, begin, end, codes = read
    active, is_token = active & (place[0] >= 0), (token >= 0) & (token < vocabulary[2])
    # These loads depend neither on `active` nor on the place.
    allowed = ((tl.load(mask + (token >> 5), mask=is_token, other=0) >> (token & 31).to(tl.int32)) & 1) != 0
    is_stop = active & (((tl.load(stop_words + (token >> 5), mask=is_token, other=0) >> (token & 31).to(tl.int32)) & 1) != 0)
    legal, deep, place = follow(image, vocabulary[0], begin, end, codes, active & ~is_stop, place, 0)
    state, counters, stack = place
    state = tl.where(deep, _TOO_DEEP, tl.where(is_stop, _ENDED, state))
    place = within_limit(image, (state, counters, stack), tokens)
    tl.debug_barrier()  # all threads have read the tags and this mask, which may be the one that is written next
    return active & allowed & (legal | deep | is_stop), place


@triton.jit
def _first_place(image, starts, place, stack):
    """The start of the grammar where `starts`, else a place that was read."""
    first, depth = image + _START_COUNTERS, tl.where(starts, 0, place[2])
    counters = _select(starts, (tl.load(first), tl.load(first + 1), tl.load(first + 2)), place[1])
    return tl.where(starts, tl.load(image + _START), place[0]), counters, (stack, depth, depth * 0, depth.to(tl.int64) * 0)


@triton.jit
def _write_place(line, stack, place, LANES: tl.constexpr):
    state, counters, symbols = place
    source, kept, num_pushed, pushed = symbols
    depth, level = kept + num_pushed, 0
    tl.store(line + _STATE, state)
    tl.store(line + _DEPTH, depth)
    for counter in tl.static_range(3):
        tl.store(line + _COUNTER + counter, counters[counter])
    while level < depth:
        at = level + tl.arange(0, LANES)
        below = tl.load(source + at, mask=at < kept, other=0)
        tl.store(stack + at, tl.where(at < kept, below, symbol_at(pushed, tl.maximum(depth - 1 - at, 0))), mask=at < depth)
        level += LANES


@triton.jit
def _clear(column, slot, step, first, last, value):
    """Write a value for the masks `first` to `last`. Does nothing if the column is None."""
    if column is not None:
        index = tl.arange(0, _POSITIONS)
        tl.store(column + slot + index * step, tl.zeros((_POSITIONS,), tl.int64) + value, mask=(index >= first) & (index <= last))


@triton.jit
def advance_rows(
    state,  # [R, columns] int64
    images,  # [R] int64
    rows,  # [B] int64
    drafts,  # [B or R, K] int64
    arena,  # int32
    token_text,  # uint8
    token_starts,  # int32
    plain_rows,  # [n, words] int32
    stop_words,  # [words] int32
    row_places,  # [R, ring, PLACE_INTS] int32
    row_stacks,  # [R, ring, room] int32
    row_masks,  # [R, positions, words] int32
    row_tags,  # [R, positions, TAG_FIELDS] int64
    batch_status,  # [positions, >= B] int64
    row_forced_text,  # [R, TEXT_INTS] int32, or None, as the next two
    token_slots,  # [slots, 2] int64
    batch_forced,  # [positions - 1, >= B] int64
    arena_ints,
    num_tokens,
    slot_bits,
    room,
    positions,
    words,
    first,
    last,
    state_row_step,
    state_column_step,
    image_step,
    draft_line_step,
    draft_position_step,
    status_step,
    forced_step,
    FILL_NEW: tl.constexpr,
    BY_ROW: tl.constexpr,
    MERGES: tl.constexpr,
    TAKES_FORCED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    LEGAL_WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """advance_fill for one row. WORDS is a power of two; ALIGNED: `words` is a multiple of four."""
    if ALIGNED:  # shows the compiler the alignment, for loads and stores of 16 bytes
        words = words // _ALIGNMENT * _ALIGNMENT
    slot, row = tl.program_id(0).to(tl.int64), tl.load(rows + tl.program_id(0))
    offset, tags = tl.load(images + row * image_step), row_tags + row * positions * _TAG_FIELDS
    columns, line = state + row * state_row_step, drafts + (row if BY_ROW else slot) * draft_line_step
    owner, generated = tl.load(columns + _OWNER * state_column_step), tl.load(columns + _GENERATED * state_column_step)
    finish = tl.load(columns + _FINISH * state_column_step)
    last_token = tl.load(columns + _LAST_TOKEN * state_column_step, mask=first * (1 - FILL_NEW) == 0, other=-1)  # drafts do not wait for it
    vocabulary = token_text, token_starts, num_tokens
    drafted = line, draft_position_step, slot, forced_step, last_token, vocabulary
    known, before = _status_of(tags, owner, generated, 0) != _NONE, tl.load(tags + 1)  # tokens of the history when mask 0 was filled
    read, index = _first_token(drafted, batch_forced, first, (finish == _RUNNING) & ~known, FILL_NEW, TAKES_FORCED)
    guide, is_open, origin, source = _origin(tags, row_places, row, owner, generated, index, known, before, positions)
    image, is_image, max_depth = _image_at(arena, offset, arena_ints)
    _clear(batch_status, slot, status_step, first, last, _NONE)  # after these loads, none of which waits for the image
    if is_image:
        running, ring, crossing = (finish == _RUNNING) & (max_depth <= room), positions + 1, crossing_of(image)
        step = first - (running & (index < first)).to(tl.int32) if FILL_NEW else first
        _clear(batch_forced, slot, forced_step, first, tl.minimum(last, positions - 2), -1)
        while step <= last:
            index = tl.where(step < first, 0, step)
            by_token, starts, is_known = _kind_of(index, read[0], is_open, known, generated, before, positions, running)
            tokens, own_status = (generated + index).to(tl.int32), batch_status + slot + step * status_step
            target = row * ring + tokens % ring
            stack, place = row_stacks + target * room, _first_place(image, starts, origin, row_stacks + source * room)
            guide_mask, mask = row_masks + (row * positions + guide) * words, row_masks + (row * positions + index) * words
            legal, place = _accept(image, guide_mask, vocabulary, stop_words, by_token, read, place, tokens)
            status = tl.where(by_token & (index > 0), _ILLEGAL, _NONE).to(tl.int64)
            if legal | starts:
                _write_place(row_places + target * _PLACE_INTS, stack, place, LANES)
                follow_text(row_forced_text, row, starts, tokens - 1, read[0].to(tl.int32), legal)
            if legal | starts | is_known:
                status = fill(image, offset, arena, crossing, plain_rows, vocabulary, mask, words, place, WORDS, LANES).to(tl.int64)
                write_forced_token(
                    batch_forced,
                    slot + index * forced_step,
                    (status == _OK) & (step >= first) & (step + 1 < positions),
                    row_forced_text,
                    row,
                    image,
                    vocabulary,
                    (token_slots, slot_bits),
                    tokens,
                    (mask, words),
                    place,
                    (stack, row_stacks + (row * ring + (tokens + 1) % ring) * room),  # scratch: the stack of a place that is not in use
                    MERGES,
                    LEGAL_WORDS,
                )
            _write_status(tags + index * _TAG_FIELDS, owner, generated, index, own_status, step >= first, status)
            step += 1
            if step <= last:
                read = token_of(drafted, batch_forced, step, TAKES_FORCED)
                guide, is_open, origin, source = _origin(tags, row_places, row, owner, generated, step, known, before, positions)


def advance_fill(*tensors: Any, tile: int = WORDS, lanes: int = LANES) -> None:
    *arguments, first, last, fill_new, by_row, texts, slots, forced, merges, takes_forced = tensors
    state, images, rows, drafts, arena, _, starts, _, _, _, stacks, masks, _, statuses = arguments
    _, positions, words = masks.shape
    aligned = words % ALIGNMENT == 0
    bits, forced_stride = 0 if slots is None else len(slots).bit_length() - 1, 0 if forced is None else forced.stride(0)
    sizes = len(arena), len(starts) - 1, bits, stacks.shape[2], positions, words, first, last
    strides = *state.stride(), images.stride(0), *drafts.stride(), statuses.stride(0), forced_stride
    flags = {"FILL_NEW": fill_new, "BY_ROW": by_row, "MERGES": merges, "TAKES_FORCED": takes_forced, "ALIGNED": aligned, "LANES": lanes}
    width = triton.next_power_of_2(words)
    tiles = {"WORDS": min(tile, width), "LEGAL_WORDS": min(tile, LEGAL_WORDS, width)}
    flags |= {"num_warps": WARPS, "maxnreg": REGISTERS[aligned and not merges]}
    advance_rows[(len(rows),)](*arguments, texts, slots, forced, *sizes, *strides, **flags, **tiles)
