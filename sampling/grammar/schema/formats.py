"""The formats of JSON Schema as regular expressions over the characters of the value, for `fullmatch`.

They are written in the common part of the notations of JavaScript and Python. `FORMATS` never accepts a text that its specification
forbids. If a format accepts fewer texts than its specification, `NARROWED` describes the difference, and `AT_MOST` accepts all texts that
the specification allows, and others. It is used for the complement of the format.
"""

from __future__ import annotations

import itertools

# Dates and times: RFC 3339. Year 0000 is left out: the calendar does not have it, and most libraries reject it.
_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
_MULTIPLE_OF_4 = r"(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:\d{{2}}{_MULTIPLE_OF_4}|{_MULTIPLE_OF_4}00)"
_DAY_OF_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"  # not 29 February
)
_DATE = rf"(?:{_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
# A leap second with any offset takes a state for each minute of the day in eight positions. Only automata have all, with a stack.
_TIME = rf"(?:{_HOUR_MINUTE}:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-]{_HOUR_MINUTE})|23:59:60(?:\.\d+)?(?:[Zz]|[+-]00:00))"

# Durations: RFC 3339, appendix A.
_TIME_UNITS = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DATE_UNITS = r"(?:\d+D|\d+M(?:\d+D)?|\d+Y(?:\d+M(?:\d+D)?)?)"
_DURATION = rf"P(?:\d+W|{_TIME_UNITS}|{_DATE_UNITS}(?:{_TIME_UNITS})?)"

# Addresses: dotted decimals of RFC 2673, and RFC 4291 in the grammar of RFC 3986.
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_LAST_GROUPS = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6() -> str:
    def after(groups: int) -> str:  # the groups after "::"
        return f"(?:{_GROUP}:){{{groups - 2}}}{_LAST_GROUPS}" if groups > 1 else _GROUP * groups

    forms = [f"(?:{_GROUP}:){{6}}{_LAST_GROUPS}"]
    for groups in range(7, -1, -1):
        before = 7 - groups
        forms.append((f"(?:(?:{_GROUP}:){{0,{before - 1}}}{_GROUP})?" if before else "") + "::" + after(groups))
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()

# Host names: RFC 1123, without labels that begin with "xn--", which would have to be valid Punycode.
_ALPHANUMERIC, _OR_HYPHEN = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(longest: int) -> str:
    def inner(used: int) -> str:
        return f"{_OR_HYPHEN}{{0,{longest - 1 - used}}}{_ALPHANUMERIC}"

    return (
        f"(?:[A-WYZa-wyz0-9](?:{inner(1)})?"
        f"|[Xx](?:{_ALPHANUMERIC}|[A-MO-Za-mo-z0-9-]{inner(2)}|[Nn](?:{_ALPHANUMERIC}(?:{inner(3)})?|-{_ALPHANUMERIC}(?:{inner(4)})?))?)"
    )


