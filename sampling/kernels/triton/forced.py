"""Forced tokens in the Triton program of advance_fill: the text that must come next, and its tokens. `forced.c` has the same rules.

Also the limit of the free text before a marker; `image_within_limit` in image.h has the same rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.matchers import forced
from stepgraph.sampling.kernels import advance
from stepgraph.sampling.kernels.triton.automaton import _CLASSES, _LEAVE, entries_of, entry_at, follow, table, text_at

_BYTES = tl.constexpr(forced.FORCED_BYTES)
_TAIL = tl.constexpr(forced.TAIL_BYTES)
_MAX_LEGAL = tl.constexpr(forced.MAX_LEGAL)
_FACTOR = tl.constexpr(forced.KEY_FACTOR - (1 << 64))
_INVERSE = tl.constexpr(pow(forced.KEY_FACTOR, -1, 1 << 64) - (pow(forced.KEY_FACTOR, -1, 1 << 64) >> 63 << 64))
_TOKENS = tl.constexpr(advance.TEXT_COLUMNS)
_PUSHES = tl.constexpr(advance.FORCED_PUSHES)
_TEXT_INTS = tl.constexpr(advance.TEXT_INTS)
_CLASS_TILE = tl.constexpr(256)
_BYTE_OF = tl.constexpr(int(Field.BYTE_OF))
_FREE = tl.constexpr(int(Field.FREE))
_LIMIT = tl.constexpr(int(Field.LIMIT))
_LIMITED = tl.constexpr(int(Field.LIMITED))
_LANE_BITS = tl.constexpr(7)  # bits of an index below _BYTES
_NO_PAIR = tl.constexpr(1 << 62)


@triton.jit
def _count_bits(word):
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def token_of(source, forced, index, TAKES_FORCED: tl.constexpr):
    """Draft `index`, from 1, or the token forced in its place; for 0 the last token. And its text: begin, end, first bytes; 0 if none."""
    drafts, draft_step, slot, forced_step, last_token, vocabulary = source
    token_text, token_starts, num_tokens = vocabulary
    token = tl.load(drafts + (index - 1) * draft_step, mask=index > 0, other=-1)
    if TAKES_FORCED:
        forced_token = tl.load(forced + slot + (index - 1) * forced_step, mask=index > 0, other=-1)
        token = tl.where(forced_token >= 0, forced_token, token)
    token = tl.where(index > 0, token, last_token)
    is_token = (token >= 0) & (token < num_tokens)
    begin, end = tl.load(token_starts + token, mask=is_token, other=0), tl.load(token_starts + token + 1, mask=is_token, other=0)
    return token, begin, end, text_at(token_text, begin, end)


@triton.jit
def follow_text(texts, row, begins, position, token, when):
    """Record that a text begins, or that `token` was accepted at `position` of the history, where `when`."""
    if texts is not None:
        text_fields = texts + row * _TEXT_INTS
        index, count = position - tl.load(text_fields), tl.load(text_fields + 2)
        inside = when & (index >= 0) & (index < count)
        differs = tl.load(text_fields + _TOKENS + index, mask=inside, other=0) != token
        tl.debug_barrier()
        tl.store(text_fields + 2, tl.where(begins | (index < 0), 0, index), mask=begins | (when & (index < 0)) | (inside & differs))
        tl.debug_barrier()


@triton.jit
def _find_text(image, text, state, counters, depth, stack, scratch):
    """Write the bytes that must come next to `text` and return their number. `stack` is copied to `scratch`."""
    lane, start = tl.arange(0, _CLASS_TILE), 0
    while start < depth:
        tl.store(scratch + start + lane, tl.load(stack + start + lane, mask=start + lane < depth, other=0), mask=start + lane < depth)
        start += _CLASS_TILE
    entries, byte_of, leave_of, classes = entries_of(image), table(image, _BYTE_OF), table(image, _LEAVE), tl.load(image + _CLASSES)
    size, least, goes_on = depth * 0, depth, state >= 0
    goes_on = goes_on & (tl.load(leave_of + state, mask=goes_on, other=0) == -1)
    while goes_on:
        possible = entry_at(entries, state * classes + lane, lane < classes, -1) != -1
        only = tl.max(tl.where(possible, lane, -1), 0)
        single = tl.sum(possible.to(tl.int32), 0) == 1
        byte = tl.load(byte_of + only, mask=single, other=-1)
        goes_on = single & (byte >= 0)
        tl.store(text + size, byte.to(tl.uint8), mask=goes_on)
        tl.debug_barrier()
        if goes_on:
            place = (state, counters, (scratch, depth, depth * 0, depth.to(tl.int64) * 0))
            legal, deep, place = follow(image, text, size, size + 1, text_at(text, size, size + 1), goes_on, place, 0)
            state, counters, symbols = place
            _, kept, num_pushed, pushed = symbols
            tl.store(scratch + kept, (pushed & 0xFFFF).to(tl.int32), mask=num_pushed > 0)
            depth, least = kept + num_pushed, tl.minimum(least, kept)
            goes_on = legal & (deep == 0) & (depth - least <= _PUSHES)
            size += goes_on.to(tl.int32)
            goes_on = goes_on & (size < _BYTES) & (state >= 0)
            goes_on = goes_on & (tl.load(leave_of + state, mask=goes_on, other=0) == -1)
    tl.debug_barrier()
    return size


@triton.jit
def _find(token_slots, bits, key, active):
    """The tokens with these keys where `active`, -1 where there is none."""
    at = (key.to(tl.uint64, bitcast=True) >> (64 - bits).to(tl.uint64)).to(tl.int64)
    tokens, last = tl.where(active, -1, -1).to(tl.int32), ((bits * 0 + 1).to(tl.int64) << bits.to(tl.int64)) - 1
    while tl.max(active.to(tl.int32), 0) > 0:
        token = tl.load(token_slots + 2 * at + 1, mask=active, other=-1)
        same = tl.load(token_slots + 2 * at, mask=active, other=0) == key
        tokens = tl.where(active & same & (token >= 0), token.to(tl.int32), tokens)
        active = active & ~same & (token >= 0)
        at = (at + 1) & last
    return tokens


@triton.jit
def _at(vector, lane, index):
    return tl.sum(tl.where(lane == index, vector, 0), 0)


@triton.jit
def _keys(text, size):
    """For each byte its term in the key of the text, and the factor that turns a sum of terms from here on into the key of a part."""
    lane = tl.arange(0, _BYTES)
    power, inverse = lane.to(tl.int64) * 0 + _FACTOR, lane.to(tl.int64) * 0 + 1
    factor, back = size.to(tl.int64) * 0 + _FACTOR, size.to(tl.int64) * 0 + _INVERSE
    for bit in tl.static_range(_LANE_BITS):
        chosen = ((lane >> bit) & 1) != 0
        power, inverse = tl.where(chosen, power * factor, power), tl.where(chosen, inverse * back, inverse)
        factor, back = factor * factor, back * back
    return (tl.load(text + lane, mask=lane < size, other=0).to(tl.int64) + 1) * power, inverse


@triton.jit
def _split_merged(weighted, ahead, inverse, single, size, token_slots, bits):
    """The token of the part that begins at each byte, and its end; 0 where none begins. Merges the adjacent pair whose token has the
    lowest id until no pair is a token."""
    lane = tl.arange(0, _BYTES)
    until = tl.cumsum(weighted, 0)  # the key of the text through this byte; the key of a part is a difference times `inverse`
    before = until - weighted
    token, end, pair_end = single, tl.where(lane < size, lane + 1, 0), lane + 2
    pair = _find(token_slots, bits, (weighted + ahead) * inverse, lane + 1 < size)
    best = tl.min(tl.where(pair >= 0, (pair.to(tl.int64) << _LANE_BITS) | lane, _NO_PAIR), 0)
    while best < _NO_PAIR:
        left = (best & (_BYTES - 1)).to(tl.int32)
        right, stop = _at(end, lane, left), _at(pair_end, lane, left)
        is_left, is_before = lane == left, (end > 0) & (end == left)
        beyond = _at(end, lane, stop)  # the end of the part after the new one
        token = tl.where(is_left, (best >> _LANE_BITS).to(tl.int32), token)
        end = tl.where(is_left, stop, tl.where(lane == right, 0, end))
        pair_end = tl.where(is_left, beyond, tl.where(is_before, stop, pair_end))
        changed = is_before | (lane == tl.where(stop < size, left, -1))
        keys = tl.where(is_left, _at(until, lane, beyond - 1), _at(until, lane, stop - 1)) - before
        found = _find(token_slots, bits, keys * inverse, changed)
        pair = tl.where(changed, found, tl.where(is_left | (lane == right), -1, pair))
        best = tl.min(tl.where(pair >= 0, (pair.to(tl.int64) << _LANE_BITS) | lane, _NO_PAIR), 0)
    return token, end


@triton.jit
def _split_longest(weighted, inverse, single, size, token_slots, bits):
    """As _split_merged, but with the longest token at each position."""
    lane = tl.arange(0, _BYTES)
    until = tl.cumsum(weighted, 0)
    token, end, at = single, lane * 0, size * 0
    while at < size:
        found = _find(token_slots, bits, (until - _at(until - weighted, lane, at)) * _at(inverse, lane, at), (lane < size) & (lane >= at))
        last = tl.max(tl.where(found >= 0, lane, -1), 0)
        token, end = tl.where(lane == at, _at(found, lane, last), token), tl.where(lane == at, last + 1, end)
        at = last + 1
    return token, end


@triton.jit
def _split(text_fields, text, size, token_slots, bits, MERGES: tl.constexpr):
    """Split the text and store its tokens, their ends and their number."""
    lane = tl.arange(0, _BYTES)
    weighted, inverse = _keys(text, size)
    single = _find(token_slots, bits, weighted * inverse, lane < size)
    spelled = tl.where(tl.max(((lane < size) & (single < 0)).to(tl.int32), 0) > 0, 0, size)  # 0 if one of its bytes has no token
    if MERGES:
        ahead, _ = _keys(text + 1, size - 1)
        token, end = _split_merged(weighted, ahead * _FACTOR, inverse, single, spelled, token_slots, bits)
    else:
        token, end = _split_longest(weighted, inverse, single, spelled, token_slots, bits)
    limit = tl.where(size < _BYTES, size, _BYTES - _TAIL)
    kept = (end > 0) & (end <= limit)
    index = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(text_fields + _TOKENS + index, token, mask=kept)
    tl.store((text_fields + _TOKENS + _BYTES).to(tl.pointer_type(tl.uint8)) + index, end.to(tl.uint8), mask=kept)
    tl.store(text_fields + 2, tl.sum(kept.to(tl.int32), 0))
    tl.debug_barrier()


@triton.jit
def _are_prefixes(mask, words, vocabulary, rest, size, WORDS: tl.constexpr):
    """Whether the texts of all tokens of a mask are prefixes of `rest`."""
    token_text, token_starts, _ = vocabulary
    holds, start = size >= 0, 0
    while holds & (start < words):
        word = start + tl.arange(0, WORDS)
        bits = tl.load(mask + word, mask=word < words, other=0)
        while holds & (tl.max((bits != 0).to(tl.int32), 0) > 0):
            active = bits != 0
            token = word * 32 + _count_bits((bits & -bits) - 1)
            begin, end = tl.load(token_starts + token, mask=active, other=0), tl.load(token_starts + token + 1, mask=active, other=1)
            wrong, at = active & ((begin >= end) | (end - begin > size)), size * 0
            compared = active & ~wrong & (begin < end)
            while tl.max(compared.to(tl.int32), 0) > 0:
                wrong = wrong | (compared & (tl.load(token_text + begin + at, mask=compared, other=0) != tl.load(rest + at)))
                at += 1
                compared = compared & ~wrong & (begin + at < end)
            holds = tl.max(wrong.to(tl.int32), 0) == 0
            bits = bits & (bits - 1)
        start += WORDS
    return holds


@triton.jit
def _next_token(text_fields, image, vocabulary, lookup, position, masked, place, stacks, MERGES: tl.constexpr, WORDS: tl.constexpr):
    """The next token of the forced text, -1 where a token of the mask is no prefix of the text."""
    state, counters, symbols = place
    depth = symbols[1] + symbols[2]
    token, token_ends = depth * 0 - 1, (text_fields + _TOKENS + _BYTES).to(tl.pointer_type(tl.uint8))
    text = token_ends + _BYTES
    index, num_tokens = position - tl.load(text_fields), tl.load(text_fields + 2)
    size, begin = tl.load(text_fields + 1), depth * 0
    if (index < 0) | (index >= num_tokens):
        tl.debug_barrier()  # all threads have read the row's text fields
        size = _find_text(image, text, state, counters, depth, stacks[0], stacks[1])
        tl.store(text_fields, position)
        tl.store(text_fields + 1, size)
        tl.store(text_fields + 2, 0)
        index, num_tokens = index * 0, num_tokens * 0
        tl.debug_barrier()
    else:
        begin = tl.load(token_ends + index - 1, mask=index > 0, other=0).to(tl.int32)
    if _are_prefixes(masked[0], masked[1], vocabulary, text + begin, size - begin, WORDS):
        if num_tokens == 0:
            _split(text_fields, text, size, lookup[0], lookup[1], MERGES)
        has_tokens = tl.load(text_fields + 2) > 0
        token = tl.load(text_fields + _TOKENS + index, mask=has_tokens, other=-1)
        allowed = (tl.load(masked[0] + (token >> 5), mask=token >= 0, other=0) >> (token & 31)) & 1
        token = tl.where(allowed != 0, token, -1)
    return token


@triton.jit
def write_forced_token(
    column, out, active, texts, row, image, vocabulary, lookup, position, masked, place, stacks, MERGES: tl.constexpr, WORDS: tl.constexpr
):
    """Set element `out` of the column, which is -1 before, to the token that is forced at `position`. Does nothing without a column, or if
    not `active`.

    texts: row_forced_text. lookup: token_slots and the bits of a slot. masked: the mask of the place and its words. stacks: where the stack
    of the place was written, and scratch.
    """
    if column is not None:
        tl.debug_barrier()  # mask and place are written
        if active:
            count, first, start = position * 0, position * 0 - 1, 0
            while start < masked[1]:
                word = start + tl.arange(0, WORDS)
                bits = tl.load(masked[0] + word, mask=word < masked[1], other=0)
                count += tl.sum(_count_bits(bits), 0)
                first = tl.maximum(first, tl.max(tl.where(bits != 0, word * 32 + _count_bits((bits & -bits) - 1), -1), 0))
                start += WORDS
            token = tl.where((count == 1) & (first < vocabulary[2]), first, -1)
            if (count > 1) & (count <= _MAX_LEGAL):
                text_fields = texts + row * _TEXT_INTS
                token = _next_token(text_fields, image, vocabulary, lookup, position, masked, place, stacks, MERGES, WORDS)
            tl.store(column + out, token.to(tl.int64))


@triton.jit
def within_limit(image, place, tokens):
    """The place after so many tokens: a state in free text is replaced if the text has reached its limit."""
    state, counters, stack = place
    free, limited = tl.load(image + _FREE), tl.load(image + _LIMITED)
    replaced = (tokens >= tl.load(image + _LIMIT)) & (state >= free) & (state < limited)
    return tl.where(replaced, state + limited - free, state), counters, stack
