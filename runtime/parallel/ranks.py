"""The ranks of a tensor-parallel engine, one process each: started by the first rank, or by torchrun.

The first rank sends messages to the others through shared memory, and a socket to each wakes it. The memory has no name, so nothing of it
is left when the processes end, however they end. Positions are sent through the sockets, which orders the accesses: a
reader has read up to its last answer, and the first rank has written up to its last notice.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import mmap
import multiprocessing.connection
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.graphs.layers.parallel import RankGroups, forget_groups, gather, register_group
from stepgraph.graphs.layers.rank_sums import choose_sums
from stepgraph.runtime.printing import print_error
from stepgraph.sampling.fields import message_of

TIMEOUT_SECONDS = 60.0  # where EngineConfig.round_timeout_seconds is None
START_SECONDS = 600.0  # for a process to start, and to load its part of the model
END_SECONDS = 2.0  # for a process to end by itself
STEPS_PER_COMPARISON = 16  # steps between two comparisons of results, if the first rank decides each step
RING_BYTES = 1 << 20  # most bytes that the first rank writes ahead of a reader
_NUMBER_BYTES = 8  # bytes of a number in messages
_GROUPS = ("graph", "eager", "control")  # on GPUs the first two use NCCL
_ERROR = ".error"  # suffix of a file with the error of a rank
CAPTURE = "capture"  # a message: record all graphs
RANK_MODULE = "stepgraph.runtime.parallel.rank"
Link = multiprocessing.connection.Connection


class RankError(RuntimeError):
    """The ranks of a tensor-parallel engine differ, or one of them is lost or late."""


class Ranks:
    """This process as one of `size` ranks. groups: for recorded sums, for other sums, and for comparisons between ranks.

    writer, processes: writer of messages to the other ranks, and their processes, if this rank has started them. rank0_decides: whether the
    first rank decides each step, as after `start`; otherwise every rank runs the same program.
    """

    def __init__(self, rank: int, groups: Sequence[dist.ProcessGroup], seconds: float, rank0_decides: bool = True) -> None:
        self._graph, self._eager, self._control = graph, eager, _ = groups
        self.rank, self.size, self.timeout_seconds, self.rank0_decides = rank, graph.size(), seconds, rank0_decides
        self.groups, self._notes = RankGroups(register_group(graph, seconds), register_group(eager, seconds)), hashlib.sha256()
        weakref.finalize(self, forget_groups, self.groups).atexit = False
        self.writer: MessageWriter | None = None
        self.processes = list[subprocess.Popen[bytes]]()
        self.close: Callable[[], object] = lambda: None
        self.note_of_sums = ""  # empty until sums were chosen

    @classmethod
    def join(cls, size: int, seconds: float, on_cuda: bool = False) -> Ranks:
        """Join the processes of torchrun. ValueError if their number is not `size`."""
        timeout = datetime.timedelta(seconds=max(seconds, START_SECONDS))
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timeout)
        if (found := dist.get_world_size()) != size:
            raise ValueError(f"tensor_parallel: got {size} with {found} processes, expected {found}")
        with _errors_only():
            groups = [dist.new_group(backend="nccl" if on_cuda and name != "control" else "gloo", timeout=timeout) for name in _GROUPS]
        return cls(dist.get_rank(), groups, seconds, rank0_decides=False)

    @classmethod
    def start(cls, size: int, seconds: float, arguments: object, on_cuda: bool = False) -> Ranks:
        """Starts a process for every further rank, which loads its part of the model as `arguments` describe."""
        folder, processes, links = tempfile.mkdtemp(prefix="stepgraph-ranks-"), list[subprocess.Popen[bytes]](), list[Link]()
        file = anonymous_file()
        try:
            for rank in range(1, size):
                path = Path(folder, f"rank-{rank}")  # not through the socket, which holds little until the rank reads
                path.write_bytes(pickle.dumps((rank, size, seconds, folder, on_cuda, torch.get_num_threads(), arguments)))
                processes.append(_start_process(links, file, path, seconds))
            _wait_for_start(links)
            writer, ranks = MessageWriter(file, links, seconds), cls.meet(0, size, seconds, folder, on_cuda)
        except BaseException:
            _end_processes(os.getpid(), processes, links, folder)
            raise
        finally:
            os.close(file)
        ranks.writer, ranks.processes = writer, processes
        ranks.close = weakref.finalize(ranks, _end_processes, os.getpid(), processes, links, folder)
        return ranks

    @classmethod
    def meet(cls, rank: int, size: int, seconds: float, folder: str, on_cuda: bool = False) -> Ranks:
        """Connects the ranks through a file in this folder. RankError if one is lost or late."""
        with _as_rank_error(rank, size, seconds), _errors_only():
            timeout = max(seconds, START_SECONDS)
            groups = [process_group(f"{folder}/{name}", rank, size, timeout, on_cuda and name != "control") for name in _GROUPS]
        return cls(rank, groups, seconds)

    def choose_sums(self, like: Tensor) -> None:
        """Choose the sums of tensors on a GPU. Every rank must call this. RankError if no sum works."""
        with _as_rank_error(self.rank, self.size, START_SECONDS):
            self.note_of_sums = f"sums over ranks: {choose_sums(self, self.groups, like)}"

    def exchange(self, value: object) -> list[Any]:
        """The `value` of every rank, copied by pickle."""
        contents = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(contents)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(contents)] = contents
        found = self.gather(padded)
        return [pickle.loads(bytes(each[:length].numpy())) for each, length in zip(found, lengths, strict=True)]

    def abort(self) -> None:
        """Close, and end sums that wait on a GPU for a rank that is lost."""
        self.close()
        for group in (self._graph, self._eager):
            if hasattr(group, "abort"):  # of NCCL
                group.abort()

    def publish(self, message: object) -> None:
        """Send a message to the ranks that this one has started."""
        if self.writer is None:
            return
        try:
            self.writer.send(pickle.dumps(message))
        except (OSError, EOFError) as error:
            raise RankError(f"rank 0 of {self.size}: another rank is lost, or does not read: {error}") from error

    def gather(self, values: Tensor, seconds: float = START_SECONDS) -> Tensor:
        """[size, ...]: `values` of every rank. RankError if a rank is lost, or does not call it in time."""
        with _as_rank_error(self.rank, self.size, seconds):
            return gather(self._control, values, seconds)

    def note(self, value: object) -> None:
        """Add to what `require_same_notes` compares."""
        self._notes.update(repr(value).encode())

    def require_same_notes(self) -> None:
        """RankError unless every rank has made the same notes."""
        self.require_equal("the requests or the results of earlier steps", self._notes.digest(), self.timeout_seconds)

    def require_equal(self, what: str, value: bytes, seconds: float = START_SECONDS) -> None:
        """RankError unless `value` is the same on every rank."""
        digest = hashlib.sha256(value).digest()
        found = self.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), seconds)
        differing = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
        if differing:
            raise RankError(f"rank {self.rank} of {self.size}: {what} differ between rank 0 and ranks {differing}")


def ranks_of(target: object) -> Ranks | None:
    """The ranks of a tensor-parallel target; None for another target, whose `ranks` may be anything."""
    ranks = getattr(target, "ranks", None)
    return ranks if isinstance(ranks, Ranks) else None


def under_torchrun() -> bool:
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def process_group(path: str, rank: int, size: int, seconds: float, on_cuda: bool = False) -> dist.ProcessGroup:
    """Connects processes through a new file; on GPUs, this process uses its current GPU. torch's default group is not changed."""
    untyped: Any = dist
    store, timeout = untyped.FileStore(path, size), datetime.timedelta(seconds=seconds)
    group: dist.ProcessGroup
    if on_cuda:
        options = untyped.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = untyped.ProcessGroupNCCL(store, rank, size, options)
    else:
        group = untyped.ProcessGroupGloo(store, rank, size, timeout)
    return group


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """New groups of NCCL only report errors: by default a late sum ends the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = before or "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@contextlib.contextmanager
def _as_rank_error(rank: int, size: int, seconds: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"rank {rank} of {size}: another rank is lost, or did not answer within {seconds:g} s: {error}") from error


def _start_process(links: list[Link], file: int, arguments: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Start a process and append its link. The process ends when the link closes, also if this process is killed."""
    own, other = socket.socketpair()
    with other:
        # A stopped rank reads nothing, so its socket fills and sending must time out.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds) + 1, 0))
        links.append(Link(own.detach()))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        passed = [other.fileno(), file]
        command = [sys.executable, "-m", RANK_MODULE, *map(str, passed), str(arguments)]
        return subprocess.Popen(command, env=environment, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait_for_start(links: Sequence[Link]) -> None:
    """Let the processes connect once all have started: a connection waits long for a process that has ended."""
    try:
        for link in links:
            if not link.poll(START_SECONDS):
                raise RankError(f"a rank did not start within {START_SECONDS:g} s")
            link.recv_bytes()
        for link in links:
            link.send_bytes(b"connect")
    except (EOFError, OSError):
        raise RankError("a rank ended before it had loaded its part of the model; its error is on stderr") from None


def keep_error(arguments: str, text: str) -> None:
    """Keep the error of a started rank until the first one ends the ranks, as both may have the same one. arguments: the rank's file."""
    part = Path(f"{arguments}.part")
    with contextlib.suppress(OSError):  # the folder was removed: the first rank has ended
        part.write_text(text, encoding="utf-8")
        part.rename(f"{arguments}{_ERROR}")  # complete, even if the first rank ends this process


def _end_processes(owner: int, processes: list[subprocess.Popen[bytes]], links: list[Link], folder: str) -> None:
    """Close the links, which ends the processes, and kill those that do not end. Prints their errors, except one handled now."""
    for link in links:
        link.close()
    if os.getpid() != owner:
        return  # in a fork: the processes belong to its parent
    for process in processes:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    error, any_rank = sys.exc_info()[1], re.compile(r"\brank \d+ of\b")  # a difference is the same error on every rank
    known = None if error is None else any_rank.sub("", f"{type(error).__name__}: {message_of(error)}")
    for text in [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob(f"*{_ERROR}"))]:
        if known is None or known not in any_rank.sub("", text):
            print_error(text.rstrip())
    shutil.rmtree(folder, ignore_errors=True)


