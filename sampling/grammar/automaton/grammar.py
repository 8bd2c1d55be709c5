"""Grammars as byte automata with token masks, and their matcher. A mask is a row of a table; a token is followed byte by byte."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import weakref
from ctypes import addressof, c_char, c_int32
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.sampling.c_declarations import constants, function_types
from stepgraph.sampling.grammar.automaton.library import AutomatonVocabulary, Field, Image, functions, limits_of, next_entries
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker, library_errors
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.matchers import forced
from stepgraph.sampling.grammar.matchers.marker import Marker
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import MASK_DTYPE, Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.grammar import check_payload, parse

STATUSES = tuple(MaskStatus)


class MatcherFunctions(ctypes.Structure):
    """matcher_library of host_link.h, to be called."""

    _fields_ = tuple(function_types("matcher_library").items())


class AutomatonMatcher:
    """The state of one text. The native host link uses the same C object, so its calls change this matcher."""

    def __init__(self, grammar: AutomatonGrammar) -> None:
        library, self.grammar = functions(), grammar
        self.vocabulary = grammar.vocabulary
        self.fault = ""
        self.functions = MatcherFunctions.in_dll(library, "stepgraph_automaton_functions")
        self._fill = self.functions.fill  # stored, because each access creates an object
        self.handle: int | None = library.stepgraph_open_automaton(grammar.image.ctypes.data, addressof(grammar.table.view))
        if not self.handle:
            raise MemoryError("AutomatonMatcher: out of memory")
        weakref.finalize(self, library.stepgraph_close_automaton, self.handle).atexit = False
        self._error, self._written = ctypes.create_string_buffer(constants.FAULT_BYTES), (c_int32 * constants.WRITTEN)()
        # Loads the data of the first mask into the caches before a round needs it.
        self.fill_next_token_bitmask(torch.empty(1, self.vocabulary.mask_words, dtype=MASK_DTYPE), 0)

    def _checked(self, result: int) -> int:
        if result < 0:
            self.fault = self._error.value.decode(errors="replace")
        return result

    def accept_token(self, token_id: int) -> bool:
        if self.fault or not 0 <= token_id < len(self.vocabulary.tokens):
            return False
        return self._checked(self.functions.accept(None, self.handle, token_id, self._error)) > 0

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        address = self.vocabulary.mask_address(masks, index)
        if self.fault:
            masks[index] = 0
            return MaskStatus.FAULT
        self._written[0] = -1
        status: int = self._fill(None, self.handle, address, self.vocabulary.mask_words, self._written, self._error)
        return STATUSES[status]

    def rollback(self, num_tokens: int) -> None:
        failed = self.functions.rollback(None, self.handle, num_tokens, self._error) < 0
        assert not failed, self._error.value

    def forced_bytes(self) -> bytes:
        text = (c_char * forced.FORCED_BYTES)()
        size = 0 if self.fault else self._checked(self.functions.forced(None, self.handle, text, forced.FORCED_BYTES, self._error))
        return text.raw[: max(0, size)]


@dataclass(frozen=True, eq=False)
class AutomatonGrammar:
    """A compiled grammar, shared by its matchers."""

    image: Image
    table: AutomatonVocabulary
    vocabulary: Vocabulary

    @functools.cached_property
    def image_id(self) -> int:
        """A positive number that identifies the image. It is a hash, so that equal engines write equal buffers."""
        return int.from_bytes(hashlib.blake2b(self.image.tobytes(), digest_size=8).digest(), "little") >> 1 or 1

    @property
    def nbytes(self) -> int:
        return self.image.nbytes

    def after(self, marker: Marker) -> AutomatonGrammar:
        """The same grammar after free text and a text marker."""
        return replace(self, image=with_marker(self.image, marker))

    def matcher(self) -> AutomatonMatcher:
        return AutomatonMatcher(self)


_tables: weakref.WeakKeyDictionary[Vocabulary, AutomatonVocabulary] = weakref.WeakKeyDictionary()


def automaton_vocabulary(vocabulary: Vocabulary) -> AutomatonVocabulary:
    """The tokens of a vocabulary, prepared once for all its grammars."""
    table = _tables.get(vocabulary)
    if table is None:
        tokens, hidden = vocabulary.for_llguidance[: len(vocabulary.tokens)], sorted(vocabulary.xgrammar_unsafe_ids)
        table = _tables[vocabulary] = AutomatonVocabulary(tokens, vocabulary.stop_token_ids, vocabulary.mask_words, hidden)
    return table


class AutomatonBuilder:
    """Builds automata over one vocabulary; safe to call from any thread. Grammars are written and parsed as for xgrammar."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self._vocabulary, self._limits = vocabulary, limits

    def check(self, constraint: Constraint) -> None:
        """ValueError for what would not be enforced, an UnsupportedError if the part is known; does not compile."""
        if constraint.kind in ("regex", "ebnf", "lark"):
            check_payload(constraint, self._limits)

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> AutomatonGrammar:
        """UnfitError if the automaton exceeds the limits or does not exist; other errors as in `XGrammarBuilder.build`."""
        with library_errors():
            if worker is None:
                parsed, bounds = parse(constraint, self._limits)[1:], limits_of(asdict(self._limits))
                image = automaton_vocabulary(self._vocabulary).compile(*parsed, bounds, constraint.kind != "ebnf")
            else:
                serialised = worker.call("automaton", constraint.kind, constraint.payload, asdict(constraint.schema_options))
                image = np.frombuffer(serialised, np.int32)
        return AutomatonGrammar(image, automaton_vocabulary(self._vocabulary), self._vocabulary)


