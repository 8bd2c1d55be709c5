"""The C declarations of grammars and their host link for ctypes, read from the headers: enum constants, structs and functions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from ctypes import CFUNCTYPE, Structure, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint8, c_uint32, c_void_p, sizeof
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent / "grammar"
HEADERS = ("automaton/c/image.h", "automaton/c/compile.h", "link/c/forced.h", "link/c/marker.h", "link/c/host_link.h")
TYPES: dict[str, Any] = {
    **{"char": c_char, "uint8_t": c_uint8, "int": c_int, "atomic_int": c_int, "int32_t": c_int32, "uint32_t": c_uint32},
    **{"int64_t": c_int64, "double": c_double, "void": None},
}


def _sum(text: str, known: dict[str, int]) -> int:
    return sum(known[term] if term in known else int(term) for term in text.split(" + "))


def _constants(text: str) -> dict[str, int]:
    values_by_name: dict[str, int] = {}
    for names in re.findall(r"enum \{ (.*?) \}", text):
        value = -1
        for name, _, expression in (entry.partition(" = ") for entry in names.split(", ")):
            value = values_by_name[name] = _sum(expression, values_by_name) if expression else value + 1
    return values_by_name


def _fields(body: str) -> Iterator[tuple[str, Any]]:
    """Name and type of each field. All pointers have type c_void_p."""
    for declaration in filter(str.strip, body.split(";")):
        if function := re.search(r"\(\*(\w+)\)", declaration):
            yield function[1], c_void_p
            continue
        kind, names = re.findall(r"^\s*(?:const )?(\w+) (.*)", declaration)[0]
        for star, name, size in re.findall(r"(\*?)(\w+)(?:\[(.*?)\])?", names):
            value = c_void_p if star else TYPES[kind]
            yield name, value * _sum(size, vars(constants)) if size else value


def _structs(text: str) -> Iterator[tuple[str, Any]]:
    for first, body, last in re.findall(r"struct (\w+ )?\{(.*?)^\} ?(\w*);", text, flags=re.DOTALL | re.MULTILINE):
        name = first.strip() or last
        TYPES[name] = type(name, (Structure,), {"_fields_": tuple(_fields(body))})
        yield name, TYPES[name]


def _arguments(text: str) -> tuple[Any, ...]:
    return tuple(c_void_p if "*" in one else TYPES[one.split()[0]] for one in text.split(","))


def _functions(text: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    for result, name, arguments in re.findall(r"^STEPGRAPH_API ([\w ]+?\**)(\w+)\((.*?)\);", text, flags=re.DOTALL | re.MULTILINE):
        kind = c_char_p if result == "const char *" else c_void_p if "*" in result else TYPES[result.strip()]
        yield name, kind, _arguments(arguments)


_text = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in HEADERS)
_text = re.sub(r"/\*.*?\*/|^#[^\n]*", "", _text, flags=re.DOTALL | re.MULTILINE)  # without comments and preprocessor lines
constants = SimpleNamespace(**_constants(_text))
structs = SimpleNamespace(**dict(_structs(_text)))
LINK_LAYOUT = (constants.LAYOUT_VERSION, *map(sizeof, vars(structs).values()))


def function_types(struct: str) -> dict[str, Any]:
    """The types of the function pointers of a struct, by field."""
    body = _text[_text.index(f"struct {struct} {{") :].partition("\n}")[0]
    found = re.findall(r"(\w+) \(\*(\w+)\)\((.*?)\);", body)
    return {name: CFUNCTYPE(TYPES[result], *_arguments(arguments)) for result, name, arguments in found}


def declare(library: ctypes.CDLL) -> None:
    """Set the types of the functions. AttributeError if the library lacks one."""
    for name, result, arguments in _functions(_text):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
