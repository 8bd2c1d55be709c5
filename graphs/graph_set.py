"""The recorded rounds and prompt chunks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast, get_args

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Recorded, Step
from stepgraph.graphs.graph_key import FULL, Drafting, GraphKey, GraphTable
from stepgraph.graphs.key_sets import checked_buckets, graph_keys, host_buckets, prompt_keys
from stepgraph.graphs.prefill import Prompts
from stepgraph.graphs.recording import CaptureReport, Key, KeyRecorder, OnFailure
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
        self._device_grammars, self._drafting = device_grammars, drafting
        self._prompts = prompt_keys(prompts.limits) if prompts else ()
        sizes = checked_buckets(buckets)

        def step(key: Key) -> Step:
            return step_of(key) if isinstance(key, GraphKey) else cast("Prompts", prompts).step(key)

        self._recorder = KeyRecorder(backend, buffers, step, on_failure, capture_bytes)
        super().__init__(sizes, host_buckets(sizes) if device_grammars else sizes, self._recorder.record_one)
        self.eager: Mapping[GraphKey, str] = {}  # keys that run eagerly, and the reason

    def capture(self, notes: tuple[str, ...] = (), eager: bool = False, greedy_only: bool = False, progress: bool = False) -> CaptureReport:
        """Record every key, largest first, so that the small graphs use the memory of the large ones. An error leaves nothing recorded."""
        if self.captured:
            raise RuntimeError("GraphSet.capture(): already captured; create a new engine for other limits")
        keys = graph_keys(self.buckets, greedy_only, self._device_grammars, self._drafting)
        every: list[Key] = [*self._prompts, *keys]
        recorded, report = self._recorder.record(every, notes, eager, progress)
        self._recorded = dict(recorded.items())
        self._serving = {one.key: one.served_by for one in report.failed if one.served_by is not None}
        self._keys = {}
        without = [one for one in report.failed if one.served_by is None]
        failed = {one.key: f"not captured: {one.why.splitlines()[0]}" for one in without if isinstance(one.key, GraphKey)}
        self.eager = dict.fromkeys(keys, REQUESTED) if eager else failed
        return report

    @property
    def without_host_nodes(self) -> frozenset[GraphKey]:
        """The keys of which a launch can run many rounds."""
        recorded = ((key, one) for key, one in self._recorded.items() if isinstance(key, GraphKey) and key not in self.eager)
        return frozenset(key for key, one in recorded if not one.report.host_nodes)

    def prompt_graph(self, count: int) -> Recorded | None:
        """The graph for a chunk of `count` prompt tokens; None without `prompts`."""
        key = min((key for key in self._prompts if key.tokens >= count), default=None)
        return None if key is None else self[self._serving.get(key, key)]
