"""The recorded rounds and prompt chunks of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast, get_args

from tqdm import tqdm

from stepgraph.graphs.backends import EagerStep
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Recorded, Step
from stepgraph.graphs.errors import CaptureError, step_errors
from stepgraph.graphs.graph_key import FULL, Drafting, GraphKey, GraphTable
from stepgraph.graphs.key_sets import PromptKey, checked_buckets, graph_keys, host_buckets, prompt_keys
from stepgraph.graphs.memory import resident_bytes
from stepgraph.graphs.prefill import Prompts
from stepgraph.graphs.recording import CaptureBudget, CaptureReport, FailedKey, Key, OnFailure
from stepgraph.graphs.spans import RecordedReport
from stepgraph.sampling.fields import BOOL, FUNCTION, Check, check_members, check_value, instance_of, one_of, optional, whole

REQUESTED = "EngineConfig.eager"
_DRAFTING = Check(lambda value: isinstance(value, tuple) and all(isinstance(each, Drafting) for each in value) and value != (), "Draftings")


class GraphSet(GraphTable):
    """One recording per key of `buckets`, and of `prompts` if it is given. `step_of(key)` is the function to record.

    on_failure: with "eager", a key that cannot be recorded is listed in the report, and its batches use another key or run eagerly.
    capture_bytes: limit of static buffers and recordings together; None: no limit.
    device_grammars: record graphs for batches whose grammars are all on the device, as well. drafting: each has its graphs.
    """

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        step_of: Callable[[GraphKey], Step],
        buckets: Sequence[int],
        on_failure: OnFailure = "raise",
        capture_bytes: int | None = None,
        device_grammars: bool = False,
        drafting: Sequence[Drafting] = (FULL,),
        prompts: Prompts | None = None,
    ) -> None:
        check_members("GraphSet.backend", backend, Backend)
        check_value("GraphSet.buffers", buffers, instance_of(StaticBuffers, "StaticBuffers"))
        check_value("GraphSet.step_of", step_of, FUNCTION)
        check_value("GraphSet.on_failure", on_failure, one_of(get_args(OnFailure)))
        check_value("GraphSet.capture_bytes", capture_bytes, optional(whole(1)))
        check_value("GraphSet.device_grammars", device_grammars, BOOL)
        check_value("GraphSet.drafting", drafting, _DRAFTING)
        check_value("GraphSet.prompts", prompts, optional(instance_of(Prompts, "Prompts")))
        self._device_grammars, self._drafting, self._on_failure, self._capture_bytes = device_grammars, drafting, on_failure, capture_bytes
        self._backend, self._buffers, self._step_of, self._prompts = backend, buffers, step_of, prompts
        self._prompt_keys = prompt_keys(prompts.limits) if prompts else ()
        sizes = checked_buckets(buckets)
        super().__init__(sizes, host_buckets(sizes) if device_grammars else sizes, self.record_one)
        self.eager: Mapping[GraphKey, str] = {}  # keys that run eagerly, and the reason

    def capture(self, notes: tuple[str, ...] = (), eager: bool = False, greedy_only: bool = False, progress: bool = False) -> CaptureReport:
        """Record every key, largest first, so that the small graphs use the memory of the large ones. An error leaves nothing recorded."""
        if self.captured:
            raise RuntimeError("GraphSet.capture(): already captured; create a new engine for other limits")
        keys = graph_keys(self.buckets, greedy_only, self._device_grammars, self._drafting)
        every: list[Key] = [*self._prompt_keys, *keys]
        started, before = time.perf_counter(), resident_bytes()
        recorded, failures = dict[Key, Recorded](), dict[Key, str]()
        budget = CaptureBudget(self._capture_bytes, self._buffers.nbytes)
        if budget.limited and not eager:
            notes += (self._estimated(budget, every),)
        for key in tqdm(every, desc="capture", unit="graph", disable=not progress, leave=False):
            try:
                recorded[key] = self._run_eagerly(key) if eager else self._record_within(key, budget)
            except CaptureError as error:
                if self._on_failure == "raise":
                    raise
                failures[key] = str(error)
        failed = tuple(FailedKey(key, reason, _larger(key, recorded)) for key, reason in failures.items())
        after = resident_bytes()
        report = CaptureReport(
            backend=self._backend.name,
            mode="eager" if eager else "captured",
            notes=notes,
            keys=tuple((key, one.report) for key, one in recorded.items() if isinstance(key, GraphKey)),
            prompts=tuple((key, one.report) for key, one in recorded.items() if isinstance(key, PromptKey)),
            buffer_bytes=self._buffers.nbytes,
            resident_bytes=None if before is None or after is None else max(0, after - before),
            seconds=time.perf_counter() - started,
            failed=failed,
        )
        without = [one for one in failed if one.served_by is None]
        self._recorded = recorded | {one.key: self._run_eagerly(one.key) for one in without}
        self._serving, self._keys = {one.key: one.served_by for one in failed if one.served_by is not None}, {}
        not_captured = {one.key: f"not captured: {one.why.splitlines()[0]}" for one in without if isinstance(one.key, GraphKey)}
        self.eager = dict.fromkeys(keys, REQUESTED) if eager else not_captured
        return report

    @property
    def without_host_nodes(self) -> frozenset[GraphKey]:
        """The keys of which a launch can run many rounds."""
        recorded = ((key, one) for key, one in self._recorded.items() if isinstance(key, GraphKey) and key not in self.eager)
        return frozenset(key for key, one in recorded if not one.report.host_nodes)

    def prompt_graph(self, count: int) -> Recorded | None:
        """The graph for a chunk of `count` prompt tokens; None without `prompts`."""
        key = min((key for key in self._prompt_keys if key.tokens >= count), default=None)
        return None if key is None else self[self._serving.get(key, key)]

    def record_one(self, key: Key) -> Recorded:
        """Record a key while rounds of others may be in flight."""
        with step_errors(f"capture of {key}", self._buffers.device):
            return self._backend.capture(self.step(key), self._buffers)

    def step(self, key: Key) -> Step:
        return self._step_of(key) if isinstance(key, GraphKey) else cast("Prompts", self._prompts).step(key)

    def _run_eagerly(self, key: Key) -> EagerStep:
        step = self.step(key)

        def run(buffers: StaticBuffers) -> None:
            with step_errors(str(key), buffers.device):
                step(buffers)

        return EagerStep(self._backend, run, self._buffers)

    def _record_within(self, key: Key, budget: CaptureBudget) -> Recorded:
        budget.check_next(key)
        recorded = self.record_one(key)
        budget.add(key, recorded.report.nbytes, recorded.report.host_bytes)
        return recorded

    def _measure(self, key: Key) -> RecordedReport:
        with step_errors(f"capture of {key}", self._buffers.device):
            return self._backend.measure(self.step(key), self._buffers)

    def _estimated(self, budget: CaptureBudget, keys: Sequence[Key]) -> str:
        """A note with the estimated memory, from the two smallest keys of the largest kind, the smallest key, and those of prompts."""
        rounds = [key for key in reversed(keys) if isinstance(key, GraphKey)]
        probes = [key for key in rounds if key.kind == rounds[-1].kind][:2]
        try:
            reports = {key: self._measure(key) for key in (*probes, rounds[0])}
            prompts: dict[Key, int] = {key: self._measure(key).nbytes for key in keys if isinstance(key, PromptKey)}
            objects = reports[probes[0]].host_bytes + reports[rounds[0]].host_bytes
            budget.learn([(key.rows, reports[key].nbytes) for key in probes], prompts, objects // 2)
        except CaptureError:
            if self._on_failure == "raise":
                raise
            return "memory of the graphs: no estimate, because the smallest graphs cannot be captured"
        if self._on_failure == "raise":
            budget.check_all(keys)
        return f"memory: about {budget.estimate(keys):,} of at most {self._capture_bytes:,} bytes, static buffers included"


def _larger(key: Key, recorded: Mapping[Key, Recorded]) -> Key | None:
    """The next larger key of the same kind that is recorded."""
    return min((other for other in recorded if other.kind == key.kind and other.rows > key.rows), default=None)
