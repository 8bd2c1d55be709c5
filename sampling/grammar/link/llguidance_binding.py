"""llguidance's C API, which its wheel exports next to the Python module. It is used only if its version and structs are the expected ones.

Created here: one tokenizer per vocabulary and one unused start matcher per grammar. Each row clones it in C.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from types import ModuleType
from typing import Any

import numpy as np

from stepgraph.sampling.c_declarations import structs
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.native import Unavailable

SYMBOLS = {  # called by host nodes
    **{name: f"llg_matcher_{name}" for name, _ in structs.llguidance_library._fields_[1:]},
    **{"clone": "llg_clone_matcher", "free": "llg_free_matcher"},
}
VERSION_PATTERN = re.compile(rb"llguidance@1\.9\.([1-9]\d*)(?!\S)")
_NON_TEXT_PREFIX = b"\xff"  # prefix of tokens that are not text
_ERROR_BYTES = 1000
_FILL_BYTE = 0xA5
MAX_LEXER_UPDATES = 8


_LIMITS: tuple[tuple[str, type, int], ...] = (  # name, type, default
    ("max_items_in_row", c_size_t, 2000),
    ("initial_lexer_fuel", c_uint64, 1_000_000),
    ("step_lexer_fuel", c_uint64, 200_000),
    ("step_max_items", c_size_t, 50_000),
    ("max_lexer_states", c_size_t, 250_000),
    ("max_grammar_size", c_size_t, 500_000),
    ("precompute_large_lexemes", c_bool, True),
    ("verbose_errors", c_bool, True),
)
DEFAULTS = {name: default for name, _, default in _LIMITS}


class LimitsStruct(Structure):
    _fields_ = tuple((name, kind) for name, kind, _ in _LIMITS)


class ConstraintStruct(Structure):
    _fields_ = (
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", LimitsStruct),
    )


class TokenizerStruct(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", POINTER(c_uint32)),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", c_void_p),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", c_void_p),
        ("tok_eos_extra", POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {  # of the functions called from Python: result, then arguments
    "llg_get_version": (c_char_p,),
    "llg_constraint_init_set_defaults": (None, c_void_p, c_void_p),
    "llg_new_tokenizer_v2": (c_void_p, POINTER(TokenizerStruct), c_char_p, c_size_t),
    "llg_free_tokenizer": (None, c_void_p),
    "llg_new_matcher": (c_void_p, POINTER(ConstraintStruct), c_char_p, c_char_p),
    "llg_matcher_get_error": (c_char_p, c_void_p),
    "llg_matcher_get_mask_byte_size": (c_size_t, c_void_p),
    "llg_free_matcher": (None, c_void_p),
}


class LLGuidanceApi:
    """The library that the Python module has loaded and the addresses of its functions."""

    def __init__(self, module: ModuleType) -> None:
        path = module.__file__ or ""
        try:
            self.library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE)
            for name, (result, *arguments) in _SIGNATURES.items():
                function = getattr(self.library, name)
                function.restype, function.argtypes = result, arguments
            self.addresses = {field: int(ctypes.cast(self.library[symbol], c_void_p).value or 0) for field, symbol in SYMBOLS.items()}
        except (OSError, AttributeError) as error:
            raise Unavailable(f"llguidance's module does not export its C API: {error}") from error
        version: bytes = self.library.llg_get_version()
        if VERSION_PATTERN.match(version) is None:
            raise Unavailable(f"llguidance's C API: got {version.decode(errors='replace')}, expected llguidance@1.9.1 or a later 1.9")
        self._check_layout()

    def _check_layout(self) -> None:
        """LlgConstraintInit has no version field. Its layout is inferred from where the library writes the default values."""
        buffer = (c_uint8 * (2 * ctypes.sizeof(ConstraintStruct)))(*[_FILL_BYTE] * (2 * ctypes.sizeof(ConstraintStruct)))
        self.library.llg_constraint_init_set_defaults(buffer, buffer)
        filled = ConstraintStruct.from_buffer(buffer)
        limits = {name: getattr(filled.limits, name) for name in DEFAULTS}
        beyond = bytes(buffer)[ctypes.sizeof(ConstraintStruct) :]
        if filled.tokenizer != ctypes.addressof(buffer) or limits != DEFAULTS or set(beyond) != {_FILL_BYTE}:
            raise Unavailable(f"llguidance's LlgConstraintInit has another layout: got limits {limits}, expected {DEFAULTS}")


class LLGuidanceTokenizer:
    """A vocabulary in the library's form; usable from any thread."""

    def __init__(self, api: LLGuidanceApi, vocabulary: Vocabulary) -> None:
        self.api, self.mask_bytes = api, vocabulary.mask_words * np.dtype(np.int32).itemsize
        tokens = [_NON_TEXT_PREFIX if index in vocabulary.non_text_ids else token for index, token in enumerate(vocabulary.tokens)]
        tokens += [b""] * (vocabulary.logits_width - len(tokens))
        lengths = (c_uint32 * len(tokens))(*map(len, tokens))
        first, *others = vocabulary.stop_token_ids
        other_stop_ids = (c_uint32 * len(others))(*others)
        config = TokenizerStruct(
            struct_size=ctypes.sizeof(TokenizerStruct),
            vocab_size=len(tokens),
            tok_eos=first,
            token_lens=lengths,
            token_bytes=b"".join(tokens),
            use_approximate_greedy_tokenize_fn=True,  # never used: `no_forcing` in llguidance_lib/lark.py
            tok_eos_extra=other_stop_ids,
            tok_eos_extra_count=len(others),
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.address: int | None = api.library.llg_new_tokenizer_v2(byref(config), error, _ERROR_BYTES)
        if not self.address:
            raise ValueError(f"llguidance's C API rejects this vocabulary: {error.value.decode(errors='replace')}")
        weakref.finalize(self, api.library.llg_free_tokenizer, self.address).atexit = False


class LLGuidanceStart:
    """A matcher at the start of a text. Rows clone it and never advance it."""

    def __init__(self, api: LLGuidanceApi, address: int) -> None:
        self.address = address
        weakref.finalize(self, api.library.llg_free_matcher, address).atexit = False


class LLGuidanceNativeGrammar:
    """The matchers that rows start from.

    A lexer computes its states lazily, and each clone has its own lexer. So the lexers of the first rows that end are kept for later
    rows. `cold_start` has an empty lexer, for rows whose lexer is full.
    """

    def __init__(self, tokenizer: LLGuidanceTokenizer, lark: str, fuel: dict[str, int]) -> None:
        """ValueError with the library's message if the grammar is invalid."""
        assert "\0" not in lark, "the library reads up to the first NUL"
        self.tokenizer, api = tokenizer, tokenizer.api
        self.lexer_updates = 0
        # The limits on counted work are reached before the time limit, so that a text fails on every machine or on none.
        limits = LimitsStruct(**DEFAULTS | fuel | {"verbose_errors": False})
        config = ConstraintStruct(tokenizer=tokenizer.address, limits=limits)
        self.start = self.cold_start = LLGuidanceStart(api, api.library.llg_new_matcher(byref(config), b"lark", lark.encode()))
        error: bytes | None = api.library.llg_matcher_get_error(self.start.address)
        if error is not None:
            raise ValueError(error.decode(errors="replace"))
        assert api.library.llg_matcher_get_mask_byte_size(self.start.address) == tokenizer.mask_bytes


class LLGuidanceBinding:
    """The functions that a row calls, bound to the library."""

    def __init__(self, link: ctypes.CDLL, api: LLGuidanceApi) -> None:
        self._link, self.struct = link, structs.llguidance_library(**api.addresses)
        link.stepgraph_bind_llguidance(byref(self.struct))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    def open_matcher(self, owner: object, grammar: LLGuidanceNativeGrammar, tokens: Sequence[int], stop_words: int) -> int:
        """The address of a matcher that has accepted `tokens`. It lives as long as `owner`."""
        start, accepted = grammar.start, (c_uint32 * len(tokens))(*tokens)
        starts = start.address, grammar.cold_start.address
        matcher: int | None = self._link.stepgraph_open_llguidance(self.address, *starts, stop_words, accepted, len(tokens))
        if not matcher:
            raise MemoryError("NativeRow: out of memory")
        weakref.finalize(owner, self._close_matcher, grammar, start, matcher).atexit = False
        return matcher

    def _close_matcher(self, grammar: LLGuidanceNativeGrammar, _: LLGuidanceStart, matcher: int) -> None:
        """The arguments keep the start and the grammar's cold start alive until this call: the matcher may be rebuilt from either."""
        keeps_lexer = grammar.lexer_updates < MAX_LEXER_UPDATES  # bounded, because the states of some grammars grow without limit
        if kept := self._link.stepgraph_close_llguidance(self.address, matcher, keeps_lexer):
            grammar.lexer_updates += 1
            grammar.start = LLGuidanceStart(grammar.tokenizer.api, kept)  # for later rows: a matcher at the start of a text


@functools.cache
def llguidance_api() -> LLGuidanceApi:
    """Raises Unavailable with the reason if host nodes cannot call the library."""
    try:
        from llguidance import _lib
    except ImportError as error:
        raise Unavailable(f"llguidance is not installed: {error}") from error
    return LLGuidanceApi(_lib)
