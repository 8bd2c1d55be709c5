"""The search: an input drawn from the corpus, changed, tried at a door; one that reaches new lines joins the corpus."""

from __future__ import annotations

import contextlib
import math
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.fuzz.mutation import Mutator, fits
from tests.fuzz.reached import Reached
from tests.fuzz.values import Value, written
from tests.fuzz.watch import TooLong, Watch

MOST_WORDS = 2500  # characters of a refusal: a sentence, whatever was given
MOST_FINDS = 20  # of one kind are not looked for further


class Door:
    """Something that takes what it is given from anywhere."""

    name: str
    seeds: Sequence[Value] = ()
    words: Sequence[str] = ()  # that inputs are made of
    named: re.Pattern[str]  # how a refusal begins: with the field, the file or the place that it is about
    hostile: bool = False  # whether values may be of any type of Python
    refusal: type[Exception] = ValueError
    allowed: frozenset[str] = frozenset()  # events of the process that are its own

    def prepare(self, given: Value) -> None:
        """What lies there before it is entered: files."""

    def enter(self, given: Value) -> None:
        """Refuses by raising `refusal`; AssertionError where what was taken does not work."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


@dataclass(frozen=True)
class Find:
    """An input that did what none may."""

    door: str
    what: str
    given: Value
    told: str = ""  # a traceback

    def __str__(self) -> str:
        return f"{self.door}: {self.what}\n  input: {written(self.given)[:1500]}\n{self.told}"


@dataclass
class Report:
    door: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    finds: list[Find] = field(default_factory=list)
    seconds: float = 0.0  # of this process's processor
    corpus: int = 0
    lines: int = 0  # of stepgraph's own that were reached
    most_grown: int = 0  # bytes that one input left behind at the most


def attempt(door: Door, given: Value, watch: Watch, reached: Reached) -> bool | Find:
    """Whether an input was taken, or what is wrong with what became of it."""
    taken, what, told = False, "", ""
    door.prepare(given)
    try:
        with watch.around(), reached.watched():
            door.enter(given)
        taken = True
    except TooLong as error:
        what, told = str(error), traceback.format_exc(limit=-6)
    except door.refusal as error:
        what = _badly_refused(door, error)
        told = traceback.format_exc(limit=-4) if what else ""
    except Exception as error:
        what, told = f"{type(error).__name__}: {error!s:.300}", traceback.format_exc(limit=-6)
    faults = watch.faults()
    if what or faults:
        return Find(door.name, "; ".join([*([what] if what else []), *faults]), given, told)
    return taken


def _badly_refused(door: Door, error: Exception) -> str:
    said = str(error)
    if isinstance(error, UnicodeError):
        return f"a refusal in the interpreter's own words: {type(error).__name__}: {said:.200}"
    if len(said) > MOST_WORDS:
        return f"a refusal of {len(said)} characters: {said:.200}"
    return "" if door.named.match(said) else f"a refusal that names nothing: {said:.300}"


def fuzz(
    door: Door, inputs: int, seed: int = 0, before: Callable[[int, Value], None] | None = None, clock_seconds: float = math.inf
) -> Report:
    """So many inputs, the seeds first, or as many as there is time for. `before` is told of each one before it is tried."""
    for seed_value in door.seeds:  # what is imported or made at the first use is nobody's doing
        with contextlib.suppress(door.refusal):
            door.prepare(seed_value)
            door.enter(seed_value)
    random, reached, watch = Random(f"{door.name} {seed}"), Reached(), Watch(door.allowed)
    mutator = Mutator(random, door.words, door.hostile)
    report, corpus, kinds = Report(door.name), list(door.seeds), dict[str, int]()
    start = time.process_time()
    end = time.monotonic() + clock_seconds
    while report.inputs < inputs and time.monotonic() < end:
        given = door.seeds[report.inputs] if report.inputs < len(door.seeds) else mutator.mutated(corpus)
        if before:
            before(report.inputs, given)
        lines = reached.lines
        outcome = attempt(door, given, watch, reached)
        report.inputs += 1
        if isinstance(outcome, Find):
            kind = re.sub(r"\W.*", "", outcome.what) + "".join(re.findall(r"line \d+", outcome.told)[-1:])
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] <= MOST_FINDS:
                report.finds.append(outcome)
        else:
            report.accepted += outcome
            report.refused += not outcome
            if reached.lines > lines and report.inputs > len(door.seeds) and fits(given):
                corpus.append(given)
    report.seconds = time.process_time() - start
    report.corpus, report.lines, report.most_grown = len(corpus), reached.lines, watch.grown
    return report
