"""The recorded rounds and prompt chunks of an engine: their keys, recorded within a memory budget, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, cast

from tqdm import tqdm

from stepgraph.graphs.backends import EagerStep
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Recorded, Step
from stepgraph.graphs.errors import MEMORY_SETTINGS, CaptureError, step_errors
from stepgraph.graphs.graph_key import FULL, FULL_LENGTH, PLAIN, Drafting, GraphKey, GraphTable
from stepgraph.graphs.memory import resident_bytes
from stepgraph.graphs.prefill import PromptKey, Prompts, prompt_keys
from stepgraph.graphs.spans import RecordedReport
from stepgraph.sampling.fields import clip_repr, is_int, is_list_like


def bucket_sizes(max_rows: int, buckets: Iterable[int] | None = None) -> tuple[int, ...]:
    """The buckets sorted; None: powers of two below `max_rows`, and `max_rows`. ValueError if the largest is not `max_rows`."""
    if buckets is None:
        return (*(1 << power for power in range((max_rows - 1).bit_length())), max_rows)
    sizes = tuple(buckets) if is_list_like(buckets) else ()
    if not all(is_int(size) and size >= 1 for size in sizes) or max(sizes, default=0) != max_rows:
        raise ValueError(f"buckets: got {clip_repr(buckets)}, expected integers >= 1 of which the largest is max_rows={max_rows}")
    return tuple(sorted(set(sizes)))


def host_buckets(buckets: Iterable[int]) -> tuple[int, ...]:
    """Every other bucket, the largest included: the sizes with graphs for grammars on the host where grammars may be on the device.

    Few batches need these graphs, and each also has the kernels for grammars on the device.
    """
    return tuple(sorted(buckets)[::-2][::-1])


def draft_choices(longest: int, model: bool, look_up: bool) -> tuple[Drafting, ...]:
    """The drafting choices of an engine, by length; each has its own graphs. look_up: there is one beside the draft model.

    Without a model there are two: the time of a proposed chain hardly depends on its length.
    """
    lengths = sorted({0, (longest // 2 if model else 0) or longest, longest})
    return (*map(Drafting, lengths), *([Drafting(longest, model=False)] if look_up else []))


def host_drafting(drafting: Sequence[Drafting]) -> tuple[Drafting, ...]:
    """No drafts and the most drafts: the choices for grammars on the host where grammars may be on the device. See `host_buckets`."""
    most = min(drafting, key=_longest_first)
    return tuple(each for each in drafting if each in (PLAIN, most))


def _longest_first(drafting: Drafting) -> tuple[bool, int, bool]:
    return drafting.length != FULL_LENGTH, -drafting.length, not drafting.model


def graph_keys(
    buckets: Iterable[int], greedy_only: bool = False, device: bool = False, drafting: Sequence[Drafting] = (FULL,)
) -> tuple[GraphKey, ...]:
    """Every key, largest first: the memory pool then places the small graphs in the memory of the large ones.

    device: grammars may be on the device. The constrained graphs then serve batches that also have grammars on the host.
    """
    sizes = sorted(buckets, reverse=True)
    host_choices = (host_buckets(sizes), host_drafting(drafting)) if device else (sizes, drafting)
    # constrained, on the device, rows and drafts
    grammar_kinds = ((True, True, sizes if device else (), drafting), (True, False, *host_choices), (False, False, sizes, drafting))
    sampled_modes = (False,) if greedy_only else (True, False)
    return tuple(
        GraphKey(rows, constrained, sampled, on_device, *each)
        for rows in sizes
        for each in sorted(drafting, key=_longest_first)
        for constrained, on_device, sizes_of_kind, drafts in grammar_kinds
        if rows in sizes_of_kind and each in drafts
        for sampled in sampled_modes
    )


OnFailure = Literal["raise", "eager"]
Key = GraphKey | PromptKey


@dataclass(frozen=True)
class FailedKey:
    """A key that could not be recorded. Its batches or chunks use the next larger graph of the same kind, or run eagerly."""

    key: Key
    why: str
    served_by: Key | None

    def __str__(self) -> str:
        served = f"replayed as {self.served_by}" if self.served_by else "run eagerly"
        uses = "batches" if isinstance(self.key, GraphKey) else "chunks"
        return f"{self.key} is not captured, its {uses} are {served}: {self.why.splitlines()[0]}"


@dataclass(frozen=True)
class CaptureReport:
    """The recorded keys with their size and duration. `str()` is a table, `as_dict()` can be serialised to JSON."""

    backend: str
    mode: str  # "captured", or "eager" with EngineConfig.eager
    notes: tuple[str, ...]
    keys: tuple[tuple[GraphKey, RecordedReport], ...]
    prompts: tuple[tuple[PromptKey, RecordedReport], ...]
    buffer_bytes: int
    # Growth of the process while recording, its threads included; the static buffers were allocated before. None if unknown
    resident_bytes: int | None
    seconds: float
    failed: tuple[FailedKey, ...] = ()  # with on_capture_failure="eager"

    def as_dict(self) -> dict[str, object]:
        """The report without the nodes of the graphs."""
        found = asdict(self)
        for name in ("keys", "prompts"):
            found[name] = [{"key": key, **report} for key, report in found[name]]
            for row in found[name]:
                del row["graph_nodes"]
        return found

    def __str__(self) -> str:
        lines = [f"{'key':<32}{'nodes':>7}{'host nodes':>12}{'KiB':>9}{'ms':>8}"]
        for key, report in (*self.keys, *self.prompts):
            total = sum(report.nodes.values())
            lines.append(f"{key!s:<32}{total:>7}{len(report.host_nodes):>12}{_bytes_of(report) / 1024:>9.0f}{report.seconds * 1000:>8.0f}")
        graphs = [report for _, report in (*self.keys, *self.prompts)]
        grown = "" if self.resident_bytes is None else f"; the process grew by {self.resident_bytes / 1024:.0f} KiB beside static buffers"
        lines.append(
            f"{len(graphs)} graphs {self.mode} on {self.backend} in {self.seconds:.2f} s, "
            f"{self.buffer_bytes / 1024:.0f} KiB of static buffers, {sum(map(_bytes_of, graphs)) / 1024:.0f} KiB of graphs{grown}"
        )
        return "\n".join([*lines, *map(str, self.failed), *self.notes])


def _bytes_of(report: RecordedReport) -> int:
    return report.nbytes + report.host_bytes


class CaptureBudget:
    """Checks `limit` bytes for static buffers and graphs together; None: no limit. Graphs share the memory of their intermediates."""

    def __init__(self, limit: int | None, buffer_bytes: int) -> None:
        self._limit_bytes, self._buffer_bytes = limit, buffer_bytes
        self._pool_bytes = self._host_bytes = self._host_bytes_per_graph = 0
        self._fixed_bytes = self._bytes_per_row = 0.0
        self._measured_bytes: Mapping[Key, int] = {}

    @property
    def _used_bytes(self) -> int:
        return self._buffer_bytes + self._pool_bytes + self._host_bytes

    def set_estimates(self, probes: Sequence[tuple[int, int]], measured: Mapping[Key, int] | None = None, host_bytes: int = 0) -> None:
        """Take rows and bytes of one or two small graphs, from which the others are estimated: memory is linear in the rows.

        measured: bytes of graphs that need no estimate. host_bytes: host memory of each graph, which is not shared.
        """
        self._measured_bytes, self._host_bytes_per_graph = measured or {}, host_bytes
        (rows, nbytes), (more_rows, more_bytes) = probes[0], probes[-1]
        self._bytes_per_row = max(0, more_bytes - nbytes) / (more_rows - rows) if len(probes) > 1 else nbytes / rows
        self._fixed_bytes = max(0.0, nbytes - self._bytes_per_row * rows)

    def _expected_bytes(self, key: Key) -> float:
        return self._measured_bytes.get(key, self._fixed_bytes + self._bytes_per_row * key.rows)

    def estimate(self, keys: Sequence[Key]) -> int:
        """Bytes of static buffers and of these graphs."""
        return self._buffer_bytes + round(max(map(self._expected_bytes, keys))) + self._host_bytes_per_graph * len(keys)

    def check_all(self, keys: Sequence[Key]) -> None:
        """CaptureError if the estimate for these graphs exceeds the limit."""
        estimate = self.estimate(keys)
        parts = f"{self._buffer_bytes:,} bytes of static buffers and about {estimate - self._buffer_bytes:,} of {len(keys)} graphs"
        self._check(estimate, f"need about {estimate:,}, {parts}")

    def check_next(self, key: Key) -> None:
        """CaptureError if the graph of `key` is expected to exceed the limit."""
        more = max(0, round(self._expected_bytes(key)) - self._pool_bytes) + self._host_bytes_per_graph
        self._check(self._used_bytes + more, f"{key} would need about {more:,}, and {self._used_bytes:,} are used")

    def add(self, key: Key, nbytes: int, host_bytes: int = 0) -> None:
        """Count a recorded graph. CaptureError if it exceeds the limit; the caller then drops it."""
        self._check(self._used_bytes + nbytes + host_bytes, f"{key} needs {nbytes + host_bytes:,}, and {self._used_bytes:,} are used")
        self._pool_bytes += nbytes
        self._host_bytes += host_bytes

    def _check(self, needed: int, why: str) -> None:
        if self._limit_bytes is not None and needed > self._limit_bytes:
            raise CaptureError("memory", f"capture_bytes: got {self._limit_bytes:,}, {why}; lower {MEMORY_SETTINGS}")


EAGER_BY_CONFIG = "EngineConfig.eager"


class GraphSet(GraphTable):
    """One recording per key of `buckets`, which ascend, and of `prompts` if it is given. `step_of(key)` is the function to record.

    on_failure: with "eager", a key that cannot be recorded is listed in the report, and its batches use another key or run eagerly.
    capture_bytes: limit of static buffers and recordings together; None: no limit.
    device_grammars: also record graphs for batches whose grammars are all on the device. drafting: each has its own graphs.
    """

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        step_of: Callable[[GraphKey], Step],
        buckets: tuple[int, ...],
        on_failure: OnFailure = "raise",
        capture_bytes: int | None = None,
        device_grammars: bool = False,
        drafting: Sequence[Drafting] = (FULL,),
        prompts: Prompts | None = None,
    ) -> None:
        self._device_grammars, self._drafting, self._on_failure, self._capture_bytes = device_grammars, drafting, on_failure, capture_bytes
        self._backend, self._buffers, self._step_of, self._prompts = backend, buffers, step_of, prompts
        self._prompt_keys = prompt_keys(prompts.limits) if prompts else ()
        super().__init__(
            buckets, host_buckets(buckets) if device_grammars else buckets, GraphSet.record_one
        )  # a bound method would be a cycle
        self.eager: Mapping[GraphKey, str] = {}  # keys that run eagerly, and the reason

    def capture(self, notes: tuple[str, ...] = (), eager: bool = False, greedy_only: bool = False, progress: bool = False) -> CaptureReport:
        """Record every key, largest first, so that the small graphs use the memory of the large ones. An error changes nothing.

        Keys that were recorded on demand are not recorded again.
        """
        assert not self.complete, "all keys are recorded"
        keys = graph_keys(self.buckets, greedy_only, self._device_grammars, self._drafting)
        all_keys: list[Key] = [*self._prompt_keys, *keys]
        started, before = time.perf_counter(), resident_bytes()
        recorded, failures = dict[Key, Recorded](), dict[Key, str]()
        budget = CaptureBudget(self._capture_bytes, self._buffers.nbytes)
        if self._capture_bytes is not None and not eager:
            notes += (self._estimate_note(budget, all_keys),)
        # Also a bar that is not shown would start a thread for the whole process.
        for key in tqdm(all_keys, desc="capture", unit="graph", leave=False) if progress else all_keys:
            try:
                recorded[key] = self._recorded.get(key) or (self._eager_step(key) if eager else self._record_within(key, budget))
            except CaptureError as error:
                if self._on_failure == "raise":
                    raise
                failures[key] = str(error)
        failed = tuple(FailedKey(key, reason, _next_larger(key, recorded)) for key, reason in failures.items())
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
        eager_failures = [one for one in failed if one.served_by is None]
        self.records_on_demand = False
        self._recorded = recorded | {one.key: self._eager_step(one.key) for one in eager_failures}
        self._replacements, self._keys = {one.key: one.served_by for one in failed if one.served_by is not None}, {}
        not_captured = {one.key: f"not captured: {one.why.splitlines()[0]}" for one in eager_failures if isinstance(one.key, GraphKey)}
        self.eager = dict.fromkeys(keys, EAGER_BY_CONFIG) if eager else not_captured
        return report

    @property
    def without_host_nodes(self) -> frozenset[GraphKey]:
        """The keys whose graphs can run many rounds in one launch."""
        recorded = ((key, one) for key, one in self._recorded.items() if isinstance(key, GraphKey) and key not in self.eager)
        return frozenset(key for key, one in recorded if not one.report.host_nodes)

    def prompt_graph(self, count: int) -> Recorded | None:
        """The graph for a chunk of `count` prompt tokens; None without `prompts`."""
        key = min((key for key in self._prompt_keys if key.tokens >= count), default=None)
        return None if key is None else self[self._replacements.get(key, key)]

    def record_one(self, key: Key) -> Recorded:
        """Record a key while rounds of others may be in flight."""
        backend = self._backend
        launched = backend.copy_aside(lambda: None, after_launched=True) if self.records_on_demand else backend.event()
        launched.wait()  # raises the errors of these rounds and of copies beside them, which are not those of the step
        with step_errors(f"capture of {key}", self._buffers.device):
            return self._backend.capture(self.step(key), self._buffers)

    def step(self, key: Key) -> Step:
        return self._step_of(key) if isinstance(key, GraphKey) else cast("Prompts", self._prompts).step(key)

    def _eager_step(self, key: Key) -> EagerStep:
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

    def _estimate_note(self, budget: CaptureBudget, keys: Sequence[Key]) -> str:
        """A note with the estimated memory, from the two smallest keys of the largest kind, the smallest key, and those of prompts."""
        rounds = [key for key in reversed(keys) if isinstance(key, GraphKey)]
        probes = [key for key in rounds if key.kind == rounds[-1].kind][:2]
        try:
            reports = {key: self._measure(key) for key in (*probes, rounds[0])}
            prompts: dict[Key, int] = {key: self._measure(key).nbytes for key in keys if isinstance(key, PromptKey)}
            objects = reports[probes[0]].host_bytes + reports[rounds[0]].host_bytes
            budget.set_estimates([(key.rows, reports[key].nbytes) for key in probes], prompts, objects // 2)
        except CaptureError:
            if self._on_failure == "raise":
                raise
            return "memory of the graphs: no estimate, because the smallest graphs cannot be captured"
        if self._on_failure == "raise":
            budget.check_all(keys)
        return f"memory: about {budget.estimate(keys):,} of at most {self._capture_bytes:,} bytes, static buffers included"


def _next_larger(key: Key, recorded: Mapping[Key, Recorded]) -> Key | None:
    """The next larger key of the same kind that is recorded."""
    return min((other for other in recorded if other.kind == key.kind and other.rows > key.rows), default=None)
