"""Messages of the first rank through shared memory: all arrive whole and in order, whatever their sizes, and a reader that is lost or
stopped is an error of the writer."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepgraph.runtime.parallel import ranks
from stepgraph.runtime.parallel.ranks import (
    RANK_MODULE,
    Link,
    MessageReader,
    MessageWriter,
    RankError,
    Ranks,
    _end_processes,
    anonymous_file,
    keep_error,
)
from tests.helpers.command_models import model_folder
from tests.helpers.parallel_program import open_engine

SECONDS = 0.3


@contextlib.contextmanager
def connected(size: int, readers: int) -> Iterator[tuple[MessageWriter, list[Link], list[MessageReader]]]:
    """A writer, the readers' ends of the links, and the readers."""
    file, pairs = anonymous_file(size), [socket.socketpair() for _ in range(readers)]
    ends = [[Link(each.detach()) for each in side] for side in zip(*pairs, strict=True)]
    try:
        yield MessageWriter(file, ends[0], SECONDS), ends[1], [MessageReader(file, link) for link in ends[1]]
    finally:
        os.close(file)
        for link in (*ends[0], *ends[1]):
            link.close()


@pytest.mark.parametrize("size", [4096, 8192, 1 << 20])
def test_every_reader_gets_the_messages_in_order(size: int) -> None:
    """Also messages larger than the shared memory, and with slow readers."""
    rng = random.Random(size)
    sent = [rng.randbytes(rng.choice((0, 1, 60, 300, size // 2, size - 8, size, 3 * size + 5))) for _ in range(60)]
    found: list[list[bytes]] = [[], [], []]

    def read(reader: MessageReader, into: list[bytes], delay: float) -> None:
        while len(into) < len(sent):
            into.append(reader.receive())
            time.sleep(delay)

    with connected(size, len(found)) as (writer, _, readers):
        threads = [
            threading.Thread(target=read, args=(reader, into, delay), daemon=True)
            for reader, into, delay in zip(readers, found, (0, 0.001, 0.003), strict=True)
        ]
        for thread in threads:
            thread.start()
        for message in sent:
            writer.send(message)
        for thread in threads:
            thread.join(30)
    assert found == [sent] * 3


def test_a_reader_that_does_not_read_ends_the_writer_in_time() -> None:
    with connected(4096, 2) as (writer, _, _):
        writer.send(bytes(4000))
        since = time.monotonic()
        with pytest.raises(TimeoutError, match=r"a rank has read nothing for 0\.3 s"):
            writer.send(bytes(4000))
        assert SECONDS <= time.monotonic() - since < 20 * SECONDS


@pytest.mark.parametrize("written", [0, 4096 - 8])
def test_a_lost_reader_ends_the_writer(written: int) -> None:
    """While there is room, and while the writer waits for room."""
    with connected(4096, 1) as (writer, (link,), _):
        if written:
            writer.send(bytes(written))
        link.close()
        with pytest.raises((OSError, EOFError)) as raised:
            writer.send(b"x")
        assert not isinstance(raised.value, TimeoutError)


def test_a_reader_ends_with_the_writer() -> None:
    with connected(4096, 1) as (writer, _, (reader,)):
        writer.send(b"last")
        writer._links[0].close()
        assert reader.receive() == b"last"
        with pytest.raises(EOFError):
            reader.receive()


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


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list the memory of a process")
def test_the_memory_of_an_engine_is_shared_and_has_no_name() -> None:
    """So no shared memory is left when a process is killed."""
    with open_engine(model_folder(), "none", 2) as engine:
        assert engine._parts.ranks is not None
        found = list[set[str]]()
        for pid in ("self", *(process.pid for process in engine._parts.ranks.processes)):
            lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "stepgraph-ranks" in line]
            assert all(line.split()[1] == "rw-s" and line.endswith("/memfd:stepgraph-ranks (deleted)") for line in lines)
            found.append({line.split()[4] for line in lines})
        assert len(set.intersection(*found)) == 1, "all ranks map one file; this process may still map files of other tests"
        assert engine.generate([1, 2, 3], max_new_tokens=4).tokens
