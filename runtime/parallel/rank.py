"""The program of a rank that the first one has started: loads its part of the model, and makes the steps that the first rank decides."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import select
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from stepgraph.runtime.engine import Engine
from stepgraph.runtime.parallel.loading import load_rank
from stepgraph.runtime.parallel.lockstep import LockstepQueue, StepDecision
from stepgraph.runtime.parallel.ranks import CAPTURE, Link, MessageReader, RankError, Ranks, keep_error
from stepgraph.runtime.request import Job
from stepgraph.sampling.fields import message_of


def follow(link: Link, file: int, path: str) -> None:
    rank, size, seconds, folder, on_cuda, threads, arguments = pickle.loads(Path(path).read_bytes())
    threading.Thread(target=_exit_when_closed, args=(link,), daemon=True).start()
    messages = MessageReader(file, link)
    os.close(file)
    torch.set_num_threads(threads)

    def join() -> Ranks:
        link.send_bytes(b"started")
        link.recv_bytes()
        return Ranks.meet(rank, size, seconds, folder, on_cuda)

    loaded = load_rank(join, rank if on_cuda else None, *arguments)
    engine = Engine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config)
    jobs: dict[int, Job] = {}  # by the ids of the first rank
    while True:
        try:
            message = pickle.loads(messages.receive())
        except (EOFError, ConnectionError):  # the first rank has ended
            os._exit(0)
        if message == CAPTURE:
            engine.capture()
            continue
        _apply(engine, message, jobs, seconds)
        engine.step()
        for job_id in [job_id for job_id, job in jobs.items() if job.finished]:
            del jobs[job_id]


def _apply(engine: Engine, decision: StepDecision, jobs: dict[int, Job], seconds: float) -> None:
    assert isinstance(engine.queue, LockstepQueue)
    for job_id, prompt, options, engine.queue.published_turn in decision.submitted:
        jobs[job_id] = engine.submit(prompt, **options)
    for job_id in decision.cancelled:
        engine.cancel(jobs[job_id])
    end = time.monotonic() + seconds
    for job_id, failed in decision.admissible:
        queued = engine.queue.unfinished[jobs[job_id].id]
        while not queued.ready:
            if time.monotonic() > end:
                raise RankError(f"the grammar of a job that the first rank has compiled is not ready after {seconds:g} s")
            engine.queue.wake.wait(0.01)
        if failed != bool(queued.error):
            raise RankError(f"a grammar compiled on one rank only: {queued.error or 'it failed on the first rank'}")
        engine.queue.admissible.add(queued.job.id)


def _exit_when_closed(link: Link) -> None:
    """End the process when the link closes, even if the main thread waits."""
    poller = select.poll()
    poller.register(link, 0)  # poll() always reports that the other end is closed
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    try:
        follow(multiprocessing.connection.Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
    except BaseException as error:
        is_refusal = isinstance(error, (RankError, ValueError))  # whose message says what is wrong, and where
        keep_error(sys.argv[3], f"{type(error).__name__}: {message_of(error)}" if is_refusal else traceback.format_exc())
        os._exit(1)  # the interpreter's exit would wait for the threads of a hanging sum
