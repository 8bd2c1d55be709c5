"""Texts of the formats, made from their regular expressions and mutated, and independent validators for them."""

from __future__ import annotations

import datetime
import functools
import ipaddress
import re
import unicodedata
import uuid
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import idna
import isoduration
import jsonpointer
import jsonschema
import rfc3987_syntax
from fqdn import FQDN
from rfc3339_validator import validate_rfc3339
from rfc3986_validator import validate_rfc3986

from stepgraph.sampling.grammar.schema.formats import FEW_REGEXES, FORMATS, OLDER

try:
    import re._parser as parser  # type: ignore[import-not-found]
except ImportError:  # Python 3.10
    import sre_parse as parser

FORMAT_TEXTS = 10_000  # of each format, in long runs
EXTRA_CHARS = "\n\t\r\0 \x7f\x85\u00e9\u0660\u09e8\u212a\uff0e\u3002\ue000\ufdd0\U0001f600\U000e0001\U000f0000\U0010fffd"


@functools.cache
def python_regex(pattern: str) -> re.Pattern[str]:
    """The pattern as Python reads it: `\\d` is ASCII in JavaScript, and code points have eight digits here."""
    return re.compile(re.sub(r"\\u\{([0-9a-f]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", pattern), re.ASCII)


# The last second of a day in UTC, with any offset.
LEAP_SECONDS = "|".join(
    rf"{hour:02}:{minute:02}:60(?:\.\d+)?(?:\+{(hour + (minute == 59)) % 24:02}:{(minute + 1) % 60:02}|-{23 - hour:02}:{59 - minute:02})"
    for hour in range(24)
    for minute in range(60)
)
ANY_TIME = f"(?:({FORMATS['time']})|({LEAP_SECONDS}))"  # two groups, so that half of the texts are leap seconds
AUTOMATON_REGEXES = {"time": ANY_TIME, "date-time": f"{FORMATS['date']}[Tt]{ANY_TIME}"}  # accepted by automata, beyond `FORMATS`
PATTERNS = FORMATS | AUTOMATON_REGEXES | {f"older {name}": pattern for name, pattern in OLDER.items()}
PATTERNS |= {f"few {name}": FORMATS[name] for name in AUTOMATON_REGEXES} | {"few regexes": FEW_REGEXES}


def accepts(name: str, text: str) -> bool:
    return python_regex(PATTERNS[name]).fullmatch(text) is not None


def texts(name: str, count: int, seed: int) -> Iterator[str]:
    """Valid texts and, half of them, mutated ones."""
    random, tree = Random(seed), parser.parse(python_regex(PATTERNS[name]).pattern, re.ASCII)
    for index in range(count):
        text = _sampled(tree, random)
        yield _mutated(text, random) if index % 2 else text


def _mutated(text: str, random: Random) -> str:
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = random.randint(0, len(text))
        near = random.choice(text) if text and random.random() < 0.7 else random.choice(EXTRA_CHARS + "".join(map(chr, range(33, 127))))
        if near.isdigit() and near.isascii() and random.random() < 0.5:
            near = random.choice("0123456789")
        text = random.choice((text[:at] + text[at + 1 :], text[:at] + near + text[at:], text[:at] + near + text[at + 1 :]))
    return text


def _sampled(tree: Any, random: Random) -> str:
    return "".join(_piece(str(kind), value, random) for kind, value in tree)


def _piece(kind: str, value: Any, random: Random) -> str:
    match kind:
        case "LITERAL":
            return chr(value)
        case "IN":
            return _member(value, random)
        case "BRANCH":
            return _sampled(random.choice(value[1]), random)
        case "ASSERT_NOT":
            return ""
        case "SUBPATTERN":
            return _sampled(value[-1], random)
        case "MAX_REPEAT" | "MIN_REPEAT":
            low, high, body = value
            is_char = str(body[0][0]) in ("IN", "LITERAL")
            extra = random.choice((0, 0, 1, 1, 2, 3, 6, 70) if is_char and random.random() < 0.3 else (0, 0, 1, 2))
            return "".join(_sampled(body, random) for _ in range(min(low + extra, high)))
    raise AssertionError(kind)


