"""CUDA graphs emulated on the CPU: records a step and replays it in place, with one thread per stream.

Addresses are fixed when the step is recorded. The tape enforces the rules of CUDA graphs, so that steps can be developed without a
GPU; it is about as fast as the eager step.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers, storage_key
from stepgraph.graphs.capture import BackendStats, Between, CaptureCheck, Event, Generators, Step, checked_loop_args
from stepgraph.graphs.context import COPY_STREAM, MAIN, NULL_CONTEXT, FirstError, temporarily_set
from stepgraph.graphs.errors import fail
from stepgraph.graphs.spans import RangeFactory, RecordedReport, Span
from stepgraph.graphs.tape.arena import Arena
from stepgraph.graphs.tape.player import Await, Delay, Item, ItemTimer, Tracer, Worker, make_report, stop_workers, stream_programs
from stepgraph.graphs.tape.recorder import Recorder, first_difference, record_perturbed
from stepgraph.graphs.tape.replay_ops import poison
from stepgraph.graphs.tape.reuse import check_second_run
from stepgraph.sampling.fields import check_value, one_of

_DEVICE = "device"
_FOLDER = str(Path(__file__).parents[1])  # of the package graphs
_local = threading.local()  # .recording: the capture in progress on this thread
_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()  # by id


class Tape:
    def __init__(self, backend: TapeBackend, recorder: Recorder, nbytes: int, seconds: float) -> None:
        self._backend = backend
        self._memory = [tensor for tensor, *_ in recorder.memory.intermediates.values()]
        self._keys = frozenset(recorder.memory.intermediates)
        self._reshaped = [restore for _, restore in recorder.reshaped.values()]
        self._programs = stream_programs(recorder, backend.delay, backend.verify_host_nodes, backend.stats)
        self._done = {stream: threading.Lock() for stream in self._programs if stream != MAIN}  # held while the stream runs
        self._locks = [*self._done.values(), *(item.lock for items in self._programs.values() for item in items if isinstance(item, Await))]
        self.current_items: dict[str, Item] = {}  # the current item of each running stream
        self._timed: ItemTimer | None = None  # of the running replay, if it is traced
        self._error: BaseException | None = None
        self._poisoned = False
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.report, self.rounds = make_report(recorder, nbytes, seconds), 0
        self._buffers, self._uses_generator = recorder.memory.buffers, recorder.draws
        self._host_node = next(((node.name, node.site) for node in recorder.nodes if node.kind == "host"), None)
        _tapes[id(self)] = self

    def replay(self, *, until: Tensor | None = None, limit: int | None = None, is_round: bool = True) -> None:
        run = self._run
        if until is not None or limit is not None:
            run = functools.partial(self._run_until, *checked_loop_args(self._buffers, until, limit, self._host_node, self._uses_generator))
        if not is_round:
            return self._backend.run(functools.partial(run, None))
        tracer = self._backend.tracer
        with NULL_CONTEXT if tracer is None else tracer.launching() as timed:
            self._backend.launch(functools.partial(run, timed), "replay()")
        self._backend.stats.replays += 1

    def owns(self, key: int) -> bool:
        """Whether the storage `key` is an intermediate of this tape."""
        return key in self._keys

    def free(self) -> None:
        self._memory, self._keys, self._reshaped, self._programs, self._done = [], frozenset(), [], {}, {}

    def _run_until(self, until: Tensor, limit: int, timed: ItemTimer | None) -> None:
        self.rounds = 0
        while self.rounds < limit and not (self.rounds and until.item()):
            self._run(timed)
            self.rounds += 1

    def _run(self, timed: ItemTimer | None) -> None:
        for stream, done in self._done.items():
            self._backend.worker(stream)  # starts its thread
            with done:  # after several interrupts a stream of the last replay may still run
                pass
        self._backend.replaying, self._timed = self, timed
        if self._backend.poison == "every" or not self._poisoned:
            poison(self._memory)
            self._poisoned = True
        self._error = None
        for restore in self._reshaped:
            restore()
        for lock in self._locks:  # also of an event that an interrupted replay did not receive
            lock.acquire(blocking=False)
        for stream in self._done:
            self._backend.worker(stream).submit(functools.partial(self._run_side, stream))
        self._run_stream(MAIN)
        for done in [*self._done.values()] * 2:  # again after an interrupt: the caller may change memory that a stream still uses
            try:
                with done:
                    pass
            except BaseException as interrupt:
                self._error = self._error or interrupt
        self._backend.replaying = None
        self._backend.stats.host_nodes += len(self.report.host_nodes)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run_stream(self, stream: str) -> None:
        (enabled, dtype), items = self._autocast, self._programs.get(stream, [])
        casts = enabled or torch.is_autocast_enabled("cpu")  # autocast is a setting of a thread, but belongs to the recording
        with torch.autocast("cpu", dtype=dtype, enabled=enabled) if casts else NULL_CONTEXT:
            for item in items if self._timed is None else self._timed(stream, items):
                self.current_items[stream] = item
                try:
                    item(self._error is not None)
                except BaseException as error:  # also KeyboardInterrupt: other streams still wait for this one
                    self._error = self._error or error
        self.current_items.pop(stream, None)

    def _run_side(self, stream: str) -> None:
        self._run_stream(stream)
        self._done[stream].release()


class TapeEvent:
    """A point in the launch order of a TapeBackend."""

    def __init__(self, backend: TapeBackend) -> None:
        self._backend = backend
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        _refuse_while_recording("Event.wait()")
        self._backend.stats.event_waits += 1
        tracer = self._backend.tracer
        with NULL_CONTEXT if tracer is None else tracer.waiting():
            reached = self.reached.wait(seconds)
        if reached:
            self._backend.errors.raise_first()
        return reached


class TapeBackend:
    """Records and replays on the CPU.

    asynchronous: replay on a device thread in launch order; the next call raises the first error, once.
    poison: "every" overwrites all intermediates before each replay, "first" before the first one.
    delay: called with the name of a host node before it, with the name of a stream before each of its segments, and, if asynchronous,
        with COPY_STREAM before each copy_aside.
    verify_host_nodes: find undeclared writes of host nodes to pinned buffers. By default on with poison="every", unless asynchronous,
        where the launching thread may write these buffers.
    """

    name, why_no_loops = "tape", ""
    device = torch.device("cpu")

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        poison: Literal["first", "every"] = "first",
        delay: Delay | None = None,
        verify_host_nodes: bool | None = None,
        ranges: RangeFactory | None = None,
    ) -> None:
        check_value("TapeBackend.poison", poison, one_of(("first", "every")))
        self.poison, self.delay = poison, delay
        self.verify_host_nodes = poison == "every" and not asynchronous if verify_host_nodes is None else verify_host_nodes
        self.stats, self.errors, self.ranges = BackendStats(wait_ns=0), FirstError(), ranges
        self.replaying: Tape | None = None  # the running tape
        self._tracer: Tracer | None = None
        self._arena = Arena()
        # The code of steps that ran twice. A later recording of it, such as one for another key, would find a kept tensor to be foreign.
        self._ran_again: set[object] = set()
        self._launch_lock = threading.RLock()  # recordings share intermediates, and a replay its locks
        self._workers = {name: Worker(name) for name in (_DEVICE, COPY_STREAM) if asynchronous}  # by stream
        self._device = self._workers.get(_DEVICE)
        self._last_copy: threading.Event | None = None  # at the end of the last copy_aside; refers to no backend, which would then live on
        self._finalizer = weakref.finalize(self, stop_workers, self._workers)
        self._finalizer.atexit = False  # at exit `close_at_exit` stops and joins each worker

    def capture(
        self, step: Step, buffers: StaticBuffers, *, check: CaptureCheck = "once", between: Between = None, generators: Generators = ()
    ) -> Tape:
        self._check_usable("capture()")
        check_value("TapeBackend.capture.check", check, one_of(("once", "twice")))
        if buffers.device.type != "cpu":
            raise ValueError(f"TapeBackend.capture: got buffers on {buffers.device}, expected cpu")
        self._drain()
        self.errors.raise_first()
        begin, before = time.perf_counter(), self._arena.nbytes
        record = functools.partial(self._record, step, buffers, generators, check == "twice")
        recorder = record()
        if check == "twice":
            if between is not None:
                between()
            second = record_perturbed(record, buffers)
            if (difference := first_difference(recorder.nodes, second.nodes)) is not None:
                raise difference
        return Tape(self, recorder, self._arena.nbytes - before, time.perf_counter() - begin)

    def _record(self, step: Step, buffers: StaticBuffers, generators: Generators, records_leaves: bool) -> Recorder:
        self._arena.restart()
        recorder = Recorder(buffers, generators, lambda key: any(tape.owns(key) for tape in _live_tapes()), self._arena, records_leaves)
        with temporarily_set(_local, "recording", recorder):
            recorder.record_step(step)
            function = getattr(step, "func", step)
            code, models = getattr(function, "__code__", None), getattr(getattr(function, "__self__", None), "models", ())
            packages = {type(model).__module__.partition(".")[0] for model in models if model is not None}
            # The rounds and prompts of engines. A second run takes time, so of the models only those from other packages get one.
            is_ours = code is not None and code.co_filename.startswith(_FOLDER) and packages <= {__name__.partition(".")[0]}
            if recorder.shares_intermediates or (not is_ours and (code is None or code not in self._ran_again)):
                check_second_run(recorder, step, lambda tensor: storage_key(tensor) in recorder.memory.intermediates)
                self._ran_again.add(code)
        return recorder

    def measure(self, step: Step, buffers: StaticBuffers) -> RecordedReport:
        with temporarily_set(self, "_arena", Arena()):
            return self.capture(step, buffers).report

    def run(self, function: Callable[[], object]) -> None:
        tracer = self.tracer
        self.launch(function if tracer is None else tracer.between_rounds(function), "run()")

    def copy_aside(self, function: Callable[[], object], *, after_launched: bool) -> TapeEvent:
        launched = self.event() if after_launched else None
        copied = TapeEvent(self)
        self._last_copy = copied.reached
        if self._device is None:
            self.launch(function, "copy_aside()")
            copied.reached.set()
        else:
            self._workers[COPY_STREAM].submit(functools.partial(self._copy, function, launched, copied))
        return copied

    def wait_for(self, copied: Event) -> None:
        assert isinstance(copied, TapeEvent)
        self.launch(copied.reached.wait, "wait_for()")

    def event(self) -> TapeEvent:
        self._check_usable("event()")
        event = TapeEvent(self)
        if self._device is None:
            event.reached.set()
        else:
            self._device.submit(event.reached.set)
        return event

    def synchronize(self) -> None:
        self._check_usable("synchronize()")
        self.stats.syncs += 1
        self._drain()
        self.errors.raise_first()

    def start_trace(self, first_round: int, rounds: int) -> None:
        if self._tracer is not None:
            raise RuntimeError("TapeBackend.start_trace(): a trace is already running")
        self._tracer = Tracer(first_round, rounds)

    def stop_trace(self) -> tuple[Span, ...]:
        tracer, self._tracer = self._tracer, None
        if self._finalizer.alive:  # if closed, close() has waited
            self.synchronize()
        return () if tracer is None else tuple(tracer.spans)

    def close(self) -> None:
        if not self._finalizer.alive:
            return
        self._drain()
        self._finalizer()
        for worker in self._workers.values():
            worker.join()
        for tape in [tape for tape in _live_tapes() if tape._backend is self]:
            tape.free()
        if (error := self.errors.take()) is not None:
            warnings.warn(f"TapeBackend.close(): an error was never raised: {error}", RuntimeWarning, stacklevel=2)

    def active_work(self) -> tuple[str, ...]:
        running = self.replaying
        return tuple(f"stream {stream}: {item}" for stream, item in sorted(dict(running.current_items).items())) if running else ()

    def close_without_waiting(self) -> None:
        if self._finalizer.detach() is None:
            return
        if self._device is None:
            stop_workers(self._workers)
        else:
            self._device.submit(functools.partial(stop_workers, self._workers))  # after the launched work, which needs the workers

    # for tapes and events of this backend

    @property
    def tracer(self) -> Tracer | None:
        """The active tracer; None without a trace, or if it has all its rounds."""
        return None if self._tracer is None or self._tracer.full else self._tracer

    def launch(self, job: Callable[[], object], what: str) -> None:
        """Run `job` in launch order: now, or on the device thread."""
        self._check_usable(what)
        self.errors.raise_first()
        if self._device is None:
            with self._launch_lock, torch.no_grad():
                job()
        else:
            self._device.submit(functools.partial(self._run_and_keep_error, job))

    def worker(self, stream: str) -> Worker:
        """The thread of a side stream, started on first use and shared by all tapes."""
        if (key := f"stream {stream}") not in self._workers:  # a step may name a stream like a thread of the backend
            self._workers[key] = Worker(stream)
        return self._workers[key]

    def _run_and_keep_error(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # raised by the next call
            self.errors.store(error)

    def _copy(self, function: Callable[[], object], launched: TapeEvent | None, copied: TapeEvent) -> None:
        if launched is not None:
            launched.reached.wait()
        if self.delay is not None:
            self._run_and_keep_error(functools.partial(self.delay, COPY_STREAM))
        self._run_and_keep_error(function)
        copied.reached.set()

    def _drain(self) -> None:
        self.event().reached.wait()
        if self._last_copy is not None:
            self._last_copy.wait()

    def _check_usable(self, what: str) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"TapeBackend.{what}: the backend is closed")
        _refuse_while_recording(what)


def _live_tapes() -> list[Tape]:
    return [tape for ref in _tapes.valuerefs() if (tape := ref()) is not None]  # a snapshot: other threads capture meanwhile


def _refuse_while_recording(what: str) -> None:
    recorder: Recorder | None = getattr(_local, "recording", None)
    if recorder is not None:
        with recorder.unrecorded():
            raise fail("nested-capture" if what == "capture()" else "host-sync", f"{what} inside a step that is being captured")
