"""Exit and fork hooks."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

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


def test_resources_that_hang_share_the_time_of_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = [0.0]
    hanging = SimpleNamespace(close=waited.append)
    monkeypatch.setattr(lifetimes, "time", SimpleNamespace(monotonic=lambda: sum(waited)), raising=False)
    monkeypatch.setattr(lifetimes, "_closables", ([hanging], [hanging], [hanging]))
    lifetimes._close_all()
    assert waited == [0.0, lifetimes.EXIT_SECONDS, 1.0, 1.0]
