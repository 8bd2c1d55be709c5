"""The structs of kernels.h as ctypes sees them, and how the tensors of a call become one: once, where their memory stays."""

from __future__ import annotations

from ctypes import CDLL, Structure, c_float, sizeof

import torch
from torch import Tensor

from stepgraph.sampling.kernels.cpu.loader import address, fields, prepared_call
from stepgraph.sampling.kernels.operation import Run

VERSION = 3  # of the structs and of what the kernels make of them
MOST_SIZE = 256  # numbers of a head
NARROW = {torch.float32: 0, torch.bfloat16: 1}


class AttentionCall(Structure):
    _fields_ = (
        *fields(
            "query keys values positions slots tables output",
            "batch count heads kv_heads size page_size pages cache_slots window narrow",
        ),
        ("scale", c_float),
    )


class TurnCall(Structure):
    _fields_ = tuple(
        fields(
            "query key value cosines sines slots output keys values",
            "tokens heads kv_heads size query_step key_step value_step cache_slots narrow",
        )
    )


class NormCall(Structure):
    _fields_ = (*fields("states weight output", "outer inner size step narrow"), ("epsilon", c_float))


class GateCall(Structure):
    _fields_ = tuple(fields("pairs output", "rows size narrow"))


class ProductCall(Structure):
    _fields_ = tuple(fields("states weight bias onto output", "rows inner outer step narrow"))


class PlaceCall(Structure):
    _fields_ = tuple(
        fields(
            "tokens length end tables wanted known positions slots",
            "batch count pages length_step end_step offset page_size max_length",
        )
    )


class ShiftCall(Structure):
    _fields_ = tuple(fields("positions slots tables earlier earlier_slots", "batch count pages page_size by shared"))


class AngleCall(Structure):
    _fields_ = tuple(fields("positions frequencies cosines sines", "tokens half narrow"))


class MaskCall(Structure):
    _fields_ = tuple(fields("rows tags masks row_tags row_masks", "batch words table_rows places"))


class SettleCall(Structure):
    _fields_ = tuple(
        fields(
            "tokens limit found status wanted finite alive ruled masks settled looked_up forced",
            "batch step limit_step found_step mask_step words",
        )
    )


FUNCTIONS = {
    "stepgraph_attention": AttentionCall,
    "stepgraph_turn_and_keep": TurnCall,
    "stepgraph_rms_norm": NormCall,
    "stepgraph_gate": GateCall,
    "stepgraph_product": ProductCall,
    "stepgraph_place_tokens": PlaceCall,
    "stepgraph_shift_entries": ShiftCall,
    "stepgraph_angles": AngleCall,
    "stepgraph_place_masks": MaskCall,
    "stepgraph_settle_draft": SettleCall,
}
OWN_LAYOUT = (VERSION, *map(sizeof, FUNCTIONS.values()), MOST_SIZE)


def _fits(*tensors: Tensor) -> bool:
    return tensors[0].dtype in NARROW and all(tensor.dtype is tensors[0].dtype for tensor in tensors)


def _places(*tensors: Tensor) -> bool:
    return all(tensor.dtype is torch.int64 and tensor.is_contiguous() for tensor in tensors)


def attention(
    library: CDLL,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    page_size: int,
    window: int,
    scale: float,
    output: Tensor,
) -> Run | None:
    tensors = (query, keys, values, positions, slots, block_tables, output)
    floats, (batch, count, heads, size) = (query, keys, values, output), query.shape
    dense = all(tensor.is_contiguous() for tensor in floats)
    if size > MOST_SIZE or not _fits(*floats) or not dense or not _places(positions, slots, block_tables):
        return None
    shape = (batch, count, heads, keys.shape[1], size, page_size, block_tables.shape[1], len(keys), window, NARROW[query.dtype], scale)
    return prepared_call(library.stepgraph_attention, AttentionCall(*(each.data_ptr() for each in tensors), *shape), tensors)


