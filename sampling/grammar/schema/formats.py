"""The formats of JSON Schema as regular expressions over the characters of the value, for `fullmatch`.

They are written in the common part of the notations of JavaScript and Python. `FORMATS` never accepts a text that its specification
forbids. Where a format accepts fewer texts than its specification, `NARROWED` says which, and `AT_MOST` accepts all that the
specification allows, and others: a text that is none of the format is none of these.
"""

from __future__ import annotations

# Dates and times: RFC 3339. Year 0000 is left out: it is no year of the calendar, and most libraries refuse it.
_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
_MULTIPLE_OF_4 = r"(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:\d{{2}}{_MULTIPLE_OF_4}|{_MULTIPLE_OF_4}00)"
_DAY_OF_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"  # not 29 February
)
_DATE = rf"(?:{_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
# With any offset, a leap second takes 12,000 states: one for each minute of the day, in each position after it. Validators refuse others.
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
    def after(groups: int) -> str:  # that follow the "::"
        return f"(?:{_GROUP}:){{{groups - 2}}}{_LAST_GROUPS}" if groups > 1 else _GROUP * groups

    forms = [f"(?:{_GROUP}:){{6}}{_LAST_GROUPS}"]
    for groups in range(7, -1, -1):
        before = 7 - groups
        forms.append((f"(?:(?:{_GROUP}:){{0,{before - 1}}}{_GROUP})?" if before else "") + "::" + after(groups))
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()

# Host names: RFC 1123, without names that begin with "xn--", of which only the valid Punycode is allowed.
_ALPHANUMERIC, _OR_HYPHEN = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(longest: int) -> str:
    def inner(used: int) -> str:
        return f"{_OR_HYPHEN}{{0,{longest - 1 - used}}}{_ALPHANUMERIC}"

    return (
        f"(?:[A-WYZa-wyz0-9](?:{inner(1)})?"
        f"|[Xx](?:{_ALPHANUMERIC}|[A-MO-Za-mo-z0-9-]{inner(2)}|[Nn](?:{_ALPHANUMERIC}(?:{inner(3)})?|-{_ALPHANUMERIC}(?:{inner(4)})?))?)"
    )


# At most 253 characters in all: 63 + 5 * 38 = 63 + 10 * 19, 5 + 41 * 6. With all labels up to 63 characters, each length of a name would be
# a state beside each length of a label: 24,550 states, which take 1 to 2 s to compile.
_HOSTNAME = "|".join(
    rf"{_label(first)}(?:\.{_label(longest)}){{0,{count}}}" for first, longest, count in ((63, 37, 5), (63, 18, 10), (5, 5, 41))
)

# Mailboxes: RFC 5321, and RFC 6531 for those that are not ASCII.
_NON_ASCII = r"\u{80}-\u{d7ff}\u{e000}-\u{10ffff}"
_LABEL = f"{_ALPHANUMERIC}(?:{_OR_HYPHEN}*{_ALPHANUMERIC})?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"


def _mailbox(more: str) -> str:
    atom = rf"[A-Za-z0-9!#$%&'*+\-/=?^_`{{|}}~{more}]+"
    quoted = rf'"(?:[ !#-\[\]-~{more}]|\\[ -~])*"'
    literal = rf"\[(?:{_IPV4}|[Ii][Pp][Vv]6:{_IPV6})\]"
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{_DOMAIN}|{literal})"


# RFC 3986 and RFC 3987.
_UCSCHAR = r"\u{a0}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}" + "".join(
    rf"\u{{{plane:x}{'1000' if plane == 0xE else '0000'}}}-\u{{{plane:x}fffd}}" for plane in range(1, 0xF)
)
_IPRIVATE = r"\u{e000}-\u{f8ff}\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"
_SUB_DELIMS = "!$&'()*+,;="


def _reference(more: str, private: str, absolute_only: bool) -> str:
    """A URI, or a reference; `more` and `private`: characters beyond ASCII, and those that only a query may contain."""

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


# RFC 6570, levels 1 to 4: the operators that it reserves for extensions are of no level.
_VARIABLE_CHAR = f"(?:[A-Za-z0-9_]|%{_HEX}{{2}})"
_VARIABLE = rf"{_VARIABLE_CHAR}(?:\.?{_VARIABLE_CHAR})*(?::[1-9]\d{{0,3}}|\*)?"
_URI_TEMPLATE = rf"(?:[!#$&-;=?-\[\]_a-z~{_UCSCHAR}{_IPRIVATE}]|%{_HEX}{{2}}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"

# RFC 6901.
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"


def _regex(depth: int, is_short: bool = False) -> str:
    """Regular expressions with groups inside each other up to a depth, in the common part of JavaScript (with the flag "u") and Python.
    Short ones are without look-around and with fewer counts, as each state is one of each length where the length is limited."""
    escape = rf"\\(?:[dDwWsSfnrtv^$\\.*+?()\[\]{{}}|/]|x{_HEX}{{2}}|u{_HEX}{{4}})"
    ranges = "a-[a-z]|[a-z]-z|A-[A-Z]|[A-Z]-Z|0-[0-9]|[0-9]-9"
    members = rf"\[\^?(?:[^\\\[\]\-\^\x00-\x1f&~|]|\\-|{escape}|{ranges})+\]"
    atom = rf"[^\^$\\.*+?()\[\]{{}}|\x00-\x1f]|\.|{escape}|{members}"
    # Of two counts that ascend from 10 on, a digit of the tens or the hundreds does.
    ascending = [f"{low},(?:[{low}-9]|[1-9]\\d{{1,2}})" for low in range(2, 10)] + [f"{ten}\\d,[{ten + 1}-9]\\d" for ten in range(1, 9)]
    more = "" if is_short else rf"|{'|'.join(ascending)}|[1-9]\d,[1-9]\d\d"
    repeat = rf"(?:[*+?]|\{{(?:(?:0|[1-9]\d{{0,2}}),?|[01],[1-9]\d{{0,2}}{more})\}})\??"
    found = ""
    for level in range(depth + 1):
        group = rf"|\((?:\?:)?{found}\)" if level else ""
        look = rf"|\(\?(?:[=!]{found}|<[=!](?:{atom})*)\)" if level == depth and not is_short else ""
        found = rf"(?:[|^$]|\\[bB]{look}|(?:{atom}{group})(?:{repeat})?)*"
    return found


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": _mailbox(""),
    "idn-email": _mailbox(_NON_ASCII),
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _reference("", "", True),
    "uri-reference": _reference("", "", False),
    "iri": _reference(_UCSCHAR, _IPRIVATE, True),
    "iri-reference": _reference(_UCSCHAR, _IPRIVATE, False),
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    "regex": _regex(2),
    "uri-template": _URI_TEMPLATE,
}
# What is generated instead beside a maxLength of at most so many characters.
BOUNDED = {"hostname": (252, rf"{_label(63)}(?:\.{_label(63)})*"), "regex": (10**9, _regex(2, is_short=True))}
NARROWED = {
    "date": "without the year 0000",
    "time": "a leap second with the offsets Z and 00:00 only",
    "date-time": "without the year 0000, a leap second with the offsets Z and 00:00 only",
    "hostname": 'without labels that begin with "xn--"; unless a maxLength is below 253, of up to 6 labels of at most 37 characters or '
    "11 of 18, the first one of up to 63, or 42 of 5",
    "idn-email": "with a domain of ASCII characters",
    "regex": "groups up to 2 deep, look-around outside groups only and beside no maxLength, without back-references, names and properties, "
    "counts below 1,000, two of which ascend by a digit of the tens or hundreds, ranges from or to an end of a-z, A-Z or 0-9",
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
