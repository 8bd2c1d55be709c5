"""Runs a step once more without references to its tensors, so that memory is freed where the step frees it, and finds

* memory that the allocator may give to an operation while another stream still uses it: a tensor is used on another stream than the one
  that made it, and dropped before its own stream waits for that use;
* tensors that the step keeps from one run to the next, whose contents a graph would freeze.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from stepgraph.graphs.buffers import storage_key
from stepgraph.graphs.capture import Step
from stepgraph.graphs.errors import call_site, fail
from stepgraph.graphs.tape.races import Clock, Node
from stepgraph.graphs.tape.recorder import Recorder
from stepgraph.graphs.tape.replay_ops import EMPTY, OpCall, tensors_in


@dataclass
class _Block:
    """Memory that the step allocated on `stream`."""

    stream: str
    ref: StorageWeakRef
    before: tuple[Node, ...]  # the operations that may still use the same memory
    uses: dict[str, Node] = field(default_factory=dict)  # the last one of each other stream
    is_deferred: bool = False  # by record_stream: the allocator reuses it after the capture


class _SecondRun(Recorder):
    def __init__(self, first: Recorder, is_kept: Callable[[Tensor], bool]) -> None:
        super().__init__(
            first.memory.buffers, tuple(first.rules.generators.values()), lambda key: False, None, False, first.wait_for_device
        )
        self._is_kept = is_kept
        self._blocks, self._shared = dict[int, _Block](), dict[int, _Block]()  # shared: used on other streams

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        with self.unrecorded():
            call = OpCall(func, args, kwargs or {})
            for tensor in call.targets:
                self._back_up(tensor)
            self._check_inputs(call)
            result = call.run()
            node = Node("kernel", call.schema.name.removeprefix("aten::"), self._stream, call_site())
            self.races.begin(node)
            runs = not call.schema.view and call.schema.name not in EMPTY
            for tensor in (*call.allocated, *tensors_in(result), *call.inputs):
                if self.memory.buffers.owner_of(tensor) is None:
                    self._use(tensor, node, runs)
            if call.schema.name == "aten::record_stream" and (block := self._blocks.get(storage_key(args[0]))):
                block.is_deferred = True
            return result

    def _check_inputs(self, call: OpCall) -> None:
        made = set(map(storage_key, call.allocated))
        for tensor in call.inputs:
            key, owner = storage_key(tensor), self.memory.buffers.owner_of(tensor)
            if owner is None and key not in self._blocks and key not in made and self._is_kept(tensor):
                what = f"{call.schema.name} uses a tensor {tuple(tensor.shape)} {tensor.dtype} that the step kept from an earlier run"
                remedy = "make it before the capture and pass it as a constant"
                raise fail("kept-tensor", f"{what}, so a graph would not compute it again; {remedy}")

    def _use(self, tensor: Tensor, node: Node, runs: bool) -> None:
        key = storage_key(tensor)
        if key not in self._blocks:
            self._blocks[key] = _Block(self._stream, StorageWeakRef(tensor.untyped_storage()), self._users_of_freed(node.clock))
        block = self._blocks[key]
        for other in block.before if runs else ():
            if not other.happens_before(node.clock):
                message = f"{node} may get the memory of a dropped tensor that {other} still uses: nothing orders the two"
                raise fail(
                    "race", f"{message}; keep the tensor until stream {block.stream!r} waits, or pass it through a buffer", node.site
                )
        if runs and node.stream != block.stream:
            block.uses[node.stream] = node
            self._shared[key] = block

    def _users_of_freed(self, clock: Clock) -> tuple[Node, ...]:
        """The operations that may use freed memory of the current stream while an operation with this clock runs."""
        freed = [each for each in self._shared.values() if each.stream == self._stream and not each.is_deferred and each.ref.expired()]
        return tuple(node for each in freed for node in each.uses.values() if not node.happens_before(clock))


def check_second_run(first: Recorder, step: Step, is_kept: Callable[[Tensor], bool]) -> None:
    """CaptureError if a second run of a step that was recorded finds a fault."""
    _SecondRun(first, is_kept).record_step(step)
