"""Exit and fork hooks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest

from stepgraph.sampling import lifetimes

ALIVE_AT_EXIT = """
from stepgraph.sampling.lifetimes import call_after_fork

class Owner:
    def __init__(self):
        call_after_fork(self.detach)
        self.cycle = self

    def detach(self):
        pass

owner = Owner()

def use():
    return owner
"""


def test_object_with_a_fork_hook_that_lives_until_exit_prints_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", ALIVE_AT_EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


class Resource:
    """Closing it calls `closed`."""

    def __init__(self, closed: Callable[..., object]) -> None:
        self.closed = closed
        lifetimes.close_at_exit(self)

    def close(self, seconds: float) -> None:
        self.closed(self, seconds)


@pytest.fixture(autouse=True)
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetimes, "_closables", tuple(WeakKeyDictionary() for _ in lifetimes.ExitStage))


def test_resources_that_hang_share_the_time_of_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = [0.0]
    monkeypatch.setattr(lifetimes, "time", SimpleNamespace(monotonic=lambda: sum(waited)), raising=False)
    hanging = [Resource(lambda _, seconds: waited.append(seconds)) for _ in range(3)]
    lifetimes._close_all()
    assert waited == [0.0, lifetimes.EXIT_SECONDS, 1.0, 1.0] and len(hanging) == 3


def test_resources_close_in_the_order_of_their_creation_and_those_that_start_meanwhile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device uses the threads of its streams until it ends, and its first replay starts them."""
    monkeypatch.setattr(lifetimes, "EXIT_SECONDS", 0.0)  # engines that other tests share have threads that live on
    made, closed = list[Resource](), list[Resource]()

    def close(resource: Resource, _: float) -> None:
        closed.append(resource)
        if resource is made[0]:
            made.append(Resource(close))

    made += [Resource(close) for _ in range(20)]
    lifetimes._close_all()
    assert closed == made and len(made) == 21
