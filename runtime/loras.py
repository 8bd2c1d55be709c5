"""The LoRA adapters of an engine, each in a slot of its static memory."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.layers.lora import LoraWeight
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.job import Lora
from stepgraph.runtime.models.files.lora import SlotContent, read_lora
from stepgraph.runtime.request_queue import RequestQueue
from stepgraph.sampling.fields import BOOL, Check, check_value, checked_path, clip_repr


def lora_weights(target: TargetModel, limits: Limits) -> dict[str, LoraWeight]:
    """The target's weights that adapters may change. ValueError if adapters are configured and the target has no such weights."""
    weights: dict[str, LoraWeight] = getattr(target, "lora_weights", {}) if limits.max_loras else {}
    if limits.max_loras and not weights:
        raise ValueError(f"EngineConfig.max_loras: got {limits.max_loras}, expected 0: {type(target).__name__} has no lora_weights")
    return weights


class LoraTable:
    """Adapters by name. A slot is free if no adapter and no unfinished request has it."""

    def __init__(self, target: TargetModel, limits: Limits, buffers: StaticBuffers, backend: Backend, queue: RequestQueue) -> None:
        self._weights, self._dtype = lora_weights(target, limits), target.feature_dtype
        self._limits, self._buffers, self._backend, self._queue = limits, buffers, backend, queue
        self.by_name: dict[str, Lora] = {}  # changed under the queue's lock
        self._serials = itertools.count(1)

    def find(self, name: Any) -> Lora:
        """The adapter of this name. ValueError if it is not loaded."""
        if name == "":
            return Lora()
        if not isinstance(name, str) or name not in self.by_name:
            loaded = f"one of {', '.join(map(repr, self.by_name))}, or '' for none" if self.by_name else "'': the engine has no adapters"
            raise ValueError(f"lora_name: got {clip_repr(name)}, expected {loaded}")
        return self.by_name[name]

    def read(self, name: Any, path: Any, replace: bool) -> dict[str, SlotContent]:
        """Read and check an adapter; returns the content of its slot."""
        if not self._weights:
            raise ValueError("Engine.add_lora: the engine has no slots for adapters, expected EngineConfig(max_loras=...) of at least 1")
        check_value("lora_name", name, Check(lambda value: isinstance(value, str) and value != "", "a name"))
        check_value("replace", replace, BOOL)
        self._require_new(name, replace)
        return read_lora(checked_path("lora_path", path), self._weights, self._limits.max_lora_rank, self._dtype)

    def add(self, name: str, contents: dict[str, SlotContent], replace: bool) -> None:
        """Fill a free slot, between rounds. The copy runs after earlier launches, which may still use the slot, and before later ones."""
        with self._queue.lock:
            self._require_new(name, replace)
            before, unfinished = self.by_name.get(name, Lora()), self._queue.unfinished
            others = (lora for lora in self.by_name.values() if lora.name != name)
            taken = {lora.slot for lora in (*others, *(queued.job.lora for queued in unfinished.values()))}
            free = [slot for slot in range(1, self._limits.max_loras + 1) if slot not in taken]
            if not free:
                expected = f"at most EngineConfig.max_loras={self._limits.max_loras} adapters, those of unfinished requests included"
                raise ValueError(f"lora_name: got {clip_repr(name)} with no free slot, expected {expected}")
            # From here on requests get it, also instead of a replaced one in this slot: none has a row before the step lock is free.
            slot = min(free, key=before.slot.__eq__)  # if possible not that of the replaced one, which a failure then leaves loaded
            self.by_name[name] = added = Lora(name, slot, next(self._serials))
        buffers = self._buffers

        def copy() -> None:
            for weight, content in contents.items():
                buffers[f"{weight}_down"][slot].copy_(content.down)
                buffers[f"{weight}_up"][slot].copy_(content.up)

        try:
            with torch.no_grad():
                self._backend.run(copy)
        except BaseException:
            with self._queue.lock:
                if self.by_name.pop(name, None) and before.slot not in (0, slot):
                    self.by_name[name] = before
                for job in [queued.job for queued in unfinished.values() if queued.job.lora == added]:
                    self._queue.cancel(job)
            raise

    def _require_new(self, name: str, replace: bool) -> None:
        if name in self.by_name and not replace:
            raise ValueError(f"lora_name: got {clip_repr(name)}, which is loaded, expected another name, or replace=True")

    def remove(self, name: str) -> bool:
        """Remove an adapter; False if it is not loaded. Requests that were submitted with it keep it."""
        with self._queue.lock:
            return self.by_name.pop(name, None) is not None