class TokenTensors(NamedTuple):
    """The tables of a vocabulary on a device, as `image_vocabulary` of image.h."""

    token_text: Tensor  # [bytes] uint8, of all tokens, padded to whole words
    token_starts: Tensor  # [tokens + 1] int32
    plain_rows: Tensor  # [n, words] int32
    stop_words: Tensor  # [words] int32


class SplitTensors(NamedTuple):
    """The data with which a device splits text into tokens, from the vocabulary's `forced.TokenLookup`."""

    token_slots: Tensor  # [n, 2] int64
    merges: bool


def split_tensors(vocabulary: Vocabulary, device: torch.device) -> SplitTensors:
    table = forced.token_lookup(vocabulary)
    return SplitTensors(torch.from_numpy(table.slots).to(device), table.merges)


def token_tensors(vocabulary: Vocabulary, device: torch.device) -> TokenTensors:
    """Copies of the tables with which the grammars of this vocabulary are compiled."""
    view = automaton_vocabulary(vocabulary).view
    plain = np.ctypeslib.as_array((c_int32 * (view.plain_rows * view.words)).from_address(view.plain)).reshape(-1, view.words)
    text, starts = vocabulary.texts
    tables = np.pad(text, (0, -len(text) % 4)), starts, plain, vocabulary.stop_words  # kernels load words of text
    return TokenTensors(*(torch.tensor(table, device=device) for table in tables))


# Free text up to a marker: states that find the marker, whose masks allow all text that does not pass its end.
# With a limit there is a second state for each of these, in which only the marker is legal. The functions that follow a text token by token
# move it there when it has reached the limit (image_within_limit).

Ints = npt.NDArray[np.int32]
Tables = dict[Field, npt.NDArray[Any]]
TABLE_FIELDS = tuple(field for field in Field if field >= Field.ROW_OF)
NO_LIMIT = np.iinfo(np.int32).max
OTHER_BYTES = 256  # stands for all bytes that do not occur in the marker


