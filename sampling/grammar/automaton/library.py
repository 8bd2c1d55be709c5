"""The automaton compiler of the C library: token tables, and images of grammars. Used by the compile worker too, so it imports no torch."""

from __future__ import annotations

import ctypes
import functools
import json
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from stepgraph.sampling.native import Unavailable, load

Image = npt.NDArray[np.int32]

REASON_BYTES = 400


class Field(IntEnum):
    """The first fields of an image's header, as in image.h."""

    FORMAT = 0
    SIZE = 1
    STATES = 2
    CLASSES = 3
    SYMBOLS = 4
    ROWS = 10


class UnfitError(ValueError):
    """Why a grammar has no automaton within the limits."""


class VocabularyStruct(Structure):
    """image_vocabulary of image.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("text", "starts", "plain", "stop_words")),
        *((name, c_int64) for name in ("num_tokens", "plain_rows", "words", "longest")),
    )


@functools.cache
def functions() -> ctypes.CDLL:
    """The compiler's functions; Unavailable with the reason where there is no C library."""
    library = load()
    if isinstance(library, Unavailable):
        raise library
    library.stepgraph_automaton_vocabulary.restype = c_void_p
    library.stepgraph_automaton_vocabulary.argtypes = (c_void_p, c_void_p, c_int, c_void_p, c_int, c_int)
    library.stepgraph_automaton_free_vocabulary.restype = None
    library.stepgraph_automaton_free_vocabulary.argtypes = (c_void_p,)
    library.stepgraph_automaton_view_vocabulary.restype = None
    library.stepgraph_automaton_view_vocabulary.argtypes = (c_void_p, POINTER(VocabularyStruct))
    library.stepgraph_automaton_compile.argtypes = (
        *(c_void_p, c_void_p, c_int, c_void_p, c_int, c_int),
        *(c_void_p, c_void_p, c_void_p, POINTER(POINTER(c_int32)), POINTER(c_char), c_int64),
    )
    library.stepgraph_automaton_free_image.restype = None
    library.stepgraph_automaton_free_image.argtypes = (c_void_p,)
    library.stepgraph_open_automaton.restype, library.stepgraph_open_automaton.argtypes = c_void_p, (c_void_p, c_void_p)
    library.stepgraph_close_automaton.restype, library.stepgraph_close_automaton.argtypes = None, (c_void_p,)
    return library


class TokenTable:
    """The tokens of a vocabulary, prepared for compiling and matching. `tokens`: bytes of each id, empty for ids that are not text."""

    def __init__(self, tokens: Sequence[bytes], stop_token_ids: Sequence[int], mask_words: int) -> None:
        library = functions()
        text = np.frombuffer(b"".join(tokens) + b"\0", np.uint8)
        starts = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
        stops = np.array(stop_token_ids, np.int32)
        self.handle: int | None = library.stepgraph_automaton_vocabulary(
            text.ctypes.data, starts.ctypes.data, len(tokens), stops.ctypes.data, len(stops), mask_words
        )
        if not self.handle:
            raise MemoryError("TokenTable: out of memory")
        weakref.finalize(self, library.stepgraph_automaton_free_vocabulary, self.handle).atexit = False
        self.view = VocabularyStruct()
        library.stepgraph_automaton_view_vocabulary(self.handle, byref(self.view))

    def compile(self, grammar_json: str, limits: Sequence[int]) -> Image:
        """The image of a grammar that xgrammar has parsed and serialised. `limits`: the fields of Limits in nfa.h but the last.

        UnfitError with the reason where it does not fit.
        """
        library, parsed = functions(), json.loads(grammar_json)
        data, offsets = (np.array(parsed[name], np.int32) for name in ("grammar_expr_data", "grammar_expr_indptr"))
        bodies = np.array([rule[1] for rule in parsed["rules"]], np.int32)
        bounds = np.array(limits, np.int64)
        found, reason = POINTER(c_int32)(), ctypes.create_string_buffer(REASON_BYTES)
        outcome = library.stepgraph_automaton_compile(
            *(data.ctypes.data, offsets.ctypes.data, len(offsets), bodies.ctypes.data, len(bodies), parsed["root_rule_id"]),
            *(self.handle, bounds.ctypes.data, None, byref(found), reason, REASON_BYTES),
        )
        if outcome == 1:
            raise UnfitError(reason.value.decode(errors="replace"))
        if outcome:
            raise MemoryError("the automaton compiler is out of memory")
        try:
            image: Any = np.ctypeslib.as_array(found, (found[Field.SIZE],)).copy()
        finally:
            library.stepgraph_automaton_free_image(found)
        image.setflags(write=False)
        return image  # type: ignore[no-any-return]