def anonymous_file(size: int = RING_BYTES) -> int:
    if sys.platform == "linux":
        found = os.memfd_create("stepgraph-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            found = os.dup(file.fileno())
    os.truncate(found, size)
    return found


class MessageWriter:
    """links: to the readers. seconds: time limit for a reader to make room."""

    def __init__(self, file: int, links: Sequence[Link], seconds: float) -> None:
        self._memory, self._links, self._seconds = mmap.mmap(file, 0), links, seconds
        self._written, self._read = 0, [0] * len(links)  # bytes since the start

    def send(self, message: bytes) -> None:
        """OSError or EOFError if a reader is lost, or makes no room in time."""
        size, rest = len(self._memory), memoryview(_number(len(message)) + message)
        while rest:
            for index, link in enumerate(self._links):
                while self._written - self._read[index] == size:
                    if not link.poll(self._seconds):
                        raise TimeoutError(f"a rank has read nothing for {self._seconds:g} s")
                    self._read[index] = int.from_bytes(link.recv_bytes(), "little")
            offset, room = self._written % size, size - (self._written - min(self._read))
            part = rest[: min(room, size - offset)]
            self._memory[offset : offset + len(part)] = part
            self._written, rest = self._written + len(part), rest[len(part) :]
            for link in self._links:
                link.send_bytes(_number(self._written))


class MessageReader:
    def __init__(self, file: int, link: Link) -> None:
        self._memory, self._link = mmap.mmap(file, 0), link
        self._written = self._read = self._acknowledged = 0

    def receive(self) -> bytes:
        """The next message. EOFError or OSError if the first rank has ended."""
        return self._take(int.from_bytes(self._take(_NUMBER_BYTES), "little"))

    def _take(self, count: int) -> bytes:
        found, size = bytearray(), len(self._memory)
        while (missing := count - len(found)) > 0:
            if self._read == self._written:
                self._written = int.from_bytes(self._link.recv_bytes(), "little")
            offset = self._read % size
            part = self._memory[offset : min(size, offset + min(missing, self._written - self._read))]
            found += part
            self._read += len(part)
            if self._read - self._acknowledged >= size // 4:  # rarely, but before the writer runs out of room
                self._link.send_bytes(_number(self._read))
                self._acknowledged = self._read
        return bytes(found)


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "little")