def _member(items: list[tuple[Any, Any]], random: Random) -> str:
    if str(items[0][0]) == "NEGATE":
        excluded = re.compile("[" + "".join(f"\\U{code:08x}" for kind, code in items[1:] if str(kind) == "LITERAL") + "]")
        return next(char for char in iter(lambda: random.choice(EXTRA_CHARS + "abc/~0"), None) if not excluded.match(char))
    kind, value = random.choice(items)
    if str(kind) == "CATEGORY":
        return random.choice("0123456789")
    return chr(value if str(kind) == "LITERAL" else random.randint(*value))


def _raises(call: Callable[[str], object], error: type[Exception]) -> Callable[[str], bool]:
    def valid(text: str) -> bool:
        try:
            call(text)
        except error:
            return False
        return True

    return valid


def _date(text: str) -> bool:
    return (
        len(text) == 10
        and text[4] == text[7] == "-"
        and text.replace("-", "").isascii()
        and _raises(datetime.date.fromisoformat, ValueError)(text)
    )


def _time(text: str) -> bool:
    found = re.fullmatch(r"([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})", text)
    if not found:
        return False
    hour, minute, second = (int(found[group]) for group in (1, 2, 3))
    ahead, offset = 0, found[5]
    if offset not in "Zz":
        if int(offset[1:3]) > 23 or int(offset[4:]) > 59:
            return False
        ahead = (int(offset[1:3]) * 60 + int(offset[4:])) * (1 if offset[0] == "+" else -1)
    in_range = hour <= 23 and minute <= 59 and second <= 60
    return in_range and (second < 60 or (hour * 60 + minute - ahead) % 1440 == 1439)


def _date_time(text: str) -> bool:
    return _date(text[:10]) and text[10:11] in ("T", "t") and _time(text[11:])


def _duration(text: str) -> bool:
    """Contiguous units in descending order. isoduration also accepts gaps, signs, fractions and weeks beside other units."""

    def units(part: str, order: str) -> bool:
        found = "".join(re.findall("[A-Z]", part))
        return re.fullmatch("([0-9]+[A-Z])+", part) is not None and found in order

    if not text.startswith("P"):
        return False
    date, has_time, time = text[1:].partition("T")
    if not (not has_time or units(time, "HMS")) or not (date or has_time):
        return False
    return not date or units(date, "YMD") or (not has_time and units(date, "W"))


def _email(text: str, more: bool = False) -> bool:
    """A mailbox of RFC 5321, read from its end: the domain contains no "@" outside a literal."""
    local, at, domain = text.rpartition("@")
    others = (more and {char for char in local if ord(char) >= 0x80}) or set()
    if not at:
        return False
    if local[:1] == '"':
        if len(local) < 2 or local[-1] != '"':
            return False
        inner, index = local[1:-1], 0
        while index < len(inner):
            if inner[index] == "\\":
                index += 1
                if index == len(inner) or not " " <= inner[index] <= "~":
                    return False
            elif not (" " <= inner[index] <= "~" or inner[index] in others) or inner[index] == '"':
                return False
            index += 1
    elif not all(atom and set(atom) <= {*_LETTERS, *"!#$%&'*+-/=?^_`{|}~", *others} for atom in local.split(".")):
        return False
    if domain[:1] == "[" and domain[-1:] == "]":
        address = domain[1:-1]
        return _ipv6(address[5:]) if address[:5].lower() == "ipv6:" else _ipv4(address)
    return all(_is_label(label) or (more and _is_u_label(label)) for label in domain.split("."))


def _is_label(text: str) -> bool:
    return text != "" and set(text) <= {*_LETTERS, "-"} and text[0] != "-" and text[-1] != "-"


def _is_u_label(text: str) -> bool:
    return not text.isascii() and _raises(idna.encode, idna.IDNAError)(text) and not re.search("[.\u3002\uff0e\uff61]", text)


def _hostname(text: str) -> bool:
    return bool(text) and not text.endswith(".") and text.isascii() and "\n" not in text and FQDN(text, min_labels=1).is_valid


