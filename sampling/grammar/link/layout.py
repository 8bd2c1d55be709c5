"""The structs of host_link.h for ctypes, and the values that the loader compares with those of the compiled library."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_double, c_int, c_int32, c_int64, c_uint8, c_void_p, sizeof

from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS, HostAction
from stepgraph.sampling.grammar.matchers.forced import FORCED_BYTES, TokenTable
from stepgraph.sampling.grammar.status import ROW_RUNNING, TAG_FIELDS, HostColumn, MaskStatus

VERSION = 10  # of the layout: incremented with every change that sizes do not show
FAULT_BYTES = 480
MAX_SLOTS = 4096


class LibraryStruct(Structure):
    """The five functions of a grammar library that a row calls."""

    _fields_ = tuple((name, c_void_p) for name in ("accept", "fill", "rollback", "is_terminated", "forced"))


class XGrammarStruct(Structure):
    _fields_ = (
        ("functions", LibraryStruct),
        ("call", c_void_p),
        ("take_error", c_void_p),
        ("release", c_void_p),
        ("accept_token", c_void_p),
        ("fill_next_token_bitmask", c_void_p),
        ("rollback", c_void_p),
        ("is_terminated", c_void_p),
        ("find_jump_forward_string", c_void_p),
        ("matcher_type", c_int32),
    )


class LLGuidanceStruct(Structure):
    _fields_ = (
        ("functions", LibraryStruct),
        ("compute_mask_into", c_void_p),
        ("compute_mask", c_void_p),
        ("validate_tokens", c_void_p),
        ("consume_token", c_void_p),
        ("consume_tokens", c_void_p),
        ("rollback", c_void_p),
        ("reset", c_void_p),
        ("is_accepting", c_void_p),
        ("get_error", c_void_p),
        ("clone", c_void_p),
        ("free", c_void_p),
    )


class TokensStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("texts", "starts", "ids", "text_index", "buckets", "singles")),
        ("num_tokens", c_int64),
        ("longest", c_int32),
        ("merges", c_int32),
    )


class ForcedTextStruct(Structure):
    _fields_ = (
        ("start", c_int64),
        ("size", c_int32),
        ("count", c_int32),
        ("tokens", c_int32 * FORCED_BYTES),
        ("ends", c_uint8 * FORCED_BYTES),
        ("text", c_char * FORCED_BYTES),
    )


class MarkerStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("symbols", "fallback", "mask_index", "masks", "text_words", "bytes", "starts")),
        ("num_tokens", c_int64),
        ("complete", c_int32),
    )


class MarkerProgressStruct(Structure):
    _fields_ = (
        ("table", c_void_p),
        ("states", c_void_p),
        ("room", c_int64),
        ("num_free", c_int64),
        ("num_inner", c_int64),
    )


class RowStruct(Structure):
    _fields_ = (
        ("library", c_void_p),
        ("matcher", c_void_p),
        ("text_words", c_void_p),
        ("stop_words", c_void_p),
        ("partial_words", c_void_p),
        ("num_partial", c_int64),
        ("num_tokens", c_int64),
        ("owner", c_int64),
        ("committed", c_int64),
        ("pending_drafts", c_int64),
        ("fuel_seconds", c_double),
        ("last_mask_status", c_int32),
        ("known_open", c_int32),
        ("faulted", c_int),
        ("fault", c_char * FAULT_BYTES),
        ("forced", ForcedTextStruct),
        ("marker", MarkerProgressStruct),
    )


class ShapeStruct(Structure):
    _fields_ = (
        ("state", c_void_p),
        ("drafts", c_void_p),
        ("masks", c_void_p),
        ("tags", c_void_p),
        ("forced", c_void_p),
        ("tokens", POINTER(TokensStruct)),
        ("slots", c_int64),
        ("stages", c_int64),
        ("words", c_int64),
        ("depth", c_int64),
        ("helpers", c_int64),
    )


class StepStruct(Structure):
    _fields_ = (("action", c_int32), ("stage", c_int32))


class NodeStruct(Structure):
    _fields_ = (("link", c_void_p), ("steps", POINTER(StepStruct)), ("count", c_int64))


class CountsStruct(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("fills", "accepts", "rollbacks", "looks", "node_ns", "longest_node_ns")),
        ("nodes", c_int64 * (len(NODE_BOUNDS_NS) + 1)),
        ("ended", c_int64),
        ("missed", c_int64),
    )


class CallStruct(Structure):
    _fields_ = (("function", c_void_p), ("data", c_void_p), ("finished", c_double))


class CallListStruct(Structure):
    _fields_ = (("calls", POINTER(CallStruct)), ("count", c_int64))


OWN_LAYOUT = (
    VERSION,
    *(sizeof(struct) for struct in (LibraryStruct, RowStruct)),
    RowStruct.fault.offset,
    *(sizeof(struct) for struct in (ShapeStruct, NodeStruct, StepStruct, CountsStruct, XGrammarStruct, CallStruct)),
    *(sizeof(struct) for struct in (CallListStruct, LLGuidanceStruct, TokensStruct, ForcedTextStruct)),
    *(sizeof(struct) for struct in (MarkerStruct, MarkerProgressStruct)),
    len(HostColumn),
    TAG_FIELDS,
    ROW_RUNNING,
    int(MaskStatus.FAULT),
    int(HostAction.END_ROUND),
    MAX_SLOTS,
    FORCED_BYTES,
    *NODE_BOUNDS_NS,
)


def tokens_struct(table: TokenTable) -> TokensStruct:
    arrays = {name: getattr(table, name).ctypes.data for name in ("texts", "starts", "ids", "text_index", "buckets", "singles")}
    struct = TokensStruct(**arrays, num_tokens=table.num_tokens, longest=table.longest, merges=table.merges)
    struct.table = table  # keeps the arrays alive
    return struct


def layout_of(library: ctypes.CDLL) -> tuple[int, ...]:
    values = (c_int64 * 64)()
    count = library.stepgraph_layout(values, len(values))
    return tuple(values[:count])
