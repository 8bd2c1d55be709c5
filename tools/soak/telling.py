"""What became of each request of an act: noted while it runs, by whichever thread sees it."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stepgraph import Engine, EngineClosedError, Job, QueueFullError, StepEvent
from tools.soak.asking import Ask, Asks

Followed = Literal["whole", "part", "no"]  # who reads only so far is told no more; who submits beside a server is told nothing


@dataclass(frozen=True)
class Answer:
    """What a request said before: asked again it says the same, sampled or not."""

    ask: Ask
    tokens: tuple[int, ...]
    reason: str


@dataclass(eq=False)
class Told:
    """A job, and what was heard of it."""

    ask: Ask
    job: Job
    before: Answer | None = None
    followed: Followed = "whole"
    events: list[StepEvent] = field(default_factory=list)


class Act:
    """One engine under load for a while. Lists grow from several threads; dicts are the driving thread's."""

    def __init__(self, engine: Engine, kept: collections.deque[Answer], seconds: float, stop: threading.Event) -> None:
        self.engine, self.kept, self._until, self._stop = engine, kept, time.monotonic() + seconds, stop
        self.told: list[Told] = []
        self.problems: list[str] = []
        self.counts = collections.Counter[str]()  # one key is counted by one thread, or lost counts are no harm
        self.closed = False  # the engine was closed under load

    @property
    def seconds_left(self) -> float:
        return 0.0 if self._stop.is_set() else max(0.0, self._until - time.monotonic())

    @property
    def over(self) -> bool:
        return self.seconds_left == 0.0

    def ask(self, asks: Asks) -> tuple[Ask, Answer | None]:
        """A new request, or one that was answered before."""
        if asks.random.random() < 0.12:
            try:
                before = self.kept.popleft()
            except IndexError:
                return asks.draw(), None
            return before.ask, before
        return asks.draw(), None

    def refused(self, drawn: random.Random) -> None:
        """What cannot be served is refused, and leaves nothing behind: the books are looked at when the act is over."""
        bad: Sequence[tuple[Sequence[int], int]] = (([], 4), ([-1], 4), ([1] * 400, 4), ([1, 2], 0), ([1, 2], 400))
        prompt, new_tokens = drawn.choice(bad)
        try:
            self.engine.submit(prompt, max_new_tokens=new_tokens)
        except (ValueError, EngineClosedError):
            self.counts["refused"] += 1
        else:
            self.problems.append(f"submit({prompt}, max_new_tokens={new_tokens}) was taken")


def submitter(act: Act, asks: Asks, followed: Followed, at_once: int) -> None:
    """The life of a thread that submits and cancels, with at most so many jobs at once."""
    drawn, own = asks.random, list[Told]()
    try:
        while not act.over:
            own = [told for told in own if not told.job.finished]
            if len(own) >= at_once:
                time.sleep(0.002)
                continue
            ask, before = act.ask(asks)
            try:
                own.append(Told(ask, ask.submit(act.engine), before, followed))
                act.told.append(own[-1])
            except QueueFullError:
                act.counts["queue was full"] += 1
                time.sleep(0.005)
                continue
            if drawn.random() < 0.02:
                act.refused(drawn)
            if drawn.random() < 0.3:
                time.sleep(drawn.choice((0.001, 0.01, 0.05)))
            if drawn.random() < 0.15:
                act.engine.cancel(drawn.choice(own).job)
            if drawn.random() < 0.05:
                act.engine.cancel(drawn.choice(act.told).job)  # perhaps another thread's, perhaps over
    except EngineClosedError:
        act.counts["engine was closed"] += 1
    except BaseException as error:  # a thread's error would only be printed
        act.problems.append(f"a thread that submits: {type(error).__name__}: {error}")