def with_marker(image: Image, marker: Marker) -> Image:
    """The image of the same grammar after a text marker. The new states follow those of the grammar, from Field.FREE on."""
    num_added, words = len(marker.mask_index), marker.vocabulary.mask_words
    states, text, tables = int(image[Field.STATES]), marker.vocabulary.text_words, _tables_of(image)
    # Every byte of the marker gets its own class.
    byte_keys = np.where(np.isin(np.arange(256), marker.symbols), np.arange(256), OTHER_BYTES) + tables[Field.CLASS_OF] * (OTHER_BYTES + 1)
    class_keys, class_of, counts = np.unique(byte_keys, return_inverse=True, return_counts=True)
    byte_of = np.full(len(class_keys), -1)
    byte_of[class_of[counts[class_of] == 1]] = np.flatnonzero(counts[class_of] == 1)
    next_states = next_entries(image)[:, class_keys // (OTHER_BYTES + 1)]
    free_states = np.full((num_added, len(class_keys)), states)
    for state in range(num_added):
        symbol = state % marker.complete
        free_states[state] = -1 if state >= marker.complete else free_states[marker.fallback[symbol]] if symbol else states
        following = states + state + 1 if symbol + 1 < marker.complete else image[Field.START]
        free_states[state, class_of[marker.symbols[symbol]]] = following
    # The masks of free text are text_words with some bits changed; the masks at the limit have few bits.
    is_free = np.arange(len(marker.masks)) < marker.free_masks
    base_rows = [text if free_row else np.zeros_like(text) for free_row in is_free]
    places = [np.flatnonzero(mask != base) for mask, base in zip(marker.masks, base_rows, strict=True)]
    values = [mask[place] for mask, place in zip(marker.masks, places, strict=True)]
    base_of, sizes = np.where(is_free, len(tables[Field.DENSE]) // words, -1), np.array([len(place) for place in places])
    status, ends = np.where(marker.masks.any(1), MaskStatus.OK, MaskStatus.DEAD_END), len(tables[Field.CHANGE_WORD]) + np.cumsum(sizes)
    crossing = np.repeat(tables[Field.CROSS_START][-1:], num_added)
    appended: dict[Field, list[npt.NDArray[Any]]] = {
        Field.LEAVE: [np.full(num_added, -1)],
        Field.ROW_OF: [np.stack([base_of, status, ends - sizes, ends], 1)[marker.mask_index].ravel()],
        Field.CHANGE_WORD: places,
        Field.CHANGE_VALUE: values,
        Field.DENSE: [text],
        Field.CROSS_START: [crossing],
    }
    tables |= {field: np.concatenate([tables[field], *more]) for field, more in appended.items()}
    entries = np.concatenate([next_states, free_states]).astype(np.int32).ravel()
    narrow = entries.min() >= -(1 << 15) and entries.max() < 1 << 15
    if narrow:
        entries = np.append(entries, np.zeros(entries.size % 2)).astype(np.int16).view(np.int32)
    tables |= {Field.CLASS_OF: class_of, Field.BYTE_OF: byte_of, Field.NEXT: entries}
    header = image[: Field.ROW_OF].copy()
    for field, value in (
        (Field.STATES, states + num_added),
        (Field.CLASSES, len(class_keys)),
        (Field.START, states),
        (Field.FREE, states),
        (Field.LIMIT, NO_LIMIT if marker.limit is None else marker.limit),
        (Field.LIMITED, states + marker.complete),
        (Field.NARROW, narrow),
    ):
        header[field] = value
    return _assembled(header, tables)


def _tables_of(image: Image) -> Tables:
    """The tables of an image. Each ends where the next one begins."""
    return {field: image[image[field] : image[end]] for field, end in zip(TABLE_FIELDS, [*TABLE_FIELDS[1:], Field.SIZE], strict=True)}


def _assembled(header: Ints, tables: Tables) -> Image:
    parts, offsets, size = list[Ints](), list[int](), len(header) + len(tables)
    for field, table in tables.items():
        padding = -size % 4 if field is Field.DENSE else 0
        offsets.append(size + padding)
        parts += [np.zeros(padding, np.int32), table.astype(np.int32).ravel()]
        size += padding + table.size
    image: Image = np.concatenate([header, np.array(offsets, np.int32), *parts])
    image[Field.SIZE] = size
    image.setflags(write=False)
    return image
