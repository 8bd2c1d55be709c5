"""Coverage-guided search: mutate an input from the corpus, run it, and add it to the corpus if it reaches new lines."""

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

MOST_WORDS = 2500  # characters of a refusal
MOST_FINDS = 20  # of one kind that are reported


class Door:
    """An entry point that receives untrusted input: it must either work or raise `refusal` with a message that names the field."""

    name: str
    seeds: Sequence[Value] = ()
    words: Sequence[str] = ()  # building blocks of inputs
    named: re.Pattern[str]  # how a refusal begins: with the field, file or position concerned
    hostile: bool = False  # whether values may have any Python type
    refusal: type[Exception] = ValueError
    allowed: frozenset[str] = frozenset()  # audit events that the entry point itself may cause

    def prepare(self, given: Value) -> None:
        """Write the files that `enter` reads."""

    def enter(self, given: Value) -> None:
        """Process one input. Raises `refusal` to refuse it, AssertionError where an accepted input does not work."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources."""


@dataclass(frozen=True)
class Find:
    """An input with a forbidden effect."""

    door: str
    what: str
    given: Value
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.door}: {self.what}\n  input: {written(self.given)[:1500]}\n{self.traceback}"


@dataclass
class Report:
    door: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    finds: list[Find] = field(default_factory=list)
    seconds: float = 0.0  # of processor time
    corpus: int = 0
    lines: int = 0  # of stepgraph that were reached
    most_grown: int = 0  # bytes: the largest memory growth of one input


def attempt(door: Door, given: Value, watch: Watch, reached: Reached) -> bool | Find:
    """Run one input. Returns whether it was accepted, or the fault."""
    accepted, what, trace = False, "", ""
    door.prepare(given)
    try:
        with watch.around(), reached.watched():
            door.enter(given)
        accepted = True
    except TooLong as error:
        what, trace = str(error), traceback.format_exc(limit=-6)
    except door.refusal as error:
        what = _badly_refused(door, error)
        trace = traceback.format_exc(limit=-4) if what else ""
    except Exception as error:
        what, trace = f"{type(error).__name__}: {error!s:.300}", traceback.format_exc(limit=-6)
    faults = watch.faults()
    if what or faults:
        return Find(door.name, "; ".join([*([what] if what else []), *faults]), given, trace)
    return accepted


def _badly_refused(door: Door, error: Exception) -> str:
    message = str(error)
    if isinstance(error, UnicodeError):
        return f"a refusal with a message of the interpreter: {type(error).__name__}: {message:.200}"
    if len(message) > MOST_WORDS:
        return f"a refusal of {len(message)} characters: {message:.200}"
    return "" if door.named.match(message) else f"a refusal that names no field or file: {message:.300}"


def fuzz(
    door: Door, inputs: int, seed: int = 0, before: Callable[[int, Value], None] | None = None, clock_seconds: float = math.inf
) -> Report:
    """Run `inputs` inputs, the seeds first, or fewer within `clock_seconds`. `before(index, input)` is called before each one."""
    for seed_value in door.seeds:  # imports and first-use initialisation must not count as effects of an input
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
            kind = re.sub(r"\W.*", "", outcome.what) + "".join(re.findall(r"line \d+", outcome.traceback)[-1:])
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
