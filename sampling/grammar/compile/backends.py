"""The grammar libraries, the order in which they are tried, the checks that apply to all, and which parts of a constraint each enforces."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar.automaton.grammar import AutomatonBuilder
from stepgraph.sampling.grammar.automaton.library import UnfitError
from stepgraph.sampling.grammar.compile.limits import CompileAbortedError, GrammarLimits, limit_exceeded, with_limit_name
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice, Constraint
from stepgraph.sampling.grammar.constraints.structural_tag import tag_groups
from stepgraph.sampling.grammar.constraints.unsupported import Unsupported, UnsupportedError, naming_schema
from stepgraph.sampling.grammar.llguidance_lib.lark import LARK_TOKEN
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.schema.grammar import narrowed_parts, without_keyword
from stepgraph.sampling.grammar.schema.reader import check_schema, parse_json
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.ebnf import LITERAL_OR_CLASS
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarBuilder
from stepgraph.sampling.native import why_not

# "auto" tries them in this order, except for schemas without an automaton: see `order_by_cost`. An automaton accepts the same texts as
# xgrammar's grammar and costs least. xgrammar stores the masks of most states. llguidance computes every mask when it is needed.
BACKENDS = ("automaton", "xgrammar", "llguidance")
SCHEMA_KINDS = ("json_schema", "json_object", "structural_tag")
MAX_REASON_CHARS = 600  # characters of a library's reason in an error message
MAX_UNSUPPORTED_PARTS = 100

# The pieces of a text, for counting brackets. Brackets in a regular expression inside a Lark grammar are counted separately.
_BRACKET_PATTERNS = {
    "regex": re.compile(r"\\.|\[(?:[^\]\\]|\\.)*\]?|[()]", re.DOTALL),
    "ebnf": re.compile(rf"{LITERAL_OR_CLASS.pattern}|[()]", re.DOTALL),
    "lark": LARK_TOKEN,
}

Result = TypeVar("Result")


# Processor time of a compile, per character of the parsed grammar; median of 26 schemas of MaskBench that do not fit in an automaton
# ("libraries" in the record under tools/results). llguidance takes a hundredth.
XGRAMMAR_SECONDS_PER_CHAR = 5.4e-5
MAX_COMPILE_SECONDS = 1.0


class Grammar(Protocol):
    """A constraint compiled by one library; immutable, shared by any number of matchers."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> Matcher: ...


class Builder(Protocol):
    """Builds grammars over one vocabulary; safe to call from any thread."""

    def check(self, constraint: Constraint) -> None:
        """ValueError for what would not be enforced, if that is found quickly; an UnsupportedError if the part is known."""

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> Grammar:
        """Compile in the worker, or in this process if there is none. ValueError as in `check`, or with the library's message."""


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def backends_for(constraint: Constraint, default: BackendChoice) -> tuple[str, ...]:
    """The libraries to try, in order of preference."""
    choice = constraint.backend if constraint.backend != "auto" else default
    if choice != "auto":
        return (choice,)
    if constraint.kind in ("lark", "ebnf"):  # errors are of the libraries that read the notation
        return tuple(name for name in available_backends() if (name == "llguidance") == (constraint.kind == "lark"))
    return available_backends()


@functools.cache
def available_backends() -> tuple[str, ...]:
    """The libraries that "auto" tries in this installation. Without the C library there is no automaton; xgrammar then replaces it."""
    return BACKENDS[1:] if why_not() else BACKENDS


def order_by_cost(names: Sequence[str], kind: str, unfit: UnfitError) -> tuple[dict[str, str], list[str]]:
    """The libraries for a grammar that does not fit in an automaton, in the order to try. xgrammar has the faster masks, 13 us against 1 ms
    (p99 over 131,072 tokens, in the same record), but not if the automaton did not fit because of nested parts: 55 ms against 1.2 ms in an
    earlier profile. Also, why xgrammar is not tried first."""
    seconds = XGRAMMAR_SECONDS_PER_CHAR * unfit.size
    slow = "a mask is expected to take up to 55 ms" if "nested part" in str(unfit) else ""
    slow = f"compiling is expected to take {seconds:.0f} s" if seconds > MAX_COMPILE_SECONDS else slow
    if kind in SCHEMA_KINDS and slow and len(names) > 1:
        return {"xgrammar": slow}, ["llguidance", "xgrammar"]
    return {}, list(names)


