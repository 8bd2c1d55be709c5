"""Python types as constraints: random texts of compiled constraints, validated by pydantic, and types that are refused with the place."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import importlib.util
import ipaddress
import pathlib
import re
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar

import pydantic
import pytest
from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, Required, TypeAliasType, TypedDict

from stepgraph import typed_constraint
from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.constraints.dialects import in_all_dialects
from stepgraph.sampling.native import why_not
from tests.helpers.grammar_texts import random_text
from tests.helpers.growth import growth
from tests.helpers.schema_cases import BYTES, takes

COMPILER = GrammarCompiler(BYTES, max_threads=1, isolation="none", backend="xgrammar" if why_not() else "automaton")
DRAWS, LONGEST = 15, 300  # texts of each type, and their bytes
T = TypeVar("T")
Whole = NewType("Whole", int)
TUPLE: Any = tuple  # of types that are values for mypy
LIST: Any = list
DICT: Any = dict


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Color(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


class Mixed(enum.Enum):
    TEXT = "a"
    WHOLE = 2
    NOTHING = None
    REAL = 2.5
    FLAG = True


class Encoded(enum.Enum):
    A = b"\xff"


class Pair(enum.Enum):
    A = (1, 2)


class Amount(enum.Enum):
    A = Decimal("1.5")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "wolf"]
    name: str


class Tree(pydantic.BaseModel):
    value: bool
    below: list[Tree] = []


class Aliases(pydantic.BaseModel):
    a: int = Field(alias="x-y")
    b: int = Field(validation_alias=pydantic.AliasChoices("p", "q"))
    c: int = Field(serialization_alias="z")


class ByPath(pydantic.BaseModel):
    b: int = Field(validation_alias=pydantic.AliasPath("p", 0))


class Computed(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.a


class Extra(pydantic.BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    a: int


class Strict(pydantic.BaseModel):
    model_config = ConfigDict(strict=True)
    a: dict[int, bool]
    b: tuple[float, Decimal, bytes, datetime.date, datetime.timedelta, uuid.UUID, ipaddress.IPv4Network]
    c: pydantic.HttpUrl
    d: frozenset[Literal[1, 2]]
    e: Level


class Stripped(pydantic.BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True, str_min_length=2)
    a: str
    b: str = Field(pattern="^.a", max_length=4)


class Finite(pydantic.BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)
    a: float


class Base64(pydantic.BaseModel):
    model_config = ConfigDict(val_json_bytes="base64")
    a: bytes


class Hex(pydantic.BaseModel):
    model_config = ConfigDict(val_json_bytes="hex")
    a: bytes


class PythonPattern(pydantic.BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    a: str = Field(pattern=r"^(?=.*\d)\w\S\D[^\w\s]$")


class Box(pydantic.BaseModel, Generic[T]):
    held: T


class Numbers(pydantic.RootModel[set[int]]):
    pass


@dataclasses.dataclass
class Record:
    a: int
    b: list[int] = dataclasses.field(default_factory=list)
    c: int = dataclasses.field(init=False, default=3)


class Entry(TypedDict, total=False):
    a: Required[int]
    b: NotRequired[str]
    c: Entry


class Open(TypedDict, extra_items=int):  # type: ignore[call-arg]
    a: int


class Row(NamedTuple):
    a: int
    b: str = "x"


def limited(kind: Any, **limits: Any) -> Any:
    return Annotated[kind, Field(**limits)]


EAST = datetime.timezone(datetime.timedelta(hours=2))
NOON = datetime.datetime(2020, 1, 1, 12)
DATETIME_LIMITS: list[dict[str, Any]] = [
    *({name: NOON.replace(microsecond=part)} for name in ("gt", "ge", "lt", "le") for part in (0, 250_000)),
    {"ge": NOON, "lt": NOON.replace(hour=13)},
    {"gt": NOON.replace(tzinfo=EAST), "le": NOON.replace(hour=13, tzinfo=datetime.timezone.utc)},
]
TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, bool, str, bytes, complex, Fraction, Level, Color, Mixed, Cat, Tree, Aliases)},
    **{kind.__name__: kind for kind in (Computed, Extra, Strict, Stripped, Finite, Base64, Hex, PythonPattern, Numbers, Record)},
    **{kind.__name__: kind for kind in (Entry, Open, Row)},
    **{f"Decimal {limits}": limited(Decimal, **limits) for limits in (
        {}, {"gt": 0}, {"max_digits": 3}, {"decimal_places": 2}, {"max_digits": 4, "decimal_places": 2},
        {"max_digits": 20, "decimal_places": 4}, {"multiple_of": Decimal("0.1")}, {"le": Decimal("1e3")},
    )},
    "multiples": TUPLE[limited(int, multiple_of=3), limited(float, multiple_of=0.5), limited(int, ge=3, lt=5)],
    "FiniteFloat": pydantic.FiniteFloat,
    "Literal": list[Literal["a", 1, None, True, Level.HIGH, Color.RED]],
    "enums": tuple[list[Level], list[Mixed], Color],
    "unions": TUPLE[limited(Cat | Dog, discriminator="kind"), Cat | Dog, int | str | None, Box[int]],
    "aliases": TUPLE[TypeAliasType("Numbers", list[int]), Whole],
    "times": tuple[datetime.date, datetime.datetime, datetime.time, pydantic.NaiveDatetime, pydantic.AwareDatetime],
    "timedelta": datetime.timedelta,
    **{f"date {limits}": limited(datetime.date, **limits) for limits in (
        {"ge": datetime.date(2020, 1, 1)}, {"gt": datetime.date(1999, 12, 30)}, {"le": datetime.date(2019, 9, 9)},
        {"lt": datetime.date(11, 1, 1)},
    )},
    **{f"{kind.__name__} {limits}": limited(kind, **limits)
       for kind in (datetime.datetime, pydantic.NaiveDatetime, pydantic.AwareDatetime) for limits in DATETIME_LIMITS},
    **{name: getattr(pydantic, name) for name in ("PastDate", "FutureDate", "PastDatetime", "FutureDatetime")},
    **{name: getattr(pydantic, name) for name in ("AnyUrl", "HttpUrl", "AnyHttpUrl", "FileUrl", "FtpUrl", "WebsocketUrl", "PostgresDsn")},
    **{name: getattr(pydantic, name) for name in ("RedisDsn", "MongoDsn", "MySQLDsn", "KafkaDsn", "NatsDsn", "AmqpDsn")},
    **{f"UUID{version}": getattr(pydantic, f"UUID{version}") for version in (1, 3, 4, 5)},
    "UUID": uuid.UUID,
    "Path": pathlib.Path,
    **{name: getattr(ipaddress, name) for name in ("IPv4Address", "IPv4Network", "IPv4Interface")},
    **{name: getattr(ipaddress, name) for name in ("IPv6Address", "IPv6Network", "IPv6Interface")},
    **{name: getattr(pydantic, name) for name in ("IPvAnyAddress", "IPvAnyNetwork", "IPvAnyInterface", "SecretStr", "SecretBytes")},
    **{name: getattr(pydantic, name) for name in ("Base64Bytes", "Base64Str", "Base64UrlBytes", "Base64UrlStr")},
    "secrets": TUPLE[limited(pydantic.SecretStr, min_length=3), pydantic.Secret[int]],
    "bytes of a length": limited(bytes, min_length=2, max_length=3),
    "ByteSize": pydantic.ByteSize,
    **({"EmailStr": pydantic.EmailStr} if importlib.util.find_spec("email_validator") else {}),
    "sets": TUPLE[set[int], frozenset[datetime.date], set[bool], limited(set[Literal["a", "b", "c"]], min_length=2), frozenset[Level]],
    "lists": TUPLE[limited(list[int], min_length=1, max_length=2), collections.deque[int], tuple[int, ...], Sequence[int], Iterable[int]],
    "names": tuple[dict[int, bool], dict[float, int], dict[bool, int], dict[Literal["a", "b"], int], dict[Color, int], dict[Mixed, int]],
    "names of times": tuple[dict[datetime.date, int], dict[datetime.timedelta, int], dict[uuid.UUID, int], dict[pydantic.UUID4, int]],
    "names of texts": TUPLE[DICT[limited(str, min_length=2, max_length=3), int], DICT[limited(str, pattern="^a+$"), int]],
    "Mapping": Mapping[str, int],
    "other dicts": tuple[collections.OrderedDict[int, int], collections.Counter[str], collections.defaultdict[str, list[int]]],
    "stripped": TUPLE[pydantic.constr(strip_whitespace=True, min_length=2), pydantic.constr(strip_whitespace=True, max_length=2)],
    "patterns": LIST[limited(str, pattern=r"^\d\w\s\D\W\S$")],
    "negated classes": LIST[limited(str, pattern=r"^[^\d][^\w][^\s][^\D][^\W][^\S]$")],
    "pattern of re": limited(str, pattern=re.compile(r"^[\d.]+$")),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_texts_of_a_type_are_accepted_by_pydantic(name: str) -> None:
    typed, random = typed_constraint(TYPES[name]), Random(name)
    compiled = COMPILER.compile(typed.constraint)
    texts = [random_text(compiled.matcher(), random, BYTES, LONGEST) for _ in range(DRAWS)]
    finished = [text.decode() for text in texts if text is not None]
    assert len(finished) > DRAWS / 2
    for text in finished:
        typed.parse(text)


@pytest.mark.parametrize(
    ("kind", "valid", "rejected"),
    [
        (Decimal, ("3", "-0.5"), ('"about 3"', '""', "8e20624")),
        (limited(Decimal, ge=0, lt=10), ("0.25", "9"), ('"-5"', "-5", "10")),
        (limited(Decimal, max_digits=3), ("0.125", "12.5", "999"), ("1000", "0.0625", "12.25")),
        (limited(Decimal, max_digits=4, decimal_places=2), ("99.25",), ("100", "1.125")),
        (dict[int, bool], ("{}", '{"-12": true, "0": false}'), ('{"a": true}', '{"": true}', '{"1.5": true}')),
        (datetime.time, ('"23:59:59Z"', '"23:59:59.5-01:30"'), ('"23:59:60Z"', '"08:30:60+09:31"')),
        (datetime.datetime, ('"1999-12-31T23:59:59Z"',), ('"1998-12-31T23:59:60Z"',)),
        (pydantic.NaiveDatetime, ('"1999-12-31T23:59:59.25"',), ('"1999-12-31T23:59:59Z"',)),
        (datetime.timedelta, ('"P1Y2M3DT4H5M6S"', '"P99999W"'), ('"P9999999999D"',)),
        (limited(datetime.date, ge=datetime.date(2020, 2, 29)), ('"2020-02-29"', '"2020-03-01"', '"9999-12-31"'), ('"2020-02-28"',)),
        (limited(datetime.date, lt=datetime.date(2020, 3, 1)), ('"2020-02-29"', '"0001-01-01"'), ('"2020-03-01"', '"2021-01-01"')),
        (limited(datetime.datetime, ge=NOON), ('"2020-01-01T12:00:00Z"', '"2020-01-01T12:00:00.5+02:00"', '"2021-01-01t00:00:00-09:30"'),
         ('"2020-01-01T11:59:59.9Z"', '"2020-01-01T11:59:59-12:00"')),
        (limited(datetime.datetime, gt=NOON), ('"2020-01-01T12:00:00.000001Z"', '"2020-01-01T12:00:01Z"'),
         ('"2020-01-01T12:00:00Z"', '"2020-01-01T12:00:00.0000009Z"')),
        (limited(datetime.datetime, le=NOON), ('"2020-01-01T12:00:00Z"', '"2020-01-01T11:59:59.9+09:00"', '"0001-01-01T00:00:00Z"'),
         ('"2020-01-01T12:00:00.5Z"', '"2020-01-01T12:00:01Z"', '"2021-01-01T00:00:00Z"')),
        (limited(pydantic.NaiveDatetime, lt=NOON), ('"2020-01-01T11:59:59.9"',), ('"2020-01-01T12:00:00"', '"2020-01-01T12:00:00.5"')),
        (limited(pydantic.NaiveDatetime, le=NOON), ('"2020-01-01T12:00:00"',), ('"2020-01-01T12:00:00.5"', '"2020-01-01T12:00:01"')),
        (limited(pydantic.AwareDatetime, ge=NOON.replace(tzinfo=EAST), lt=NOON),
         ('"2020-01-01T10:00:00Z"', '"2020-01-01T11:59:59Z"'), ('"2020-01-01T09:59:59Z"', '"2020-01-01T12:00:00Z"')),
        (pydantic.PastDatetime, ('"1999-12-31T00:00:00Z"', '"1999-12-31T00:00:00+23:00"'), ('"9999-12-31T00:00:00Z"',)),
        (pydantic.FutureDatetime, ('"9999-12-31T00:00:00Z"',), ('"1999-12-31T00:00:00Z"',)),
        (pydantic.PastDate, ('"1999-12-31"',), ('"9999-12-31"',)),
        (pydantic.FutureDate, ('"9999-12-31"',), ('"1999-12-31"',)),
        (pydantic.HttpUrl, ('"https://a.example.org:8080/b/c?d=%20#e"', '"http://localhost"', '"http://127.0.0.1/"'),
         ('"ftp://a.org"', '"http://"', '"http://a..org:x"', '"http://a.org:99999/"')),
        (pydantic.PostgresDsn, ('"postgresql+psycopg://u:p@h.org:5432/db"',), ('"mysql://h.org/db"',)),
        (pydantic.UUID4, ('"11111111-1111-4111-8111-111111111111"',), ('"11111111-1111-1111-8111-111111111111"', '"1"')),
        (ipaddress.IPv4Network, ('"10.0.0.0/8"', '"10.1.2.3"'), ('"10.1.0.0/8"', '"10.1.2.3/33"')),
        (pydantic.IPvAnyAddress, ('"10.0.0.1"', '"::1"'), ('"a"',)),
        (pydantic.Base64Str, ('"YQ=="', '"YWI="', '"YWJj"'), ('"YQ"', '"/w=="')),
        (pydantic.Base64Bytes, ('"/w=="',), ('"YQ"', '"a"')),
        (limited(bytes, max_length=3), ('"abc"',), ('"\u00e9\u00e9"',)),
        (set[int], ("[]", "[1, 1]"), ('["a"]',)),
        (pydantic.constr(strip_whitespace=True, min_length=2), ('"a b"',), ('" a"', '"a\u3000"')),
        (limited(str, pattern=r"^\s\W[^\w]$"), ('" -!"',), ('"\ufeff--"', '"-\u00e9-"', '" -\u00e9"')),
        (pydantic.ByteSize, ("5",), ('"5 parsec"', "-1")),
    ],
    ids=lambda value: getattr(value, "__name__", "") if not isinstance(value, tuple) else "",
)  # fmt: skip
def test_texts_that_pydantic_rejects_are_excluded_though_its_schema_allows_them(kind: Any, valid: Any, rejected: Any) -> None:
    typed, adapter = typed_constraint(kind), pydantic.TypeAdapter(kind)
    compiled = COMPILER.compile(typed.constraint)
    for text in valid:
        assert takes(compiled, text) and typed.parse(text) == adapter.validate_json(text)
    for text in rejected:
        with pytest.raises(ValueError, match="validation error"):
            adapter.validate_json(text)
        assert not takes(compiled, text), text


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Encoded, "the member Encoded.A with a value of bytes, expected texts and numbers"),
        (Pair, "the member Pair.A with a value of tuple"),
        (Amount, "the member Amount.A with a value of Decimal"),
        (Literal[b"a"], "the Literal b'a', expected texts, numbers, None, or members of an enum of str or int"),
        (Literal[Mixed.TEXT], "the Literal <Mixed.TEXT: 'a'>"),
        (limited(datetime.time, lt=datetime.time(12)), "a time with lt"),
        (limited(datetime.date, gt=datetime.date.max), "a date with gt=9999-12-31, expected one within the calendar"),
        (limited(datetime.datetime, ge=datetime.datetime.max), "a datetime with ge=9999-12-31 23:59:59.999999, expected"),
        (limited(datetime.timedelta, gt=datetime.timedelta(1)), "a timedelta with gt"),
        (pydantic.FilePath, "a path that depends on the files of the host, expected Path"),
        (pydantic.DirectoryPath, "a path that depends on the files of the host"),
        (pydantic.NewPath, "a path that depends on the files of the host"),
        (pydantic.ImportString, "texts that no schema describes, expected str"),
        (pydantic.Json[int], "Json, a text that holds JSON, expected the type itself"),
        (Hashable, "a type whose values are no JSON"),
        (type[int], "a type whose values are no JSON"),
        (dict[tuple[int, int], int], "keys other than texts, or numbers without bounds, expected str"),
        (DICT[limited(int, ge=3), int], "keys other than texts, or numbers without bounds"),
        (dict[Literal[1, 2], int], "keys that are no texts"),
        (limited(pydantic.Base64Bytes, min_length=3), "min_length of a type whose values are not numbers, lists or plain texts"),
        (limited(pydantic.HttpUrl, max_length=20), "max_length of a type whose values are not"),
        (limited(str, gt="b"), "greater_than of a type whose values are not"),
        (limited(str, pattern="[a[b]]"), "a pattern that has '[a[b]', expected \\[ in a class"),
        (limited(str, pattern="a[b&&c]"), "a pattern that has '[b&&c]', expected \\& in a class"),
        (limited(str, pattern=r"\<a"), "a pattern that has '\\\\<', a boundary of words, expected '<'"),
        (limited(str, pattern=re.compile("a", re.IGNORECASE)), "a pattern with re.IGNORECASE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_type_whose_texts_cannot_be_described_is_refused_with_its_place(kind: Any, reason: str) -> None:
    held = pydantic.create_model("Holder", a=(list[kind] | None, None))
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        typed_constraint(held)
    assert re.match(r"constraint: .*Holder.* has no JSON schema: #/(properties/a/anyOf/0/items|\$defs/\w+): got ", str(caught.value))


def test_field_with_a_path_as_alias_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("#/properties/b: got the path ['p', 0] as validation_alias, expected a name")):
        typed_constraint(ByPath)


def test_function_with_a_refused_parameter_names_it() -> None:
    def load(where: pydantic.FilePath) -> None: ...

    with pytest.raises(ValueError, match=r"has no JSON schema: #/\$defs/Arguments/properties/where: got a path that depends on"):
        typed_constraint(load)


@pytest.mark.parametrize("escape", [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"])
@pytest.mark.parametrize("negated", ["", "^"])
def test_class_escapes_are_narrowed_to_what_all_dialects_match(escape: str, negated: str) -> None:
    pattern = f"[{negated}{escape}]"
    ranges = re.findall(r"\\u\{(\w+)\}-\\u\{(\w+)\}", in_all_dialects(pattern))
    listed = {code for first, last in ranges for code in range(int(first, 16), int(last, 16) + 1)}
    codes = {*range(0xD800), *range(0xE000, 0x110000)}
    text = "".join(map(chr, sorted(codes - listed if negated else codes & listed)))
    assert len(text) > 9 and re.fullmatch(f"{pattern}*", text)
    pydantic.TypeAdapter(limited(str, pattern=f"^{pattern}*$")).validate_python(text)


def test_patterns_are_checked_in_linear_time() -> None:
    def check(size: int) -> None:
        for text in ("a{" + "1" * size, "[" * size, "{ ," * size):
            in_all_dialects(text)

    assert growth(check, 5_000, 40_000) < 24, "8 if linear, 64 if quadratic"


@pytest.mark.parametrize("pattern", [r"\D\D", r"\s\S", r"[a\W]", r"[^\w][^\d]", r"a{2,5}(?P<b>b|c)", r"[x[]\]"])
def test_texts_of_a_pattern_match_it(pattern: str) -> None:
    typed, random = typed_constraint(re.compile(pattern)), Random(pattern)
    compiled = COMPILER.compile(typed.constraint)
    for _ in range(DRAWS):
        text = random_text(compiled.matcher(), random, BYTES)
        assert text is not None and typed.parse(text.decode())


def test_validators_of_the_user_are_not_enforced() -> None:
    typed: Callable[[str], Any] = typed_constraint(Annotated[int, pydantic.AfterValidator(lambda value: 1 // value)]).parse
    with pytest.raises(ZeroDivisionError):
        typed("0")
