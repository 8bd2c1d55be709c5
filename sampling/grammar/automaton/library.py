"""The automaton compiler of the C library: token tables, and images of grammars. Used by the compile worker too, so it imports no torch."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_int32
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from stepgraph.sampling.c_declarations import constants, structs
from stepgraph.sampling.native import Unavailable, load

Image = npt.NDArray[np.int32]

IMAGE_VERSION, MOVE_INTS = constants.IMAGE_VERSION, constants.IMAGE_MOVE_INTS
REASON_BYTES = 400
MANY_BYTES = 1 << 20  # of the shortest text of a rule
UNFIT = 1  # a return value of automaton_compile
FORMAT_RULE = re.compile(r"(?:\w+_)?(?:hostname(7?)_(\d+)|time)")  # host names (7: of drafts 3 to 7) and their length, or times: see nfa.h


# The header of an image, as in image.h. From ROW_OF on: offsets of tables in the image.
Field = IntEnum(
    "Field",
    "FORMAT SIZE STATES CLASSES SYMBOLS FINISH_SETS START START_COUNTERS SECOND_COUNTER THIRD_COUNTER DEPTH PUSHES FREE "
    "NARROW LIMIT LIMITED ROW_OF DENSE CLASS_OF BYTE_OF NEXT MOVES LEAVE RETURN CHANGE_WORD CHANGE_VALUE CROSS_START CROSS",
    start=0,
)


def next_entries(image: Image) -> npt.NDArray[Any]:
    """A view of the table NEXT: [states, classes]."""
    states, classes, table = int(image[Field.STATES]), int(image[Field.CLASSES]), image[image[Field.NEXT] :]
    return (table.view(np.int16) if image[Field.NARROW] else table)[: states * classes].reshape(states, classes)


def limits_of(limits: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """The fields of Limits in nfa.h that GrammarLimits sets."""
    return np.array([limits[name] for name in ("automaton_states", "automaton_bytes", "automaton_steps", "automaton_depth")], np.int64)


class UnfitError(ValueError):
    """Why a grammar has no automaton within the limits, and its size: the characters of the parsed grammar in JSON."""

    def __init__(self, reason: str, size: int) -> None:
        super().__init__(reason, size)
        self.size = size

    def __str__(self) -> str:
        return str(self.args[0])


def functions() -> ctypes.CDLL:
    """The functions of the compiler; Unavailable with the reason if there is no C library."""
    library = load()
    if isinstance(library, Unavailable):
        raise Unavailable(str(library))
    return library


class _Allocated:
    """An image that the C library has allocated and arrays share: a copy of a large one takes a millisecond."""

    def __init__(self, image: Any) -> None:
        address, size = ctypes.addressof(image.contents), image[Field.SIZE]
        # np.ctypeslib.as_array would define an array type per length, and ctypes never frees a type that has a pointer type
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": np.dtype(np.int32).str, "version": 3}
        weakref.finalize(self, functions().stepgraph_automaton_free_image, image).atexit = False


class AutomatonVocabulary:
    """The tokens of a vocabulary, prepared for compiling and matching.

    `tokens`: bytes of each id, empty for ids that are not text. `hidden_ids`: ids that are text only before the end of a marker.
    """

    def __init__(self, tokens: Sequence[bytes], stop_token_ids: Sequence[int], mask_words: int, hidden_ids: Sequence[int] = ()) -> None:
        library = functions()
        text = np.frombuffer(b"".join(tokens) + b"\0", np.uint8)
        starts = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
        stops, hidden = np.array(stop_token_ids, np.int32), np.array(hidden_ids, np.int32)
        self.handle: int | None = library.stepgraph_automaton_vocabulary(
            text.ctypes.data, starts.ctypes.data, len(tokens), stops.ctypes.data, len(stops), hidden.ctypes.data, len(hidden), mask_words
        )
        if not self.handle:
            raise MemoryError("AutomatonVocabulary: out of memory")
        weakref.finalize(self, library.stepgraph_automaton_free_vocabulary, self.handle).atexit = False
        self.view = structs.image_vocabulary()
        library.stepgraph_automaton_view_vocabulary(self.handle, byref(self.view))

    def compile(
        self, parts: Mapping[str, Any], chars: int, shortest: Mapping[int, int], limits: npt.NDArray[np.int64], has_formats: bool = False
    ) -> Image:
        """The image of a grammar, given as in ParsedGrammar; UnfitError with the reason if it has none. `has_formats`: rules with names
        that match `FORMAT_RULE` are formats."""
        found, reason, rules = POINTER(c_int32)(), ctypes.create_string_buffer(REASON_BYTES), parts["rules"]
        data, offsets = (np.array(parts[f"grammar_expr_{name}"], np.int32) for name in ("data", "indptr"))
        bodies = np.array([rule[1] for rule in rules], np.int32)
        formats = np.zeros(len(bodies), np.int32)
        for index, rule in enumerate(FORMAT_RULE.fullmatch(rule[0]) for rule in rules if has_formats):
            formats[index] = (int(rule[2]) * 2 + (not rule[1]) if rule[2] else -1) if rule else 0
        sizes = np.array([min(shortest.get(rule, MANY_BYTES), MANY_BYTES) for rule in range(len(bodies))], np.int32)
        addresses = (array.ctypes.data for array in (data, offsets, bodies, formats, sizes))
        grammar = structs.parsed_grammar(*addresses, len(offsets), len(bodies), parts["root_rule_id"], has_times=True)
        outcome = functions().stepgraph_automaton_compile(
            byref(grammar), limits.ctypes.data, self.handle, byref(found), reason, REASON_BYTES
        )
        if outcome == UNFIT:
            raise UnfitError(reason.value.decode(errors="replace"), chars)
        if outcome:
            raise MemoryError("the automaton compiler is out of memory")
        return np.asarray(_Allocated(found))
