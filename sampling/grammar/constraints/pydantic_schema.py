"""JSON schemas of Python types whose texts pydantic accepts: pydantic's own, without the texts that it allows and then rejects.

A part that cannot be described is refused with its place. Validators of the user are not seen. Imported for the first type only, because
pydantic takes as long to load as all of stepgraph without torch.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from stepgraph.sampling.grammar.constraints.dialects import in_all_dialects
from stepgraph.sampling.grammar.schema.formats import FORMATS, OLDER
from stepgraph.sampling.grammar.schema.patterns import PatternError
from stepgraph.sampling.grammar.schema.reader import pointer

MAX_DIGITS = 28  # before and after the point of a Decimal, as in Python's default context
MAX_EXACT_DIGITS = 15  # of a Decimal whose digits are counted: pydantic reads numbers of JSON as floats
_REFUSED = "stepgraph: refused"  # the key of a reason in a generated schema
_TIMES, _BOUNDS = ("time", "timedelta"), ("gt", "ge", "lt", "le", "now_op")

_BYTE = FORMATS["ipv4"].rpartition("{3}")[2]
_URL_WORD, _URL_CHAR = r"[A-Za-z0-9._~\-]+", r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/\-]|%[0-9A-Fa-f]{2})"
MAX_URL = 2_083  # characters, in web browsers
_BASE64_ENDS = {"base64": r"+/", "base64url": r"\-_"}
# 24 bits are three characters of ASCII: their first bits are 0.
_BASE64_ASCII = "[A-Za-f][A-HQ-Xg-nw-z0-3][ABEFIJMNQRUVYZcdghklopstwx014589]"
_EMAIL = (
    r"^[A-Za-z0-9]{1,30}(?:[._+\-][A-Za-z0-9]{1,30}){0,1}@(?:[a-z0-9]{1,30}(?:-[a-z0-9]{1,30}){0,1}\.){1,3}"
    "(?!(?:arpa|invalid|local|localhost|onion|test)$)[a-z]{2,20}$"
)
_FORMATS: dict[str, Any] = {  # by the names that pydantic gives them
    "ipv4interface": {"pattern": rf"^{FORMATS['ipv4']}(?:/(?:[12]?[0-9]|3[0-2]))?$"},
    "ipv6interface": {"pattern": rf"^{FORMATS['ipv6']}(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?$"},
    # Without prefixes that divide a byte: the bits after a prefix must be 0.
    "ipv4network": {"pattern": rf"^(?:{_BYTE}\.0\.0\.0/8|(?:{_BYTE}\.){{2}}0\.0/16|(?:{_BYTE}\.){{3}}0/24|{FORMATS['ipv4']}(?:/32)?)$"},
    "ipv6network": {"pattern": rf"^{FORMATS['ipv6']}(?:/128)?$"},
}
_FORMATS |= {
    f"ipvany{kind}": {"anyOf": [_FORMATS.get(f"ipv{version}{kind}", {"format": f"ipv{version}"}) for version in (4, 6)]}
    for kind in ("network", "interface", "address")
}
_FUNCTIONS: dict[str, Any] = {  # validators of pydantic, with what they require, or why they are refused
    "EmailStr._validate": {"pattern": _EMAIL},
    "ByteSize._validate": {"anyOf": [{"type": "integer", "minimum": 0}]},
    **{
        f"PathType.validate_{kind}": "a path that depends on the files of the host, expected Path"
        for kind in ("file", "directory", "new", "socket")
    },
    **dict.fromkeys(("import_string", "NameEmail._validate", "PaymentCardNumber.validate"), "texts that no schema describes, expected str"),
}
_INT, _NUMBER = "^(?:0|-?[1-9][0-9]*)$", r"^-?(?:0|[1-9][0-9]{0,27})(?:\.[0-9]{1,28})?$"


def schema_of(adapter: pydantic.TypeAdapter[Any]) -> dict[str, Any]:
    """The JSON schema of a type; ValueError for a part that is refused."""
    found = adapter.json_schema(schema_generator=SchemaGenerator)
    _refuse_parts(found, "#")
    return found


def _refuse_parts(schema: Any, where: str) -> None:
    if isinstance(schema, dict) and _REFUSED in schema:
        raise ValueError(f"{where}: {schema[_REFUSED]}")
    for name, part in schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ():
        _refuse_parts(part, pointer(where, name))


def _refused(got: str) -> dict[str, str]:
    return {_REFUSED: f"got {got}"}


def _date_pattern(name: str, bound: Any) -> str:
    """The dates within a bound. The past and the future begin two days from now, for any time zone."""
    day, is_low = datetime.timedelta(1), bound == "future" if name == "now_op" else name in ("gt", "ge")
    if name == "now_op":
        name, bound = "gt" if is_low else "lt", datetime.date.today() + (day if is_low else -day)
    text = (bound + (day if name == "gt" else -day if name == "lt" else 0 * day)).isoformat()
    return f"^(?:{'|'.join([*_beyond(text, is_low), text])}.*)$"


def _beyond(text: str, is_low: bool) -> list[str]:
    """Patterns for texts that are larger or smaller, by their first digits."""
    digits = [(at, int(digit)) for at, digit in enumerate(text) if digit.isdigit() and digit != ("9" if is_low else "0")]
    return [f"{text[:at]}[{f'{digit + 1}-9' if is_low else f'0-{digit - 1}'}].*" for at, digit in digits]


def _datetime_patterns(name: str, bound: Any, naive: bool) -> list[str]:
    """The datetimes within a bound, to the second if the bound has microseconds. pydantic compares local times if the text or the bound
    has no offset; if both have one, those in UTC are allowed."""
    if name == "now_op":
        return [_date_pattern(name, bound)]
    in_utc, is_low = bound.tzinfo is not None and not naive, name in ("gt", "ge")
    bound = (bound.astimezone(datetime.timezone.utc) if in_utc else bound).replace(tzinfo=None)
    start = bound.replace(microsecond=0)
    is_whole = start == bound
    if is_low and not is_whole:
        start, name, is_whole = start + datetime.timedelta(seconds=1), "ge", True
    text = start.isoformat()
    rest = {"ge": ".*", "gt": r"\.0{0,5}[1-9].*"}.get(name, "(?:[Zz+-].*)?")
    cases = [*_beyond(text, is_low), *[text + rest] * (name != "lt" or not is_whole)]
    return [f"^(?:{'|'.join(cases)})$".replace("T", "[Tt]"), *["^.*[Zz]$"] * in_utc]


def _within(schema: Any, patterns: Callable[[str, Any], list[str]]) -> dict[str, Any]:
    """The patterns of the bounds of a schema."""
    parts = list[dict[str, str]]()
    for name, bound in ((name, schema[name]) for name in _BOUNDS if schema.get(name) is not None):
        try:
            parts += [{"pattern": each} for each in patterns(name, bound)]
        except OverflowError:
            return _refused(f"a {schema['type']} with {name}={bound}, expected one within the calendar")
    return {"allOf": parts} if parts else {}


def _url_pattern(schemes: Iterable[str] | None, is_short: bool) -> str:
    """URLs that have a host, or no host if they are files. is_short: with counts, and shorter than MAX_URL."""
    some, more, parts, user = ("{1,20}", "{0,250}", "{0,1}", "") if is_short else ("+", "*", "*", f"(?:{_URL_WORD}(?::{_URL_WORD})?@)?")
    name = f"[a-z0-9]{some}(?:-[a-z0-9]{some}){parts}"
    host = rf"(?:(?:{name}\.){'{0,3}' if is_short else '*'}[a-z](?:{name})?|{FORMATS['ipv4']})(?::[1-9][0-9]{{0,3}})?"
    rest = rf"(?:[/?](?:{_URL_CHAR}|\?){more})?(?:#{_URL_CHAR}{more})?"
    names = ["[a-eg-z][a-z0-9]{0,9}"] if schemes is None else [re.escape(scheme) for scheme in schemes if scheme != "file"]
    cases = [f"(?:{'|'.join(names)})://{user}{host}{rest}"] * bool(names)
    return f"^(?:{'|'.join([*cases, *[f'file:///{_URL_CHAR}{more}'] * ('file' in (schemes or ['file']))])})$"


def _function_name(schema: Any) -> str:
    function = schema.get("function", {})
    function = function.get("function") if isinstance(function, dict) else function
    function = function.func if isinstance(function, functools.partial) else function
    is_known = str(getattr(function, "__module__", "")).startswith("pydantic.")
    return getattr(function, "__qualname__", "") if is_known else ""


class SchemaGenerator(GenerateJsonSchema):
    def generate_inner(self, schema: Any) -> Any:
        found = super().generate_inner(schema)
        name = _function_name(schema)
        more = _FUNCTIONS.get(name, _FORMATS.get(found.get("format", ""), {}))
        if name in ("EncodedStr.decode_str", "EncodedBytes.decode"):
            more = self._base64(found, name == "EncodedStr.decode_str")
        elif name.endswith("_validator") and name.startswith(("greater", "less", "multiple", "max", "min")):
            is_length = "length" in name and "pattern" not in found and found.get("format", "password") == "password"
            more = {} if is_length else f"{name.removesuffix('_validator')} of a type whose values are not numbers, lists or plain texts"
        elif schema.get("custom_error_type") == "is_hashable" or schema["type"] == "is-subclass":
            more = "a type whose values are no JSON, expected another one"
        elif schema["type"] in _TIMES and (bounds := [name for name in _BOUNDS if schema.get(name) is not None]):
            more = f"a {schema['type']} with {' and '.join(bounds)}, expected one without bounds"
        elif "keys_schema" in schema:
            more = self._names(self.generate_inner(schema["keys_schema"]))
        elif isinstance(alias := schema.get("validation_alias"), list):
            paths = alias if isinstance(alias[0], list) else [alias]
            more = {} if any(len(path) == 1 for path in paths) else f"the path {paths[0]!r} as validation_alias, expected a name"
        if isinstance(more, str):
            return found | _refused(more)
        return {key: value for key, value in found.items() if key not in ("anyOf", "format") or "anyOf" not in more} | more

    def _base64(self, found: Any, is_text: bool) -> Any:
        ends = _BASE64_ENDS.get(found.get("format", ""))
        if ends is None:
            return "an encoding other than base64, expected Base64Bytes"
        char = f"[A-Za-z0-9{ends}]"
        if not is_text:
            return {"pattern": f"^(?:{char}{{4}})*(?:{char}[AQgw]==|{char}{{2}}[AEIMQUYcgkosw048]=)?$"}
        first, second, _ = _BASE64_ASCII.split("][")
        return {"pattern": f"^(?:{_BASE64_ASCII}{char})*(?:{first}][AQgw]==|{first}][{second}][AEIMQUYcgkosw048]=)?$"}

    def _resolved(self, found: Any) -> Any:
        """The schema that a reference leads to; empty if it is not generated yet, because it contains the reference."""
        while "$ref" in found:
            found = self.get_schema_from_definitions(found["$ref"]) or {}
        return found

    def _names(self, keys: Any) -> Any:
        """The names of the properties of a dict, by the schema of its keys."""
        keys = {key: value for key, value in self._resolved(keys).items() if key not in ("title", "description")}
        if values := keys.get("enum", [keys["const"]] if "const" in keys else []):
            texts = [value for value in values if isinstance(value, str)]
            return {"propertyNames": {"enum": texts}} if texts else "keys that are no texts, expected str"
        by_type = {"integer": {"pattern": _INT}, "number": {"pattern": _NUMBER}, "boolean": {"enum": ["true", "false"]}}
        if keys.get("type") == "string" or _REFUSED in keys or not keys:
            return {"propertyNames": keys} if keys else {}
        is_known = len(keys) == 1 and keys.get("type") in by_type
        return {"propertyNames": by_type[keys["type"]]} if is_known else "keys other than texts, or numbers without bounds, expected str"

    def decimal_schema(self, schema: Any) -> Any:
        found = super().decimal_schema(schema)["anyOf"][0]  # a number; the other, a text, has no bounds
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if digits is None:
            return found | self._digits(MAX_DIGITS, MAX_DIGITS if places is None else places)
        digits = min(digits, MAX_EXACT_DIGITS)
        cases = range(digits + 1) if places is None else [min(places, digits)]
        return found | {"anyOf": [self._digits(digits - count, count) for count in cases]}

    def _digits(self, whole: int, places: int) -> Any:
        bound = Decimal(1).scaleb(whole)
        return {"allOf": [{"multipleOf": Decimal(1).scaleb(-places), "exclusiveMinimum": -bound, "exclusiveMaximum": bound}]}

    def fraction_schema(self, schema: Any) -> Any:
        return super().fraction_schema(schema)["anyOf"][0] | self._digits(MAX_DIGITS, MAX_DIGITS)

    def float_schema(self, schema: Any) -> Any:
        finite = schema.get("allow_inf_nan", self._config.allow_inf_nan) is False
        return super().float_schema(schema) | (self._digits(MAX_DIGITS, MAX_DIGITS) if finite else {})

    def complex_schema(self, schema: Any) -> Any:
        return {"type": "number"}

    def str_schema(self, schema: Any) -> Any:
        found, pattern = super().str_schema(schema), schema.get("pattern")
        if isinstance(pattern, re.Pattern) and pattern.flags != re.UNICODE:
            return found | _refused(f"a pattern with {re.RegexFlag(pattern.flags)!s}, expected one without flags")
        if pattern is not None:
            is_rust = isinstance(pattern, str) and getattr(self._config, "regex_engine", "") != "python-re"
            try:
                found["pattern"] = in_all_dialects(found["pattern"], is_rust)
            except PatternError as error:
                return found | _refused(f"a pattern that {error}")
        strips = schema.get("strip_whitespace", self._config.str_strip_whitespace)
        if strips and not found.keys().isdisjoint(("pattern", "minLength")):
            found["not"] = {"pattern": r"^[\s\x1c-\x1f\x85]|[\s\x1c-\x1f\x85]$"}  # would be removed before the check
        return found

    def bytes_schema(self, schema: Any) -> Any:
        found = super().bytes_schema(schema)
        encoding, lengths = getattr(self._config, "val_json_bytes", "utf8"), {"minLength", "maxLength"} & found.keys()
        if encoding != "utf8" and lengths:
            return found | _refused(f"a length of bytes in {encoding}, expected none")
        patterns = {"hex": "^(?:[0-9a-fA-F]{2})*$", "base64": self._base64({"format": "base64url"}, False)["pattern"]}
        pattern = patterns.get(encoding, "^[\\0-\\x7f]*$" if lengths else "")  # lengths count bytes
        return found | ({"pattern": pattern} if pattern else {})

    def date_schema(self, schema: Any) -> Any:
        return super().date_schema(schema) | _within(schema, lambda name, bound: [_date_pattern(name, bound)])

    def datetime_schema(self, schema: Any) -> Any:
        if isinstance(schema.get("tz_constraint"), int):
            return _refused("a datetime with one offset, expected one with any offset")
        naive = schema.get("tz_constraint") == "naive"
        found = super().datetime_schema(schema) | {"not": {"pattern": ":60"}}  # leap seconds
        if naive:
            found = {"type": "string", "pattern": rf"^{FORMATS['date']}T{OLDER['time']}(?:\.[0-9]+)?$"}
        return found | _within(schema, lambda name, bound: _datetime_patterns(name, bound, naive))

    def time_schema(self, schema: Any) -> Any:
        return super().time_schema(schema) | {"not": {"pattern": ":60"}}

    def timedelta_schema(self, schema: Any) -> Any:
        return {"type": "string", "pattern": f"^{FORMATS['duration']}$".replace(r"\d+", r"\d{1,5}")}  # more are too many days

    def literal_schema(self, schema: Any) -> Any:
        if other := [value for value in schema["expected"] if not isinstance(value, (str, int, type(None)))]:
            return _refused(f"the Literal {other[0]!r}, expected texts, numbers, None, or members of an enum of str or int")
        return super().literal_schema(schema)

    def enum_schema(self, schema: Any) -> Any:
        if other := [one for one in schema["members"] if not isinstance(one.value, (str, int, float, type(None)))]:
            return _refused(f"the member {other[0]} with a value of {type(other[0].value).__name__}, expected texts and numbers")
        return super().enum_schema(schema)

    def set_schema(self, schema: Any) -> Any:
        """pydantic drops repeated items, so they are allowed where they are too many to be listed, and their number does not matter."""
        found = super().set_schema(schema)
        items = self._resolved(found["items"])
        is_open = items.get("type") in ("string", "integer", "number") and items.keys().isdisjoint(("enum", "const"))
        return {key: value for key, value in found.items() if not (is_open and found.get("minItems", 0) < 2 and key == "uniqueItems")}

    frozenset_schema = set_schema

    def json_schema(self, schema: Any) -> Any:
        return _refused("Json, a text that holds JSON, expected the type itself")

    def url_schema(self, schema: Any) -> Any:
        found = super().url_schema(schema)
        is_short = found.get("maxLength") == MAX_URL
        kept = {key: value for key, value in found.items() if key != "format" and not (is_short and key == "maxLength")}
        return kept | {"pattern": _url_pattern(schema.get("allowed_schemes"), is_short)}

    multi_host_url_schema = url_schema

    def uuid_schema(self, schema: Any) -> Any:
        version, hexes = schema.get("version"), "[0-9A-Fa-f]"
        pattern = f"^{hexes}{{8}}-{hexes}{{4}}-{version}{hexes}{{3}}-[89ABab]{hexes}{{3}}-{hexes}{{12}}$"
        return super().uuid_schema(schema) | ({"pattern": pattern} if version else {})
