"""Free text up to a marker: states that find the marker, whose masks allow all text that does not pass its end.

With a limit there is a second state for each of these, from which only the marker goes on. A text that has reached the limit is moved
there, by what follows it token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stepgraph.sampling.grammar.automaton.library import Field, Image, next_entries
from stepgraph.sampling.grammar.matchers.marker import Marker
from stepgraph.sampling.grammar.status import MaskStatus

Ints = npt.NDArray[np.int32]
Tables = dict[Field, npt.NDArray[Any]]
TABLES = tuple(field for field in Field if field >= Field.CLASS_OF)
NO_LIMIT = np.iinfo(np.int32).max
OTHER = 256  # in place of a byte: all bytes that do not occur in the marker


def with_marker(image: Image, marker: Marker) -> Image:
    """The image of the same grammar after a text marker. The new states follow those of the grammar, from Field.FREE on."""
    added, words = len(marker.mask_index), marker.vocabulary.mask_words
    states, rows = int(image[Field.STATES]), int(image[Field.ROWS])
    text, tables = marker.vocabulary.text_words, _tables(image)
    # Every byte of the marker gets a class of its own.
    pairs = np.where(np.isin(np.arange(256), marker.symbols), np.arange(256), OTHER) + tables[Field.CLASS_OF] * (OTHER + 1)
    found, class_of, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    byte_of = np.full(len(found), -1)
    byte_of[class_of[counts[class_of] == 1]] = np.flatnonzero(counts[class_of] == 1)
    next_states = next_entries(image)[:, found // (OTHER + 1)]
    free = np.full((added, len(found)), states)
    for state in range(added):
        symbol = state % marker.complete
        free[state] = -1 if state >= marker.complete else free[marker.fallback[symbol]] if symbol else states
        following = states + state + 1 if symbol + 1 < marker.complete else image[Field.START]
        free[state, class_of[marker.symbols[symbol]]] = following
    # The rows of the masks are text_words with some bits changed; those that only the marker continues have few bits.
    is_free = np.arange(len(marker.masks)) < marker.free_masks
    bases = [text if free_row else np.zeros_like(text) for free_row in is_free]
    places = [np.flatnonzero(mask != base) for mask, base in zip(marker.masks, bases, strict=True)]
    values = [mask[place] for mask, place in zip(marker.masks, places, strict=True)]
    status = np.where(marker.masks.any(1), MaskStatus.OK, MaskStatus.DEAD_END)
    changes = tables[Field.CHANGE_START][-1] + np.cumsum([len(place) for place in places])
    crossing = np.repeat(tables[Field.CROSS_START][-1:], added)
    appended: dict[Field, list[npt.NDArray[Any]]] = {
        Field.LEAVE: [np.full(added, -1)],
        Field.ROW_OF: [rows + marker.mask_index],
        Field.BASE_OF: [np.where(is_free, len(tables[Field.DENSE]) // words, -1)],
        Field.STATUS_OF: [status],
        Field.CHANGE_START: [changes],
        Field.CHANGE_WORD: places,
        Field.CHANGE_VALUE: values,
        Field.DENSE: [text],
        Field.CROSS_START: [crossing],
    }
    tables |= {field: np.concatenate([tables[field], *more]) for field, more in appended.items()}
    entries = np.concatenate([next_states, free]).astype(np.int32).ravel()
    narrow = entries.min() >= -(1 << 15) and entries.max() < 1 << 15
    if narrow:
        entries = np.append(entries, np.zeros(entries.size % 2)).astype(np.int16).view(np.int32)
    tables |= {Field.CLASS_OF: class_of, Field.BYTE_OF: byte_of, Field.NEXT: entries}
    header = image[: Field.CLASS_OF].copy()
    for field, value in (
        (Field.STATES, states + added),
        (Field.CLASSES, len(found)),
        (Field.START, states),
        (Field.ROWS, rows + len(marker.masks)),
        (Field.FREE, states),
        (Field.LIMIT, NO_LIMIT if marker.limit is None else marker.limit),
        (Field.LIMITED, states + marker.complete),
        (Field.NARROW, narrow),
    ):
        header[field] = value
    return _assembled(header, tables)


def _tables(image: Image) -> Tables:
    """Each goes up to the next one; the compiler writes DENSE before the others."""
    others = [field for field in TABLES if field is not Field.DENSE]
    ends = {field: image[after] for field, after in zip([Field.DENSE, *others], [*others, Field.SIZE], strict=True)}
    return {field: image[image[field] : ends[field]] for field in TABLES}


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
