"""Records a step: every aten operation, event, wait and host node with its stream, source line and memory accesses.

The operations run once on the real buffers, whose contents are then restored.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from stepgraph.graphs.buffers import StaticBuffers, storage_key
from stepgraph.graphs.capture import Step, check_pinned, native_entry, refusing_threads, run_step
from stepgraph.graphs.context import MAIN, NULL_CONTEXT, StreamEvent, temporarily_set, use_context
from stepgraph.graphs.errors import CaptureError, Site, call_site, fail, site_of_error
from stepgraph.graphs.memory import Backup
from stepgraph.graphs.spans import DEFAULT_STAGE
from stepgraph.graphs.tape.arena import Arena
from stepgraph.graphs.tape.races import Access, Leaf, Node, RaceChecker, TapeStreamEvent
from stepgraph.graphs.tape.replay_ops import OpCall, replay_of, signature, tensors_in
from stepgraph.graphs.tape.rules import Memory, Rules, check_plain, generator_key, has_rule


class Recorder(TorchDispatchMode):
    """One capture: a dispatch mode that sees operations, and the context for events and host nodes."""

    supports_higher_order_operators = True

    def __init__(
        self,
        buffers: StaticBuffers,
        generators: Sequence[torch.Generator],
        is_foreign: Callable[[int], bool],
        arena: Arena | None,  # None: intermediates stay where torch allocated them
        records_leaves: bool = False,
        wait_for_device: Callable[[], None] = lambda: None,  # waits for the operations of the step, where they run asynchronously
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wait_for_device = wait_for_device
        self.records_leaves = records_leaves  # whether leaves are recorded for a comparison with a second recording
        self.memory = Memory(buffers, is_foreign, arena)
        self.rules = Rules(self.memory, generators)
        self.races = RaceChecker(MAIN)
        self.nodes: list[Node] = []
        self._fills = {spec.name: spec.fill for spec in buffers.specs}
        self._backups: dict[int, Backup] = {}  # by storage, from before the first write
        self._stream, self._stage = MAIN, DEFAULT_STAGE
        self._capture = object()  # identifies the events of this capture; the recorder itself would be a cycle, which keeps memory alive
        self.paused = False
        self._failure: CaptureError | None = None
        self.reshaped: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}  # tensors whose shape the step changes; restores the first one
        self.draws = False  # whether the step draws from a generator
        self.autocast = self._outer_autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def record_step(self, step: Step) -> None:
        """Run `step` once, then restore buffers and generators."""
        self._states = states = self._generator_states()  # after the latest draw
        # A compiled function runs as it is: torch would compile the recorder, not the function.
        stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else NULL_CONTEXT
        torch.clear_autocast_cache()  # cached casts of weights would be unknown memory
        try:
            # in inference mode, composite operations would not be decomposed
            with _without_inference_mode(), use_context(self), refusing_threads(), stance, self, _FunctionGuard(self):
                run_step(step, self.memory.buffers)
            if self._failure is not None:  # the step caught it
                raise self._failure
            if self._states is not states:
                self._check_generators(Site("", 0))
            unjoined = self.races.unjoined()
            if unjoined is not None:
                raise fail("unjoined-fork", f"the main stream does not wait for {unjoined}", unjoined.site)
        except Exception as error:
            if type(error).__module__ != "torch._dynamo.exc" and "no rule registered for HOP" not in str(error):  # the latter by torch 2.8
                raise
            # The step imported dynamo, by torch.cond or another function that takes functions, so `stance` was not set.
            what = "torch compiles functions here, which is not recorded; keep the call inside a torch.library.custom_op"
            raise fail("higher-order", what, site_of_error(error)) from error
        finally:
            self.draws = not all(map(torch.equal, self._states, states))
            torch.clear_autocast_cache()
            self.wait_for_device()  # a tensor in host memory is restored at once, before copies to it that are still to run
            for saved in self._backups.values():
                saved.restore()
            self._backups.clear()
            for generator, state in zip(self.rules.generators.values(), states, strict=True):
                generator.set_state(state)

    def _generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.rules.generators.values()]

    def _check_generators(self, site: Site | None = None) -> None:
        if not all(map(torch.equal, self._generator_states(), self._states)):
            raise fail("generator", "the step seeds a generator or sets its state, which a replay does not repeat", site)

    @property
    def shares_intermediates(self) -> bool:
        """Whether two streams use a tensor that the step created."""
        return any(map(self.races.is_shared, self.memory.intermediates))

    def unrecorded(self) -> _Unrecorded:
        """Run the recorder's own tensor operations unrecorded. Keeps a failure even if the step catches it."""
        return _Unrecorded(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and True would import the compiler, which takes a second."""
        return False

    # operations

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or func is torch.ops.aten.record_stream.default:
            return func(*args, **kwargs)
        with self.unrecorded():
            if isinstance(func, HigherOrderOperator):
                raise fail("higher-order", f"{func} calls functions, which are not recorded; keep it inside a torch.library.custom_op")
            if not all([type(tensor) is Tensor for tensor in tensors_in([args, kwargs])]):
                # `module.to()` and `weight.data = ...` give a parameter other memory; a graph keeps the memory that it was captured with.
                args, kwargs = tree_map_only(nn.Parameter, Tensor.detach, (args, kwargs))
            name, site = signature(func).name, call_site()
            self._join_or_fail(name)
            is_view = signature(func).view and not self.records_leaves and args and self.memory.has(args[0])
            if is_view and not args[0].is_inference():  # of an inference tensor `to` and `reshape` arrive here, which may copy
                self._add(Node("view", name.removeprefix("aten::"), self._stream, site))
                return func(*args, **kwargs)
            call = OpCall(func, args, kwargs)
            self._move_results([tensor for tensor in call.allocated if not self.memory.has(tensor)], call, site)
            self.rules.check_operation(call)
            is_custom = call.operation is None and not name.startswith("aten::")
            if draws := is_custom or call.schema.seeded:
                self._check_generators()
            for tensor in call.targets:
                self._back_up(tensor)
            if call.schema.outs:
                _check_out(call)
            if call.schema.inplace_view:
                made = args[0]
                place = made.shape, made.stride(), made.storage_offset()
                self.reshaped.setdefault(id(made), (made, functools.partial(made.as_strided_, *place)))
            result = call.run()
            check_plain(name, tensors_in(result))
            if is_custom:  # may keep its results, or expand them
                result = tree_map_only(Tensor, lambda each: each.clone() if 0 in each.stride() else each.detach(), result)
            self._add_operation(call, result, site)
            if draws:
                self._states = self._generator_states()
            return result

    def _move_results(self, fresh: Sequence[Tensor], call: OpCall, site: Site) -> None:
        """Move the results of a call to where replays find them."""
        if self.memory.arena is not None:
            self.memory.arena.move(fresh)
        intermediates = self.memory.intermediates
        for tensor in fresh:
            intermediates.setdefault(storage_key(tensor), (tensor, len(intermediates), call.schema.name.removeprefix("aten::"), site))

    def _add_operation(self, call: OpCall, result: object, site: Site) -> None:
        name, results = call.schema.name.removeprefix("aten::"), tensors_in(result)
        if name == "lift_fresh":
            for tensor in results:
                self.memory.literals[storage_key(tensor)] = tensor
            value = repr(result.item()) if isinstance(result, Tensor) else ""
            self._add(Node("view", name, self._stream, site, (("scalar", value),)))
            return
        known = {storage_key(tensor) for tensor in call.inputs}
        fresh = [tensor for tensor in results if storage_key(tensor) not in known]
        leaves = tuple(self._leaves(call.values)) if self.records_leaves else ()
        self._move_results(fresh, call, site)
        kind, replay_call = replay_of(call, result, results, fresh)
        if replay_call is not None and self.autocast != self._outer_autocast:
            replay_call = functools.partial(_call_under, self.autocast, replay_call)
        node = Node(kind, name, self._stream, site, leaves, replay_call)
        self._add(node)
        if replay_call is not None:
            reads = [tensor for tensor in call.inputs if not any(tensor is target for target in call.targets)]
            self._check_accesses(node, reads, [*call.targets, *fresh])
            if call.schema.seeded and call.values.get("dropout_p") != 0:
                generator = call.values.get("generator") or torch.default_generator
                self._check_access(generator_key(generator), Access(node, None, write=True))

    def _leaves(self, value: object) -> Iterator[Leaf]:
        if isinstance(value, Tensor):
            where = f"{tuple(value.shape)} {value.dtype}, strides {value.stride()}, offset {value.storage_offset()}"
            yield ("tensor", "a number") if self.memory.kind(value) == "literal" else ("tensor", f"{self.memory.name(value)} {where}")
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from self._leaves(item)
        elif isinstance(value, dict):
            yield from self._leaves(list(value.values()))
        elif not isinstance(value, torch.Generator):
            yield ("scalar", repr(value))

    def _back_up(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._backups and (owner := self.memory.buffers.owner_of(tensor)) is not None and owner[0] in self._fills:
            self._backups[key] = Backup(self.memory.buffers[owner[0]], self._fills[owner[0]])

    # order

    def _join_or_fail(self, what: str) -> None:
        if not self.races.joined(self._stream):
            message = f"{what} runs on stream {self._stream!r} before that stream waited for an event of this capture"
            raise fail("stream-outside-capture", message)

    def _check_accesses(self, node: Node, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.races.begin(node)
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel() and self.memory.kind(tensor) != "constant":  # constants are never written
                    self._check_access(storage_key(tensor), Access(node, tensor, write))

    def _check_access(self, key: int, access: Access) -> None:
        other = self.races.access(key, access)
        if other is not None:
            name = "a random generator" if access.tensor is None else self.memory.name(access.tensor)
            verbs = "writes" if other.write else "reads", "writes" if access.write else "reads"
            message = f"{other.node} {verbs[0]} {name}, and {access.node} {verbs[1]} it: nothing orders the two"
            raise fail("race", message, access.node.site)

    def _add(self, node: Node) -> None:
        node.stage = self._stage
        self.nodes.append(node)

    # CaptureContext

    def stream(self, name: str) -> AbstractContextManager[None]:
        return temporarily_set(self, "_stream", name)

    def stage(self, name: str) -> AbstractContextManager[None]:
        return temporarily_set(self, "_stage", name)

    def record(self) -> StreamEvent:
        with self.unrecorded():
            self._join_or_fail("record()")
            number = sum(node.kind == "record" for node in self.nodes)
            event = TapeStreamEvent(number, self._stream, self.races.record(self._stream), self._capture)
            self._add(Node("record", "record", self._stream, call_site(), event=event))
            return event

    def wait(self, event: StreamEvent) -> None:
        with self.unrecorded():
            if not isinstance(event, TapeStreamEvent) or event.capture is not self._capture:
                raise fail("foreign-event", "wait() for an event that was not recorded in this capture")
            self.races.wait(self._stream, event.clock)
            leaves: tuple[Leaf, ...] = (("tensor", f"event {event.number}"),)
            self._add(Node("wait", "wait", self._stream, call_site(), leaves, event=event))

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        with self.unrecorded():
            self._join_or_fail(f"host node {name!r}")
            native_entry(name, function)  # checks it
            check_pinned(name, (*reads, *writes), self.memory.buffers, self.memory.name)
            leaves = tuple(self._leaves([*reads, *writes]))
            node = Node("host", name, self._stream, call_site(), leaves, function, writes=tuple(writes))
            self._add(node)
            self._check_accesses(node, reads, writes)


class _Unrecorded:
    """See Recorder.unrecorded(). A class, since a generator takes three times as long, and every operation enters one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._before = recorder, recorder.paused

    def __enter__(self) -> None:
        self._recorder.paused = True

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, CaptureError):
            self._recorder._failure = self._recorder._failure or error
        self._recorder.paused = self._before