_ipv4 = _raises(ipaddress.IPv4Address, ValueError)


def _ipv6(text: str) -> bool:
    return "%" not in text and _raises(ipaddress.IPv6Address, ValueError)(text)


# RFC 3986, appendix B: scheme, authority, path, query and fragment.
_COMPONENTS = re.compile(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")


def _reference(text: str, beyond_ascii: bool, is_absolute: bool) -> bool:
    """Component by component. rfc3987-syntax rejects "[::1]" and characters beyond 16 bits, rfc3986-validator accepts "[::00.0.0.0]"."""
    found = _COMPONENTS.fullmatch(text)
    assert found
    scheme, authority, path, query, fragment = found.groups()

    def made_of(part: str | None, others: str, private: bool = False) -> bool:
        rest = set(re.sub("%[0-9A-Fa-f]{2}", "", part or "")) - _LETTERS - set("-._~!$&'()*+,;=" + others)
        return all(ord(char) >= 0x80 and beyond_ascii and (_is_ucschar(char) or (private and _is_private(char))) for char in rest)

    if scheme is None and (is_absolute or (authority is None and ":" in path.partition("/")[0])):
        return False
    if scheme is not None and (scheme[0] not in _LETTERS or scheme[0].isdigit() or set(scheme) - _LETTERS - set("+-.")):
        return False
    if authority is not None:
        user, _, host = authority.rpartition("@")
        port = ""
        if host.startswith("["):
            host, closed, port = host[1:].partition("]")
            version, dot, rest = host.partition(".")
            is_future = (
                re.fullmatch("[vV][0-9A-Fa-f]+", version) and dot and rest and "%" not in rest and rest.isascii() and made_of(rest, ":")
            )
            if not closed or (port and port[0] != ":") or not (is_future or _ipv6(host)):
                return False
            port = port[1:]
        else:
            host, _, port = host.partition(":")
            if not made_of(host, ""):
                return False
        if not made_of(user, ":") or set(port) - set("0123456789"):
            return False
    return made_of(path, ":@/") and made_of(query, ":@/?", private=True) and made_of(fragment, ":@/?")


def _is_private(char: str) -> bool:
    return unicodedata.category(char) == "Co"


def _is_ucschar(char: str) -> bool:
    return not (_is_no_literal(char) or _is_private(char) or unicodedata.category(char) == "Cs")


def _uuid(text: str) -> bool:
    """`int`, which the library calls, also takes "_", "+" and "0x"."""
    is_hex = set(text) <= set("0123456789abcdefABCDEF-") and all(text[at : at + 1] == "-" for at in (8, 13, 18, 23))
    return is_hex and len(text) == 36 and _raises(uuid.UUID, ValueError)(text)


_pointer = _raises(jsonpointer.JsonPointer, jsonpointer.JsonPointerException)


def _relative_pointer(text: str) -> bool:
    digits = len(text) - len(text.lstrip("0123456789"))
    rest = text[digits:]
    return digits > 0 and (digits == 1 or text[0] != "0") and (rest == "#" or _pointer(rest))


def _template(text: str) -> bool:
    """RFC 6570, piece by piece. The package uri-template accepts any literal, and rejects "{a:1000}" and "{%41a}"."""
    for piece in re.split(r"(\{[^{}]*\})", text):
        if piece.startswith("{") and piece.endswith("}"):
            names = piece[1:-1].removeprefix(piece[1] if piece[1] in "+#./;?&" else "").split(",")
            if not all(map(_variable, names)):
                return False
        elif re.search("%(?![0-9A-Fa-f]{2})", piece) or any(map(_is_no_literal, piece)):
            return False
    return True


def _variable(text: str) -> bool:
    name, colon, count = text.removesuffix("*").partition(":")
    if colon and (text.endswith("*") or not (count.isascii() and count.isdigit() and count[0] != "0" and len(count) < 5)):
        return False
    return all(
        part and re.fullmatch("[A-Za-z0-9_]*", re.sub("%[0-9A-Fa-f]{2}", "", part), re.ASCII) is not None for part in name.split(".")
    )


def _is_no_literal(char: str) -> bool:
    code = ord(char)
    if code < 0x80:
        return not "!" <= char <= "~" or char in '"<>\\^`{|}'
    return (
        code < 0xA0
        or 0xD800 <= code <= 0xDFFF
        or 0xFDD0 <= code <= 0xFDEF
        or 0xFFF0 <= code <= 0xFFFF
        or code & 0xFFFE == 0xFFFE
        or 0xE0000 <= code < 0xE1000
    )


def _older_time(text: str) -> bool:
    return len(text) == 8 and text[2::3] == "::" and _raises(datetime.time.fromisoformat, ValueError)(text)


VALID: dict[str, Callable[[str], bool]] = {
    "date": _date,
    "time": _time,
    "date-time": _date_time,
    "duration": _duration,
    "email": _email,
    "idn-email": lambda text: _email(text, more=True),
    "hostname": _hostname,
    "older hostname": _hostname,
    "older time": _older_time,
    "ipv4": _ipv4,
    "ipv6": _ipv6,
    "uri": lambda text: _reference(text, False, True),
    "uri-reference": lambda text: _reference(text, False, False),
    "iri": lambda text: _reference(text, True, True),
    "iri-reference": lambda text: _reference(text, True, False),
    "uuid": _uuid,
    "json-pointer": _pointer,
    "relative-json-pointer": _relative_pointer,
    "regex": _raises(re.compile, re.error),
    "uri-template": _template,
}


def _conforms(name: str, value: object) -> bool:
    """By the validator above, and by the one that jsonschema has for the newest draft, which refuses all leap seconds."""
    if not isinstance(value, str):
        return True
    return VALID[name](value) and (":60" in value or jsonschema.Draft202012Validator.FORMAT_CHECKER.conforms(value, name))


CHECKER = jsonschema.FormatChecker(())
for name in VALID:
    CHECKER.checks(name)(functools.partial(_conforms, name))

# Valid texts that a format of `NARROWED` may reject.
NARROWED_TEXTS: dict[str, Callable[[str], bool]] = {
    "idn-email": lambda text: not text.rpartition("@")[2].isascii(),
    "hostname": lambda text: any(label[:4].lower() == "xn--" for label in text.split(".")),
    "regex": lambda text: True,
}
# Validators that accept more than the specification: only what they reject counts.
LENIENT: dict[str, Callable[[str], bool]] = {
    "duration": _raises(isoduration.parse_duration, isoduration.DurationParsingException),
    # The library rejects "[V1.a]".
    "uri": lambda text: "[V" in text or bool(validate_rfc3986(text)),
    "uri-reference": lambda text: "[V" in text or bool(validate_rfc3986(text, "URI_reference")),
}
# Validators that reject more than the specification: only what they accept counts.
STRICT: dict[str, Callable[[str], bool]] = {
    "iri": lambda text: bool(rfc3987_syntax.is_valid_syntax("iri", text)),
    "iri-reference": lambda text: bool(rfc3987_syntax.is_valid_syntax("iri_reference", text)),
    "date-time": lambda text: validate_rfc3339(text.upper()) and "\n" not in text,
}


def compare_format(name: str, count: int, seed: int) -> dict[str, int]:
    """Compare a format with its validators; the numbers of accepted texts, rejected texts, and valid texts that are rejected."""
    counts = {"accepted": 0, "rejected": 0, "narrowed": 0}
    narrowed, lenient = NARROWED_TEXTS.get(name, lambda text: False), LENIENT.get(name, lambda text: True)
    strict = STRICT.get(name, lambda text: False)
    for text in texts(name, count, seed):
        found, valid = accepts(name, text), VALID[name](text)
        assert valid or not found, f"{name}: accepts {text[:200]!r}"
        assert found or not valid or narrowed(text), f"{name}: rejects {text[:200]!r}"
        assert lenient(text) if found else not strict(text), f"{name}: {'accepts' if found else 'rejects'} {text[:200]!r}"
        counts["accepted" if found else "rejected"] += 1
        counts["narrowed"] += valid and not found
    return counts
