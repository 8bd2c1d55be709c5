"""What advance_fill does with an image: read a token from a place, and fill the mask of a place. Functions of its Triton program.

A chain of dependent loads determines the time. The classes of a token's bytes do not depend on the state and are loaded ahead; the
symbols that a token pushes stay in a register.

A place is a tuple: the state; its three counters; and its stack: the symbols in memory, how many of these it has, how many symbols follow
in a register, and the register. A vocabulary: the text of all tokens, the start of each, and their number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepgraph.sampling.grammar.automaton.arena import ALIGNMENT
from stepgraph.sampling.grammar.automaton.library import MOVE_INTS, Field
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import advance
from stepgraph.sampling.kernels.triton.choice import _OK, _TERMINATED

_MOVE_INTS = tl.constexpr(MOVE_INTS)
_ENDED = tl.constexpr(advance.ENDED)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_FAULT = tl.constexpr(int(MaskStatus.FAULT))

# fields of an image
_CLASSES = tl.constexpr(int(Field.CLASSES))
_SYMBOLS = tl.constexpr(int(Field.SYMBOLS))
_DEPTH = tl.constexpr(int(Field.DEPTH))
_PUSHES = tl.constexpr(int(Field.PUSHES))
_NARROW = tl.constexpr(int(Field.NARROW))
_CLASS_OF = tl.constexpr(int(Field.CLASS_OF))
_NEXT = tl.constexpr(int(Field.NEXT))
_MOVES = tl.constexpr(int(Field.MOVES))
_LEAVE = tl.constexpr(int(Field.LEAVE))
_RETURN = tl.constexpr(int(Field.RETURN))
_ROW_OF = tl.constexpr(int(Field.ROW_OF))
_CHANGE_WORD = tl.constexpr(int(Field.CHANGE_WORD))
_CHANGE_VALUE = tl.constexpr(int(Field.CHANGE_VALUE))
_DENSE = tl.constexpr(int(Field.DENSE))
_CROSS_START = tl.constexpr(int(Field.CROSS_START))
_CROSS = tl.constexpr(int(Field.CROSS))

_ROW_INTS = tl.constexpr(4)  # image_row: base, status, change, end

# columns of a move; the last two begin two (counter, value) pairs each
_TARGET = tl.constexpr(0)
_PUSH = tl.constexpr(1)
_COUNTER = tl.constexpr(2)
_LAST_TARGET = tl.constexpr(3)
_SETS = tl.constexpr(4)
_LAST_SETS = tl.constexpr(8)

_SYMBOL_BITS = tl.constexpr(16)
_SYMBOL = tl.constexpr(0xFFFF)
_PLAIN, _SPECIAL = tl.constexpr(1), tl.constexpr(2)  # kinds of a turn of `follow`
_AHEAD = tl.constexpr(8)  # bytes of a token whose classes are loaded at a time, into one int64


@triton.jit
def table(image, FIELD: tl.constexpr):
    return image + tl.load(image + FIELD)


@triton.jit
def crossing_of(image):
    """The argument `crossing` of fill(), to be read early: no other field in this part of the header is needed before fill()."""
    return table(image, _CROSS_START), table(image, _CROSS)


@triton.jit
def entries_of(image):
    """The argument `entries` of entry_at()."""
    return table(image, _NEXT), tl.load(image + _NARROW)


@triton.jit
def entry_at(entries, index, mask, other):
    """An entry of `next`."""
    next_of, narrow = entries
    word = tl.load(next_of + (index >> narrow), mask=mask, other=other)
    return tl.where(narrow > 0, word << (16 - 16 * (index & 1)) >> 16, word)


@triton.jit
def symbol_at(pushed, below):
    """The symbol that was pushed before the `below` latest ones."""
    return ((pushed >> (below * _SYMBOL_BITS).to(tl.int64)) & _SYMBOL).to(tl.int32)


@triton.jit
def _maximum(number, LANES: tl.constexpr):
    """The greatest number of any lane; LANES 0: `number` is a scalar."""
    return number if LANES == 0 else tl.max(number, 0)


@triton.jit
def _set_counter(which, value, counters, when):
    """Apply a (counter, value) pair of a move."""
    one, two, three = counters
    one = tl.where(when & (which == 0), value, one)
    two = tl.where(when & (which == 1), value, two)
    three = tl.where(when & (which == 2), value, three)
    return one, two, three


@triton.jit
def text_at(text, at, end):
    """The next _AHEAD bytes of a text. They are loaded in words: loads of bytes would wait for classes."""
    word, words, shift = at >> 2, text.to(tl.pointer_type(tl.int32)), ((at & 3) * 8).to(tl.uint64)
    low = tl.load(words + word, mask=at < end, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    middle = tl.load(words + word + 1, mask=(at < end) & (4 * word + 4 < end), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + word + 2, mask=(at < end) & (4 * word + 8 < end), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((low | (middle << 32)) >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _classes_of(class_of, codes, count, live):
    """The classes of the first `count` bytes, one byte each."""
    kinds = (count * 0).to(tl.int64)
    for ahead in tl.static_range(_AHEAD):
        code = ((codes >> (8 * ahead)) & 255).to(tl.int32)
        kinds |= tl.load(class_of + code, mask=live & (ahead < count), other=0).to(tl.int64) << (8 * ahead)
    return kinds


@triton.jit
def _apply_special_move(image, move, special, live, deep, state, counters, kept, num_pushed, pushed):
    """Apply a move that does more than enter a state, where `special`."""
    counter, push = tl.load(move + _COUNTER, mask=special, other=-1), tl.load(move + _PUSH, mask=special, other=-1)
    target, last_target = tl.load(move + _TARGET, mask=special, other=0), tl.load(move + _LAST_TARGET, mask=special, other=0)
    left = tl.where(counter == 0, counters[0], tl.where(counter == 1, counters[1], counters[2])) - 1
    counters = _set_counter(counter, left, counters, special)
    is_last = (counter >= 0) & (left == 0)
    state = tl.where(special, tl.where(is_last, last_target, target), state)
    sets = move + tl.where(is_last, _LAST_SETS, _SETS)
    for pair in tl.static_range(2):
        which = tl.load(sets + 2 * pair, mask=special, other=-1)
        value = tl.load(sets + 2 * pair + 1, mask=special, other=0)
        counters = _set_counter(which, value, counters, special)
    live = live & ~((push >= 0) & (num_pushed >= tl.load(image + _PUSHES)))
    deep = deep | (live & (push >= 0) & (kept + num_pushed >= tl.load(image + _DEPTH)))
    pushes = (push >= 0) & live & ~deep
    pushed = tl.where(pushes, (pushed << _SYMBOL_BITS) | push.to(tl.int64), pushed)
    live = live & ~deep & (~special | (state >= 0))
    return live, deep, state, counters, num_pushed + pushes.to(tl.int32), pushed


@triton.jit
def _pop(pops, state, kept, num_pushed, pushed_symbols, finish_set, stack, return_of, symbols):
    """Leave one nested part that has ended, where `pops`."""
    symbols_in_memory, stored, in_register, pushed = stack
    pops_pushed, pops_kept = pops & (num_pushed > 0), pops & (num_pushed <= 0)
    kept -= pops_kept.to(tl.int32)
    symbol = tl.load(symbols_in_memory + kept, mask=pops_kept & (kept < stored), other=0)
    symbol = tl.where(kept < stored, symbol, symbol_at(pushed, tl.maximum(stored + in_register - 1 - kept, 0)))
    symbol = tl.where(pops_pushed, (pushed_symbols & _SYMBOL).to(tl.int32), symbol)
    pushed_symbols = tl.where(pops_pushed, pushed_symbols >> _SYMBOL_BITS, pushed_symbols)
    num_pushed -= pops_pushed.to(tl.int32)
    return tl.load(return_of + finish_set * symbols + symbol, mask=pops, other=0), kept, num_pushed, pushed_symbols


@triton.jit
def follow(image, text, begin, end, codes, active, place, LANES: tl.constexpr):
    """Read the bytes of one token (scalars, LANES 0) or of LANES tokens, where `active`; `begin` equals `end` where there is none.

    text: at a multiple of four bytes, in whole words. codes: text_at `begin`, which may be loaded early. Returns whether a token is legal,
    whether it nests too deep, and the place after it. Its stack begins with symbols of the stack before; only the symbols that were pushed
    after these are in the register.

    In each turn, a token reads a byte or leaves a nested part, so that a turn takes one reduction over the lanes.
    """
    state, counters, stack = place
    class_of, entries, moves, classes = table(image, _CLASS_OF), entries_of(image), table(image, _MOVES), tl.load(image + _CLASSES)
    leave_of, return_of, symbols = table(image, _LEAVE), table(image, _RETURN), tl.load(image + _SYMBOLS)
    live, deep = active & (begin < end), begin > end  # no text is too deep yet
    at, kept, num_pushed = begin, state * 0 + stack[1] + stack[2], state * 0
    pushed, finish_set = num_pushed.to(tl.int64), num_pushed - 1
    kinds = _classes_of(class_of, codes, end - at, begin < end)  # depends neither on `active` nor on the place
    while _maximum((live & (at < end)).to(tl.int32), LANES) > 0:
        until = tl.minimum(at + _AHEAD, end)
        reads = live & (at < until)
        entry = entry_at(entries, state * classes + (kinds & 255).to(tl.int32), reads, 0)
        turn_kind = _maximum(tl.where(reads & (entry < -1), _SPECIAL, tl.where(reads, _PLAIN, 0)), LANES)
        while turn_kind > 0:
            live = live & (~reads | (entry != -1))
            special = reads & (entry < -1)
            state = tl.where(reads & live & ~special, entry, state)
            if turn_kind == _SPECIAL:
                move = moves + (-2 - entry) * _MOVE_INTS
                live, deep, state, counters, num_pushed, pushed = _apply_special_move(
                    image, move, special, live, deep, state, counters, kept, num_pushed, pushed
                )
            at += reads.to(tl.int32)
            kinds = tl.where(reads, kinds >> 8, kinds)
            if symbols > 0:
                pops = live & (finish_set >= 0)
                returned, kept, num_pushed, pushed = _pop(pops, state, kept, num_pushed, pushed, finish_set, stack, return_of, symbols)
                state = tl.where(pops, returned, state)
                live = live & (~pops | (state >= 0))
                finish_set = tl.load(leave_of + state, mask=live & (reads | pops), other=-1)
            may_read = live & (at < until)
            entry = entry_at(entries, state * classes + (kinds & 255).to(tl.int32), may_read, 0)  # in parallel with `finish_set`
            reads, pops_next = may_read & (finish_set < 0), live & (finish_set >= 0)
            turn_kind = _maximum(tl.where(reads & (entry < -1), _SPECIAL, tl.where(reads | pops_next, _PLAIN, 0)), LANES)
        kinds = _classes_of(class_of, text_at(text, at, tl.where(live, end, at)), end - at, live)
    return live, deep, (state, counters, (stack[0], kept, num_pushed, pushed))


@triton.jit
def _copy_row(mask, source, source_words, words, WORDS: tl.constexpr):
    """Copy `source_words` words, 0 or all; the rest of the mask is zero."""
    start = 0
    while start < words:
        word = start + tl.arange(0, WORDS)
        tl.store(mask + word, tl.load(source + word, mask=word < source_words, other=0), mask=word < words)
        start += WORDS


@triton.jit
def _crossing_tokens(cross_of, token_starts, at, last):
    """Tokens from a list, and where the text of each begins and ends; both 0 beyond the list."""
    token = tl.load(cross_of + at, mask=at < last, other=0)
    begin, end = tl.load(token_starts + token, mask=at < last, other=0), tl.load(token_starts + token + 1, mask=at < last, other=0)
    return token, begin, end


@triton.jit
def fill(image, offset, arena, crossing, plain_rows, vocabulary, mask, words, place, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Write the mask row [words] of a place and return its status. offset: of the image in the arena. crossing: `crossing_of` the image."""
    text, token_starts, state, counters, stack = vocabulary[0], vocabulary[1], place[0], place[1], place[2]
    has_state, nests, lane = state >= 0, tl.load(image + _SYMBOLS) > 0, tl.arange(0, LANES)
    row = table(image, _ROW_OF) + state * _ROW_INTS
    base, status = tl.load(row, mask=has_state, other=-1), tl.load(row + 1, mask=has_state, other=_FAULT)
    change, last_change = tl.load(row + 2, mask=has_state, other=0), tl.load(row + 3, mask=has_state, other=0)
    starts, cross_of = crossing[0] + state, crossing[1]
    cross, last_cross = tl.load(starts, mask=has_state & nests, other=0), tl.load(starts + 1, mask=has_state & nests, other=0)
    token, begin, end = _crossing_tokens(cross_of, token_starts, cross + lane, last_cross)  # before the copy, which hides the latency
    status = tl.where(state == _ENDED, _TERMINATED, status)
    dense = (offset + tl.load(image + _DENSE)) // _ALIGNMENT * _ALIGNMENT + tl.maximum(base, 0).to(tl.int64) * words
    plain = tl.maximum(-2 - base, 0).to(tl.int64) * words
    source = tl.where(base < -1, plain_rows + plain, arena + dense)
    _copy_row(mask, source, tl.where(base == -1, 0, words), words, WORDS)
    tl.debug_barrier()  # before another thread changes a word
    while change < last_change:
        at = change + lane
        word = tl.load(table(image, _CHANGE_WORD) + at, mask=at < last_change, other=0)
        tl.store(mask + word, tl.load(table(image, _CHANGE_VALUE) + at, mask=at < last_change, other=0), mask=at < last_change)
        change += LANES
    if cross < last_cross:
        tl.debug_barrier()
        none = tl.zeros((LANES,), tl.int32)
        while cross < last_cross:
            places = (none + state, (none + counters[0], none + counters[1], none + counters[2]), stack)
            legal, _, _ = follow(image, text, begin, end, text_at(text, begin, end), begin < end, places, LANES)
            # Barriers order these. The default has a fence for each, which waits until the whole mask has reached the L2 cache.
            tl.atomic_or(mask + (token >> 5), (none + 1) << (token & 31), mask=legal, sem="relaxed")
            status = tl.where(_maximum(legal.to(tl.int32), LANES) > 0, _OK, status)
            cross += LANES
            token, begin, end = _crossing_tokens(cross_of, token_starts, cross + lane, last_cross)
    return status