class _FunctionGuard(TorchFunctionMode):
    """Checks Python calls that do not become an operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, rules = kwargs or {}, self._recorder.rules
        if self._recorder.paused:
            return func(*args, **kwargs)
        self._recorder.autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")  # always off in a dispatch mode
        if has_rule(func):
            with self._recorder.unrecorded():
                rules.check_function(func, args, kwargs)
        if func is one_hot and args and len(args) + len(kwargs) == 2 and (classes := [*args, *kwargs.values()][1]) >= 0:
            # As on CUDA; on the CPU torch compares the classes with the values, on the host.
            return args[0].new_zeros((*args[0].shape, classes)).scatter_(-1, args[0].unsqueeze(-1), 1)
        rules.function = getattr(func, "__name__", "")
        rules.scalar_store = func is Tensor.__setitem__ and isinstance(args[2], (bool, int, float, complex))
        try:
            # the step may enter inference mode, and a replay cannot write tensors that it makes
            with _without_inference_mode() if torch.is_inference_mode_enabled() else NULL_CONTEXT:
                return func(*args, **kwargs)
        finally:
            rules.function, rules.scalar_store = "", False


@contextlib.contextmanager
def _without_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _call_under(autocast: tuple[torch.dtype, bool], call: Callable[[], object]) -> None:
    with torch.autocast("cpu", *autocast):
        call()


def _check_out(call: OpCall) -> None:
    outs = {name: call.kwargs[name] for name in call.schema.outs if isinstance(call.kwargs.get(name), Tensor)}
    trial = {name: tensor.new_empty(0) for name, tensor in outs.items()}  # empty tensors are resized without a warning
    call.func(*call.args, **{**call.kwargs, **trial})
    for name, tensor in outs.items():
        if trial[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, the result {tuple(trial[name].shape)}"
            raise fail("out-resize", f"{call.schema.name} would resize {name}=: it has shape {shapes}")


def record_perturbed(record: Callable[[], Recorder], buffers: StaticBuffers) -> Recorder:
    """Record with other buffer contents, to find values that the step read from them without an operation."""
    with contextlib.ExitStack() as restored:
        for name in buffers:
            restored.callback(buffers[name].copy_, buffers[name].clone())
            _perturb(buffers[name])
        try:
            return record()
        except CaptureError:
            raise
        except Exception:  # the altered values are invalid, such as an index out of range
            restored.close()
            return record()


def _perturb(tensor: torch.Tensor) -> None:
    if tensor.element_size() == 1:  # torch does not multiply float8
        tensor.view(torch.uint8).bitwise_xor_(1)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.copy_(torch.where(tensor.isfinite() & (tensor != 0.5), tensor * 0.5 + 0.25, 0.75))
    else:
        tensor.bitwise_xor_(1)


def first_difference(first: Sequence[Node], second: Sequence[Node]) -> CaptureError | None:
    """The first difference between two recordings: host state that a graph would freeze."""
    for a, b in zip(first, second, strict=False):
        if (a.name, a.stream, len(a.leaves)) != (b.name, b.stream, len(b.leaves)):
            return fail("baked-branch", f"{a} in one recording is {b} in the other: it depends on host state", b.site)
        changed = [(x, y) for x, y in zip(a.leaves, b.leaves, strict=True) if x != y]
        for x, y in sorted(changed):  # scalars first: tensor shapes may follow from them
            rule, kind = ("baked-scalar", "number") if x[0] == "scalar" else ("baked-branch", "tensor")
            return fail(rule, f"{a.name} got a different {kind} in each recording: {x[1]}, then {y[1]}", b.site)
    if len(first) != len(second):
        extra = max(first, second, key=len)[min(len(first), len(second))]
        return fail("baked-branch", f"{extra} is in one recording only: it depends on host state", extra.site)
    return None