def few_hostnames(longest: int) -> str:
    """Some host names of at most `longest` characters, without a state for each pair of a length of the name and of a label."""
    shapes = [(min(63, (longest + 1) // labels - 1), labels) for labels in (4, 11, 42)]
    some = [rf"{_label(size)}(?:\.{_label(size)}){{0,{labels - 1}}}" for size, labels in shapes if size >= 5]
    return "|".join([f"{_ALPHANUMERIC}{{1,{min(63, longest)}}}", *some])


_LONG_LABEL = f"{_ALPHANUMERIC}(?:{_OR_HYPHEN}{{0,61}}{_ALPHANUMERIC})?"
_HOSTNAME_7 = rf"(?!.{{254}}){_LONG_LABEL}(?:\.{_LONG_LABEL})*"

# Mailboxes: RFC 5321, and RFC 6531 for those that are not ASCII.
_NON_ASCII = r"\u{80}-\u{d7ff}\u{e000}-\u{10ffff}"
_LABEL = f"{_ALPHANUMERIC}(?:{_OR_HYPHEN}*{_ALPHANUMERIC})?"
# Letters of which any sequence is a label of IDNA, in normal form and from left to right: at most 57 characters in Punycode.
_U_LETTERS = r"\u{e0}-\u{f6}\u{f8}-\u{ff}\u{3b1}-\u{3c9}\u{430}-\u{45f}\u{3041}-\u{3096}\u{30a1}-\u{30fa}\u{4e00}-\u{9fa5}\u{ac00}-\u{d7a3}"
_U_LABEL = f"[a-z0-9]{{0,5}}[{_U_LETTERS}][a-z0-9{_U_LETTERS}]{{0,6}}"


def _mailbox(more: str, label: str) -> str:
    atom = rf"[A-Za-z0-9!#$%&'*+\-/=?^_`{{|}}~{more}]+"
    quoted = rf'"(?:[ !#-\[\]-~{more}]|\\[ -~])*"'
    literal = rf"\[(?:{_IPV4}|[Ii][Pp][Vv]6:{_IPV6})\]"
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{label}(?:\.{label})*|{literal})"


# RFC 3986 and RFC 3987.
_UCSCHAR = r"\u{a0}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}" + "".join(
    rf"\u{{{plane:x}{'1000' if plane == 0xE else '0000'}}}-\u{{{plane:x}fffd}}" for plane in range(1, 0xF)
)
_IPRIVATE = r"\u{e000}-\u{f8ff}\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"
_SUB_DELIMS = "!$&'()*+,;="


def _reference(more: str, private: str, absolute_only: bool) -> str:
    """A URI, or a reference. `more`: characters beyond ASCII; `private`: characters that only a query may contain."""

    def chars(others: str) -> str:
        return rf"(?:[A-Za-z0-9\-._~{_SUB_DELIMS}{others}{more}]|%{_HEX}{{2}})"

    path_char = chars(":@")
    address = rf"\[(?:{_IPV6}|[Vv]{_HEX}+\.[A-Za-z0-9\-._~{_SUB_DELIMS}:]+)\]"
    authority = rf"//(?:{chars(':')}*@)?(?:{address}|{chars('')}*)(?::\d*)?(?:/{path_char}*)*"
    segments = f"(?:/{path_char}*)*"
    absolute_path = f"/(?:{path_char}+{segments})?"
    query = rf"\?{chars(':@/?' + private)}*"
    rest = rf"(?:{query})?(?:#{chars(':@/?')}*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:{authority}|{absolute_path}|{path_char}+{segments})?"
    if absolute_only:
        return absolute + rest
    return f"(?:{absolute}|{authority}|{absolute_path}|{chars('@')}+{segments})?{rest}"


# RFC 6570, levels 1 to 4, without the operators that it reserves for extensions.
_VARIABLE_CHAR = f"(?:[A-Za-z0-9_]|%{_HEX}{{2}})"
_VARIABLE = rf"{_VARIABLE_CHAR}(?:\.?{_VARIABLE_CHAR})*(?::[1-9]\d{{0,3}}|\*)?"
_URI_TEMPLATE = rf"(?:[!#$&-;=?-\[\]_a-z~{_UCSCHAR}{_IPRIVATE}]|%{_HEX}{{2}}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"

# RFC 6901.
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"


# Regular expressions in the common part of JavaScript (with the flag "u") and Python.
_ESCAPE = rf"\\(?:[dDwWsSfnrtv^$\\.*+?()\[\]{{}}|/]|x{_HEX}{{2}}|u{_HEX}{{4}})"
_LITERAL = rf"[^\^$\\.*+?()\[\]{{}}|]|\.|{_ESCAPE}"


def _members(ranges: str) -> str:
    return rf"\[\^?(?:-|-?(?:[&~|]?(?:[^\\\[\]\-\^&~|]|\\[\-b]|{_ESCAPE}|{ranges})\^*)+[&~|]?-?)\]"


def _ranges() -> str:
    """Ascending ranges: from each character of ASCII; from the first characters of alphabets; and between codes that, after zeros, have
    ascending digits, or the same digit, after which the first code has only zeros."""
    found = [rf"\u{{{code:x}}}-[\u{{{code:x}}}-,.-Z_-~]" for code in range(32, 45) if chr(code) != "&"]
    found += [rf"\u{{{code:x}}}-[\u{{{code:x}}}-Z_-~]" for code in range(46, 91)]
    found += [rf"{char}-[{char}-~]" for char in "_abcdefghijklmnopqrstuvwxyz"]
    found += [rf"{char}-[{char}-\u{{d7ff}}\u{{e000}}-\u{{10ffff}}]" for char in "\xa0ÀßàĀΑαЀАаאءぁァ一가"]
    for kind, size, surrogate in (("x", 2, ""), ("u", 4, "dD")):
        for zeros in range(size):
            digits = [f"{digit:x}{digit:X}" for digit in range(16) if zeros or f"{digit:x}{digit:X}" != surrogate]
            start, rest = rf"\\{kind}{'0' * zeros}", size - zeros - 1
            for index, digit in enumerate(digits):
                found.append(rf"{start}[{digit}]{'0' * rest}-{start}[{digit}]{_HEX}{{{rest}}}")
                found += [rf"{start}[{digit}]{_HEX}{{{rest}}}-{start}[{''.join(digits[index + 1 :])}]{_HEX}{{{rest}}}"] * (digit != "fF")
    return "|".join(found)


def _counts() -> str:
    """Counts below 10,000, and pairs that ascend: in the number of digits, in the first digit, or from zeros after it."""
    found = [r"(?:0|[1-9]\d{0,3}),?|0,(?:0|[1-9]\d{0,3})", r"[1-9],[1-9]\d{1,3}|[1-9]\d,[1-9]\d{2,3}|[1-9]\d{2},[1-9]\d{3}"]
    for first, size in itertools.product(range(1, 10), range(4)):
        found += [rf"{first}{'0' * size},{first}\d{{{size}}}", *[rf"{first}\d{{{size}}},[{first + 1}-9]\d{{{size}}}"] * (first < 9)]
    found += [f"{ten}{one},{ten}[{one}-9]" for ten, one in itertools.product(range(1, 10), repeat=2)]
    return "|".join(found)


_FEW_RANGES = "a-[a-z]|[a-z]-z|A-[A-Z]|[A-Z]-Z|0-[0-9]|[0-9]-9"
_FEW_COUNTS = r"(?:0|[1-9]\d{0,2}),?|[01],[1-9]\d{0,2}"
_ATOM, _FEWER_ATOMS = (f"{_LITERAL}|{_members(ranges)}" for ranges in (_ranges(), _FEW_RANGES))
_REPEAT, _FEWER_REPEATS = (rf"(?:[*+?]|\{{(?:{counts})\}})\??" for counts in (_counts(), _FEW_COUNTS))
_LOOK_BEHIND = rf"(?:{_ATOM})*"  # its texts have one length


def _regex(atom: str, repeat: str, depth: int, look_behind: str = "") -> str:
    """A regular expression with groups nested up to a depth and, with `look_behind`, look-around."""
    inside = _regex(atom, repeat, depth - 1, look_behind) if depth else ""
    look = rf"|\(\?(?:[=!]{inside}|<[=!]{look_behind})\)" if depth and look_behind else ""
    group = rf"|\((?:\?:)?{inside}\)" if depth else ""
    return rf"(?:[|^$]|\\[bB]{look}|(?:{atom}{group})(?:{repeat})?)*"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": _mailbox("", _LABEL),
    "idn-email": _mailbox(_NON_ASCII, f"(?:{_LABEL}|{_U_LABEL})"),
    "hostname": _HOSTNAME_7.replace(_LONG_LABEL, f"(?![Xx][Nn]--){_LONG_LABEL}"),
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _reference("", "", True),
    "uri-reference": _reference("", "", False),
    "iri": _reference(_UCSCHAR, _IPRIVATE, True),
    "iri-reference": _reference(_UCSCHAR, _IPRIVATE, False),
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    "regex": _regex(_ATOM, _REPEAT, 1, _LOOK_BEHIND),
    "uri-template": _URI_TEMPLATE,
}
OLDER = {"hostname": _HOSTNAME_7, "time": rf"{_HOUR_MINUTE}:[0-5]\d"}  # of drafts 3 to 7, and of draft 3
LONGEST_HOSTNAME = 253
# The rule of a grammar for any regular expression: {0} is the name of the rule, {1} to {3} are REGEX_PARTS.
REGEX_RULE = '"" | {1} {0} | "(" ("?:")? {0} ")" ({2})? {0} | "(?" ([=!] {0} | "<" [=!] {3}) ")" {0}'
REGEX_PARTS = rf"[|^$]|\\[bB]|(?:{_ATOM})(?:{_REPEAT})?", _REPEAT, _LOOK_BEHIND
FEW_REGEXES = _regex(_FEWER_ATOMS, _FEWER_REPEATS, 2)
_FEW_LEAP_SECONDS = "combined with other keywords or strings, or with xgrammar or llguidance, leap seconds with offsets Z and 00:00 only"
NARROWED = {
    "date": "without the year 0000",
    "time": _FEW_LEAP_SECONDS,
    "date-time": f"without the year 0000, {_FEW_LEAP_SECONDS}",
    "hostname": 'without labels that begin with "xn--", except in drafts up to 7; combined with keywords other than maxLength, or with '
    "xgrammar or llguidance, only one label, or up to 4 of 62 characters, 11 of 22, or 42 of 5 (fewer with a maxLength)",
    "idn-email": "labels of the domain beyond ASCII have up to 12 lowercase Latin, Greek or Cyrillic letters, Kana, Han or Hangul",
    "regex": "without back-references, group names and properties, look-behind of characters and classes only, few ranges beyond ASCII; "
    "combined with other keywords, or with llguidance, only groups up to 2 deep, no look-around, and few ranges and counts",
}
_ANY_DATE, _ANY_TIME = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)"
AT_MOST = {
    "date": _ANY_DATE,
    "time": _ANY_TIME,
    "date-time": f"{_ANY_DATE}[Tt]{_ANY_TIME}",
    "hostname": r"[A-Za-z0-9\-.]*",
    "idn-email": "[^]*@[^]*",
    "regex": "[^]*",
}
