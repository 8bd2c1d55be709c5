"""The limit of the free text before a marker, in the Triton program of advance_fill. `image_within_limit` of image.h has the same rule."""

from __future__ import annotations

import triton
import triton.language as tl

from stepgraph.sampling.grammar.automaton.library import Field

_FREE = tl.constexpr(int(Field.FREE))
_LIMIT = tl.constexpr(int(Field.LIMIT))
_LIMITED = tl.constexpr(int(Field.LIMITED))


@triton.jit
def within_limit(image, place, tokens):
    """The place after so many tokens: one in free text is replaced if the text has reached its limit."""
    state, counters, stack = place
    free, limited = tl.load(image + _FREE), tl.load(image + _LIMITED)
    replaced = (tokens >= tl.load(image + _LIMIT)) & (state >= free) & (state < limited)
    return tl.where(replaced, state + limited - free, state), counters, stack
