"""Messages of the first rank: all arrive whole and in order, whatever their sizes, and a reader that is lost or stopped is an error of the
first rank. The start of ranks, and their errors."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from stepgraph.runtime.parallel import ranks
from stepgraph.runtime.parallel.ranks import RANK_MODULE, Link, RankError, Ranks, _end_processes, _start_process, keep_error

SECONDS = 0.3


READER = """
import hashlib, multiprocessing.connection, sys, time

link, kind, read = multiprocessing.connection.Connection(int(sys.argv[1])), sys.argv[2], hashlib.sha256()
if kind == "stopped":
    time.sleep(60)
while kind != "lost" and (message := link.recv_bytes()) != END:
    read.update(message)
    time.sleep(0.003 * (kind == "slow"))
link.send_bytes(read.digest())
"""


@pytest.fixture
def first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    """Makes the first rank, with a process for each other one, which reads messages up to the empty one and answers with their hash."""
    (tmp_path / "reader.py").write_text(READER.replace("END", repr(pickle.dumps(b""))), encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ranks, "RANK_MODULE", "reader")
    links, processes = list[Link](), list[subprocess.Popen[bytes]]()

    def make(*kinds: str) -> Ranks:
        first = Ranks(0, [dist.ProcessGroup(0, 1 + len(kinds))] * 3, SECONDS)
        processes.extend(_start_process(links, Path(kind), SECONDS) for kind in kinds)
        first.links = links
        return first

    yield make
    for process in processes:
        process.kill()
        process.wait()
    for link in links:
        link.close()


def test_every_rank_gets_the_messages_in_order(first_rank: Callable[..., Ranks]) -> None:
    """Also messages larger than the buffer of a socket, and with a slow reader."""
    first, rng, sent = first_rank("quick", "slow"), random.Random(1), hashlib.sha256()
    for size in [*rng.choices((1, 60, 300, 70_000, 1 << 20), k=60), 0]:
        message = rng.randbytes(size)
        first.publish(message)
        sent.update(pickle.dumps(message) if message else b"")
    assert [link.recv_bytes() for link in first.links] == [sent.digest()] * 2


def test_a_rank_that_does_not_read_is_an_error_in_time(first_rank: Callable[..., Ranks]) -> None:
    first, since = first_rank("quick", "stopped"), time.monotonic()
    with pytest.raises(RankError, match=r"another rank is lost, or does not read: it has read nothing for 0\.3 s"):
        first.publish(bytes(1 << 22))
    assert SECONDS <= time.monotonic() - since < 20 * SECONDS


def test_a_message_to_a_lost_rank_is_an_error(first_rank: Callable[..., Ranks]) -> None:
    first = first_rank("lost")
    first.links[0].recv_bytes()
    with contextlib.suppress(EOFError):
        first.links[0].recv_bytes()
    with pytest.raises(RankError, match=r"another rank is lost, or does not read: .*Broken pipe"):
        first.publish(b"x")


@pytest.mark.parametrize("module", ["this", pytest.param(RANK_MODULE, marks=pytest.mark.slow)])
def test_arguments_larger_than_a_socket_wait_for_a_rank_that_starts(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first module ends at once, the other one when it has read the arguments, which are wrong."""
    monkeypatch.setattr(ranks, "RANK_MODULE", module)
    with pytest.raises(RankError, match="a rank ended before it had loaded its part of the model"):
        Ranks.start(2, 0.0, bytes(1 << 21))


def test_a_rank_that_ends_before_another_has_started_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connect at the same time, because a connection would wait for the lost rank."""
    program = "import multiprocessing.connection, os, sys, time\ntry:\n    os.mkdir(__file__ + '.x')\nexcept OSError:\n    time.sleep(1)\n"
    program += "multiprocessing.connection.Connection(int(sys.argv[1])).send_bytes(b'started')"
    (tmp_path / "short_rank.py").write_text(program, encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ranks, "RANK_MODULE", "short_rank")
    monkeypatch.setattr(ranks, "START_SECONDS", 5.0)
    with pytest.raises(RankError, match="a rank ended before it had loaded its part of the model"):
        Ranks.start(3, 0.0, None)


@pytest.mark.parametrize(("raised", "printed"), [("rank 0 of 2: the configs differ", False), ("rank 0 of 2: another rank is lost", True)])
def test_a_refusal_of_a_rank_is_one_line_unless_the_caller_gets_the_same_one(
    raised: str, printed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keep_error(str(tmp_path / "rank-1"), "RankError: rank 1 of 2: the configs differ")
    try:
        raise RankError(raised)
    except RankError:
        _end_processes(os.getpid(), [], [], str(tmp_path))
    assert capfd.readouterr().err == printed * "RankError: rank 1 of 2: the configs differ\n"