def make_builder(name: str, vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> Builder:
    """ValueError if the library is not installed."""
    if name == "automaton" and name not in available_backends():
        raise ValueError(f"there is no C library: {why_not()}")
    if name in ("automaton", "xgrammar"):
        return AutomatonBuilder(vocabulary, limits) if name == "automaton" else XGrammarBuilder(vocabulary, limits, max_threads)
    if not is_installed(name):
        raise ValueError(f"{name} is not installed; pip install 'stepgraph[{name}]'")
    from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceBuilder  # an optional library

    return LLGuidanceBuilder(vocabulary, limits)


class Backends:
    """Tries the libraries one after another, and collects the reasons of those that reject a constraint."""

    def __init__(self, vocabulary: Vocabulary, choice: BackendChoice, limits: GrammarLimits, max_threads: int) -> None:
        self._vocabulary, self._choice, self._limits, self._max_threads = vocabulary, choice, limits, max_threads
        self._builders: dict[str, Builder] = {}
        self._lock = threading.RLock()  # reentrant: a signal handler may call Engine.submit()
        available_backends()  # loads the C library before the first constraint

    def check(self, constraint: Constraint) -> None:
        """ValueError with the kind and the reasons of all libraries, as far as they are known without compiling."""

        def attempt(name: str) -> None:
            check_schemas(constraint)
            self._builder(name).check(constraint)

        self._first_success(constraint, attempt)

    def build(self, constraint: Constraint, worker: CompileWorker | None) -> tuple[Grammar, str, str]:
        """The grammar, the name of its library, and why earlier ones rejected it; ValueError with the kind and all reasons."""

        def attempt(name: str) -> Grammar:
            grammar = self._builder(name).build(constraint, worker)
            check_first_mask(grammar, self._vocabulary)
            return grammar

        return self._first_success(constraint, attempt)

    def _first_success(self, constraint: Constraint, attempt: Callable[[str], Result]) -> tuple[Result, str, str]:
        reasons, later = dict[str, str](), dict[str, str]()
        try:
            check_size(constraint, self._limits)
            names = list(backends_for(constraint, self._choice))
            while names:
                name = names.pop(0)
                later.pop(name, None)
                try:
                    result = attempt(name)
                except Exception as error:  # also OverflowError and RecursionError: a constraint may not fail the engine
                    if is_final(error, name, constraint.kind):
                        raise
                    reasons[name] = reason_of(error)
                    if isinstance(error, UnfitError):
                        later, names = order_by_cost(names, constraint.kind, error)
                    continue
                return result, name, _joined({**reasons, **later})
        except ValueError as error:
            reasons = {"": reason_of(error)}
        distinct = set(reasons.values())
        why = distinct.pop() if len(distinct) == 1 else _joined(reasons)
        raise ValueError(f"constraint {constraint.kind}: cannot be compiled: {why}")

    def _builder(self, name: str) -> Builder:
        with self._lock:  # a token table is slow to build, so build it once
            if name not in self._builders:
                self._builders[name] = make_builder(name, self._vocabulary, self._limits, self._max_threads)
        return self._builders[name]


def check_first_mask(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """ValueError if no text satisfies the grammar."""
    first = torch.zeros(1, vocabulary.mask_words, dtype=torch.int32)
    matcher = grammar.matcher()
    if matcher.fill_next_token_bitmask(first, 0) not in (MaskStatus.OK, MaskStatus.COMPLETE):
        raise ValueError(matcher.fault or "no text of this vocabulary satisfies it")


def check_size(constraint: Constraint, limits: GrammarLimits) -> None:
    """ValueError if the text of a constraint exceeds `max_chars`, `max_schema_chars` or `max_nesting`."""
    kind, payload = constraint.kind, constraint.payload
    field, most = ("max_schema_chars", limits.max_schema_chars) if kind in SCHEMA_KINDS else ("max_chars", limits.max_chars)
    if len(payload) > most:
        raise ValueError(limit_exceeded(field, f"{len(payload)} characters", most))
    text = _grammar_of(payload) if kind == "ebnf" else payload
    if kind in _BRACKET_PATTERNS and (depth := _depth(kind, text)) > limits.max_nesting:
        raise ValueError(limit_exceeded("max_nesting", f"{depth} brackets open at once", limits.max_nesting))


def check_schemas(constraint: Constraint) -> None:
    """UnsupportedError for a schema with an error that `check_schema` finds: the same for all libraries."""
    if constraint.kind == "json_schema":
        check_schema(parse_json(constraint.payload), constraint.schema_options)
    elif constraint.kind == "structural_tag":
        for group in tag_groups(constraint.payload):
            for tag in group.tags:
                with naming_schema(group.name_of(tag)):
                    check_schema(tag.schema, constraint.schema_options)


def _grammar_of(payload: str) -> str:
    """The grammar in the payload of a constraint of kind ebnf."""
    parts = json.loads(payload)
    if not isinstance(parts, list) or [type(part) for part in parts] != [str, str]:
        raise ValueError(f"Constraint.payload of ebnf: got {clip_repr(payload)}, expected a payload that Constraint.ebnf creates")
    return str(parts[1])


def _depth(kind: str, text: str) -> int:
    depth = deepest = 0
    for token in _BRACKET_PATTERNS[kind].finditer(text):
        piece = token.group()
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(piece, 0)
        deepest = max(deepest, depth + (_depth("regex", piece[1:-1]) if token.lastgroup == "regex" else 0))
    return deepest


def is_final(error: Exception, name: str, kind: str) -> bool:
    """Whether no other library is tried after this error: a limit reached by one library holds for all, except those of the automaton. An
    unsupported part of a schema is the same for all, except for llguidance, which has further limits."""
    if isinstance(error, UnsupportedError):
        return kind in SCHEMA_KINDS and name != "llguidance"
    return isinstance(error, CompileAbortedError) and not (name == "automaton" and str(error).startswith("GrammarLimits."))


def _joined(reasons: dict[str, str]) -> str:
    """All reasons as one text. The automaton and xgrammar have the same checks, so a reason of both is reported once."""
    distinct = {name: reason for name, reason in reasons.items() if name != "automaton" or reason != reasons.get("xgrammar")}
    return "; ".join(f"{name}: {reason}" for name, reason in distinct.items())


def reason_of(error: Exception) -> str:
    """The message of an error, shortened: the libraries repeat the whole input."""
    reason = with_limit_name(str(error)) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[: MAX_REASON_CHARS // 2]} ... {reason[-MAX_REASON_CHARS // 2 :]}"


# Coverage is found by compiling, under the usual limits, in a worker process that ends with the call.

_BYTE_VOCABULARY = Vocabulary([*(bytes([code]) for code in range(256)), b""], stop_token_ids=[256])


@dataclass(frozen=True)
class Coverage:
    """Which parts of a constraint each library enforces; `unsupported` is empty for a library that enforces all of it."""

    backend: str | None  # the library that would be used; None if compiling the constraint raises an error
    unsupported: Mapping[str, tuple[Unsupported, ...]]  # by library
    reason: str = ""  # why `backend` is not the first library that enforces all of the constraint
    narrowed: tuple[Unsupported, ...] = ()  # parts of a schema that are enforced, but not all of whose texts are generated

    @property
    def enforced(self) -> bool:
        """Whether the whole constraint is enforced. Parts of an approximate constraint may not be."""
        return self.backend is not None and not self.unsupported[self.backend]

    @property
    def unenforced(self) -> tuple[Unsupported, ...]:
        if self.enforced:
            return ()
        parts = [{(part.where, part.keyword) for part in found} for found in self.unsupported.values()]
        common = set.intersection(*parts)
        return tuple(part for found in self.unsupported.values() for part in found if (part.where, part.keyword) in common)


def coverage(constraint: Constraint, limits: GrammarLimits | None = None) -> Coverage:
    """Which parts of a constraint each grammar library enforces, and which library would be used. Takes seconds: it starts a worker
    process, and compiles for at most twice `compile_seconds` per library."""
    limits, names = limits or GrammarLimits(), backends_for(constraint, "auto")
    try:
        check_size(constraint, limits)
    except ValueError as error:
        return Coverage(None, dict.fromkeys(names, (Unsupported("#", constraint.kind, str(error)),)))
    unsupported, backend, later, pending = dict[str, tuple[Unsupported, ...]](), None, dict[str, str](), list(names)
    exact = replace(constraint, approximate=False)
    with contextlib.closing(CompileWorker(_BYTE_VOCABULARY, limits, max_threads=1)) as worker:
        while pending:
            name = pending.pop(0)
            found, same_for_all, unfit = _unsupported(name, exact, limits, worker)
            unsupported[name] = found
            if unfit:
                later, pending = order_by_cost(pending, constraint.kind, unfit)
            if not found and backend is None:
                backend = name
            if same_for_all and backend is None:
                unsupported |= dict.fromkeys(names, found)
                break
        if backend is None and constraint.approximate:
            backend = next((name for name in names if not _unsupported(name, constraint, limits, worker)[0]), None)
    later = {name: why for name, why in later.items() if name != backend and not unsupported[name]}
    is_schema = backend is not None and constraint.kind == "json_schema"  # it compiled within the limits, so narrowed_parts returns in time
    narrowed = narrowed_parts(parse_json(constraint.payload), constraint.schema_options) if is_schema else ()
    return Coverage(backend, unsupported, "; ".join(f"{name}: {why}" for name, why in later.items()), narrowed)


def check_constraints(constraints: Iterable[Constraint]) -> None:
    """ValueError, as from a compile, for a constraint that fails with any vocabulary: it is compiled for a vocabulary of the 256 bytes."""
    limits = GrammarLimits()
    with contextlib.closing(CompileWorker(_BYTE_VOCABULARY, limits, max_threads=1)) as worker:
        for constraint in dict.fromkeys(constraints):
            Backends(_BYTE_VOCABULARY, "auto", limits, max_threads=1).build(constraint, worker)


def _unsupported(
    name: str, constraint: Constraint, limits: GrammarLimits, worker: CompileWorker
) -> tuple[tuple[Unsupported, ...], bool, UnfitError | None]:
    """The unsupported parts found in the time of one compile, by removing each from the schema and compiling the rest again; whether
    they are the same for every library; and why the rest does not fit in an automaton."""
    parts, kind, deadline, same_for_all = list[Unsupported](), constraint.kind, time.monotonic() + limits.compile_seconds, False
    backend_builder: Builder | None = None
    while not parts or (len(parts) < MAX_UNSUPPORTED_PARTS and time.monotonic() < deadline):
        try:
            backend_builder = backend_builder or make_builder(name, _BYTE_VOCABULARY, limits, max_threads=1)
            check_first_mask(backend_builder.build(constraint, worker), _BYTE_VOCABULARY)
        except Exception as error:  # a library's error is a property of the constraint
            part = error.unsupported if isinstance(error, UnsupportedError) else None
            parts.append(part or Unsupported("#", kind, reason_of(error)))
            same_for_all = same_for_all or ((part is not None or len(parts) == 1) and is_final(error, name, kind))
            rest = without_keyword(parse_json(constraint.payload), part) if part and kind == "json_schema" else None
            if rest is None:
                return tuple(parts), same_for_all, error if isinstance(error, UnfitError) else None
            constraint = replace(constraint, payload=json.dumps(rest, separators=(",", ":"), default=float))
        else:
            break
    return tuple(parts), same_for_all, None
