"""Rows of the native link are shared out among threads: none is missed, a slow one does not stop the others."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND
from stepgraph.sampling.grammar.status import MaskStatus
from tests.helpers.link_bench import WALK, A, Memory, letters, native_link, running
from tests.helpers.planted import plant
from tests.helpers.toy_engines import needs_native

pytestmark = needs_native


def test_a_slow_row_does_not_stop_the_others() -> None:
    """The first row's fill waits for the last one's: with one thread, or in order, that would be for ever."""
    memory, reached = Memory.make(6, 3), threading.Event()
    link = native_link(memory, threads=2)
    rows = [letters(link, owner) for owner in range(1, 7)]
    waited: list[bool] = []

    def wait(real: Any, *arguments: Any) -> int:
        waited.append(reached.wait(10))
        return int(real(*arguments))

    plant(rows[0], "fill", wait)

    def tell(real: Any, *arguments: Any) -> int:
        reached.set()
        return int(real(*arguments))

    plant(rows[-1], "fill", tell)
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    link.push_batch(rows)
    link.node((BEGIN_ROUND, COMMIT, END_ROUND))()
    assert waited == [True]
    assert memory.tags[0, :, 3].tolist() == [MaskStatus.OK] * 6


def test_many_rounds_over_many_threads_miss_nothing() -> None:
    memory = Memory.make(16, 3)
    link = native_link(memory, threads=5)
    rows = [letters(link, owner) for owner in range(1, 17)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    memory.drafts[:] = A
    node = link.node(WALK)
    for _ in range(2000):
        link.push_batch(rows)
        node()
    assert link.stats.fills == 2000 * 16 * 4
    assert [row.fault for row in rows] == [""] * 16


def test_a_forked_process_does_its_rows_alone() -> None:
    memory = Memory.make(6, 3)
    link = native_link(memory, threads=3)
    rows = [letters(link, owner) for owner in range(1, 7)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    link.push_batch(rows)
    node = link.node(WALK)
    child = os.fork()
    if child == 0:
        node()
        done = memory.tags[0, :, 3].tolist() == [MaskStatus.OK] * 6
        link.close()
        os._exit(0 if done else 1)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended and status == 0
