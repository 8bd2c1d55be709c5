"""Counts the nodes that a round issues on CUDA, by stage, on the meta device: nothing is computed and no memory is used.

`python -m tests.helpers.node_counts` prints the counts for models of public sizes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.graphs.backends import EagerContext
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Step
from stepgraph.graphs.context import use_context
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.layers.lora import lora_specs
from stepgraph.graphs.layers.quantised import QuantKind, empty_packed
from stepgraph.graphs.limits import KvCacheDtype, Limits
from stepgraph.graphs.model import Models
from stepgraph.graphs.round import Round
from stepgraph.graphs.round_specs import forced_specs, grammar_specs, ring_specs, round_specs, skipped_specs
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import Llama
from stepgraph.sampling.grammar.automaton.grammar import TokenTensors
from stepgraph.sampling.grammar.link.protocol import HostLink, HostStep
from stepgraph.sampling.kernels.operation import OPERATIONS
from tools.gpu.checks.shapes import SHAPES, Shape

META = torch.device("meta")
# Launches of each Triton program's operation; 1 unless named. tests/stub_cuda compares the sums with captured graphs.
TWO_LAUNCHES = ("paged_attention", "masked_argmax", "reject_sample", "process_logits", "log_probabilities")
LAUNCHES = {**dict.fromkeys(TWO_LAUNCHES, 2), "distribution": 4, "draw": 5}
NO_KERNEL = set(
    "view _unsafe_view reshape expand slice select unsqueeze squeeze split split_with_sizes transpose permute t alias detach as_strided "
    "unfold unbind chunk view_as _reshape_alias lift_fresh empty empty_like empty_strided new_empty new_empty_strided".split()
)


class NodeCounter(TorchDispatchMode):
    """Counts operations that launch a kernel, a copy or a fill."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = "round"
        self.stages: Counter[str] = Counter()
        self.operations: Counter[tuple[str, str]] = Counter()  # by stage and name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name
        if name in OPERATIONS:
            self.count(name, LAUNCHES.get(OPERATIONS[name].name, 1))
            return None
        short = name.split("::")[1]
        if short not in NO_KERNEL:
            self.count(short)
        if short == "copy_":  # from or to pinned memory
            return args[0]
        return func(*args, **(kwargs or {}))

    def count(self, name: str, nodes: int = 1) -> None:
        self.stages[self.stage] += nodes
        self.operations[self.stage, name] += nodes


class CountingContext(EagerContext):
    """Stages of a round; a host node is one node, and is not called."""

    def __init__(self, counter: NodeCounter) -> None:
        super().__init__()
        self.counter = counter

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before, self.counter.stage = self.counter.stage, name
        try:
            yield
        finally:
            self.counter.stage = before

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        with self.stage(name):
            self.counter.count("host")


class NoLink:
    """Host nodes that do nothing."""

    def node(self, steps: Sequence[HostStep]) -> Callable[[], object]:
        return lambda: None


def make_round(
    shape: Shape,
    key: GraphKey,
    device: torch.device,
    drafts: int = 3,
    loras: int = 0,
    packed: QuantKind | None = None,
    cache: KvCacheDtype = "auto",
) -> tuple[Step, StaticBuffers]:
    """One round of a Llama target with an EAGLE-3 head, and its buffers. The weights are uninitialised, the vocabulary's tables empty.

    packed: how the target's matrices are quantised, if they are.
    """
    target, head = Llama(shape.target, feature_layers=shape.feature_layers, device=META if packed else device), shape.head
    if packed is not None:
        for name, weight in [(name, weight) for name, weight in target.named_parameters() if weight.dim() == 2]:
            module, _, parameter = name.rpartition(".")
            setattr(target.get_submodule(module), parameter, Parameter(empty_packed(packed, weight), requires_grad=False))
        target = target.to_empty(device=device)
    d2t = torch.zeros(head.draft_vocab_size, dtype=torch.int64, device=device)
    draft = Eagle3(head, d2t=d2t, embedding=target.embedding, device=device)
    sizes = key.rows, drafts, 1024, 16, 64 * key.rows, target.vocab_size, target.vocab_size, target.feature_size
    limits = Limits(*sizes, max_loras=loras, kv_cache_dtype=cache)
    grammars = grammar_specs(limits, 1 << 16, 16) if key.device else forced_specs(limits)
    specs = [*round_specs(limits), *ring_specs(limits), *grammars, *target.cache_specs(limits), *draft.cache_specs(limits)]
    specs += skipped_specs(limits, target.feature_dtype) if key.draft_length == 0 else ()
    specs += lora_specs(target.lora_weights if loras else {}, limits, target.feature_dtype)
    buffers = StaticBuffers(specs, device, constants={"target": target, "draft": draft})
    text, words = torch.zeros(1, dtype=torch.uint8, device=device), torch.zeros(limits.mask_words, dtype=torch.int32, device=device)
    starts = torch.zeros(limits.num_tokens + 1, dtype=torch.int32, device=device)
    tables = TokenTensors(text, starts, words[None], words) if key.device else None
    return Round(limits, Models(target, draft), cast("HostLink", NoLink()), tables=tables).step(key), buffers


def count_round(shape: Shape, key: GraphKey, drafts: int = 3, loras: int = 0, packed: QuantKind | None = None) -> NodeCounter:
    counter = NodeCounter()
    step, buffers = make_round(shape, key, META, drafts, loras, packed)
    with torch.no_grad(), use_context(CountingContext(counter)), counter:
        step(buffers)
    return counter


def main() -> None:
    for size, shape in SHAPES.items():
        lanes = ((False, False), (True, True), (True, False))  # without grammars, on the device, on the host
        for key in (GraphKey(1, constrained, sampled, device) for sampled in (False, True) for constrained, device in lanes):
            counter = count_round(shape, key)
            print(size, key, counter.stages.total())
            for stage, nodes in counter.stages.items():
                names = Counter({name: found for (where, name), found in counter.operations.items() if where == stage})
                print(f"    {nodes:5} {stage}: {', '.join(f'{found} {name}' for name, found in names.most_common())}")


if __name__ == "__main__":
    main()