def rope_and_write_kv(
    library: CDLL,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    slots: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Run | None:
    tensors = (query, key, value, cosines, sines, slots, output, keys, values)
    (tokens, heads, size), kv_heads = query.shape, key.shape[1]
    dense = all(each.is_contiguous() for each in (cosines, sines, output, keys, values))
    packed = all(each.stride()[1:] == (size, 1) for each in (query, key, value))
    fits = _fits(query, key, value, cosines, sines, output, keys, values) and _places(slots)
    if size > MOST_SIZE or not fits or not dense or not packed:
        return None
    shape = (tokens, heads, kv_heads, size, query.stride(0), key.stride(0), value.stride(0), len(keys), NARROW[query.dtype])
    return prepared_call(library.stepgraph_turn_and_keep, TurnCall(*(each.data_ptr() for each in tensors), *shape), tensors)


def rms_norm(library: CDLL, states: Tensor, weight: Tensor, epsilon: float, output: Tensor) -> Run | None:
    """states [N, size] or [N, inner, size], inner ones side by side."""
    tensors, size = (states, weight, output), states.shape[-1]
    inner = 1 if states.dim() == 2 else states.shape[1]
    packed = states.dim() in (2, 3) and states.stride(-1) == 1 and (states.dim() == 2 or states.stride(1) == size)
    if not _fits(*tensors) or not packed or not weight.is_contiguous() or not output.is_contiguous():
        return None
    shape = (len(states), inner, size, states.stride(0), NARROW[states.dtype], epsilon)
    return prepared_call(library.stepgraph_rms_norm, NormCall(*(each.data_ptr() for each in tensors), *shape), tensors)


def gate(library: CDLL, pairs: Tensor, output: Tensor) -> Run | None:
    if not _fits(pairs, output) or not pairs.is_contiguous() or not output.is_contiguous():
        return None
    shape = (output.numel() // output.shape[-1], output.shape[-1], NARROW[pairs.dtype])
    return prepared_call(library.stepgraph_gate, GateCall(pairs.data_ptr(), output.data_ptr(), *shape), (pairs, output))


def product(library: CDLL, states: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None, output: Tensor) -> Run | None:
    tensors = tuple(each for each in (states, weight, output, bias, onto) if each is not None)
    dense = all(each.is_contiguous() for each in tensors[1:])
    if not _fits(*tensors) or not dense or states.stride(-1) != 1:
        return None
    addresses = map(address, (states, weight, bias, onto, output))
    shape = (len(states), states.shape[1], len(weight), states.stride(0), NARROW[states.dtype])
    return prepared_call(library.stepgraph_product, ProductCall(*addresses, *shape), tensors)


def place_tokens(
    library: CDLL,
    tokens: Tensor,
    wanted: Tensor,
    length: Tensor,
    end: Tensor,
    tables: Tensor,
    offset: int,
    page_size: int,
    max_length: int,
    known: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> Run | None:
    tensors = (tokens, length, end, tables, wanted, known, positions, slots)
    if not _places(tokens, tables, known, positions, slots) or not wanted.is_contiguous():
        return None
    shape = (*tokens.shape, tables.shape[1], length.stride(0), end.stride(0), offset, page_size, max_length)
    return prepared_call(library.stepgraph_place_tokens, PlaceCall(*map(address, tensors), *shape), tensors)


def shift_entries(
    library: CDLL, positions: Tensor, slots: Tensor, tables: Tensor, page_size: int, by: int, shared: int, *output: Tensor
) -> Run | None:
    tensors = (positions, slots, tables, *output)
    if not _places(*tensors):
        return None
    shape = (*positions.shape, tables.shape[1], page_size, by, shared)
    return prepared_call(library.stepgraph_shift_entries, ShiftCall(*map(address, tensors), *shape), tensors)


def angles(library: CDLL, positions: Tensor, frequencies: Tensor, cosines: Tensor, sines: Tensor) -> Run | None:
    tensors = (positions, frequencies, cosines, sines)
    dense = all(each.is_contiguous() for each in tensors)
    if not _fits(cosines, sines) or not _places(positions) or not dense or frequencies.dtype is not torch.float32:
        return None
    shape = (len(positions), len(frequencies), NARROW[cosines.dtype])
    return prepared_call(library.stepgraph_angles, AngleCall(*map(address, tensors), *shape), tensors)


def place_masks(library: CDLL, rows: Tensor, tags: Tensor, masks: Tensor, row_tags: Tensor, row_masks: Tensor) -> Run | None:
    tensors = (rows, tags, masks, row_tags, row_masks)
    if not all(each.is_contiguous() for each in tensors):
        return None
    return prepared_call(
        library.stepgraph_place_masks, MaskCall(*map(address, tensors), len(rows), masks.shape[1], *row_masks.shape[:2]), tensors
    )


def settle_draft(
    library: CDLL,
    tokens: Tensor,
    finite: Tensor,
    alive: Tensor,
    limit: Tensor,
    step: int,
    found: Tensor | None,
    wanted: Tensor | None,
    masks: Tensor | None,
    ruled: Tensor | None,
    status: Tensor | None,
    settled: Tensor,
    looked_up: Tensor,
    forced: Tensor,
) -> Run | None:
    given = (tokens, limit, found, status, wanted, finite, alive, ruled, masks, settled, looked_up, forced)
    dense = (tokens, finite, alive, wanted, ruled, status, settled, looked_up, forced)
    if not all(each is None or each.is_contiguous() for each in dense) or (masks is not None and masks.stride(-1) != 1):
        return None
    found_step, mask_step, words = found.stride(0) if found is not None else 0, 0, 0
    if masks is not None:
        mask_step, words = masks.stride(0), masks.shape[-1]
    shape = (len(tokens), step, limit.stride(0), found_step, mask_step, words)
    tensors = tuple(each for each in given if each is not None)
    return prepared_call(library.stepgraph_settle_draft, SettleCall(*map(address, given), *shape), tensors)
