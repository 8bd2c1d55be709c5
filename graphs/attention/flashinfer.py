"""FlashInfer's paged attention: planned on the host, outside a graph; run inside. Imported only where it was chosen.

A prompt's lengths are known to the host, so that each chunk is planned as it is. A round is planned once, for the longest rows
that there can be; how long they are is written on the device before it runs. Its keys are not split then: the parts of a plan
for long rows would begin behind the end of a short one. FlashInfer's graph mode has no part in it: without a split it
launches programs for rows that do not exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flashinfer
import torch
from torch import Tensor

from stepgraph.graphs.attention.paged import AttentionShape
from stepgraph.graphs.attention.row_tables import INDEX, RowTables
from stepgraph.graphs.model import Attend, ModelInput

MOST_TILE = 128  # rows of queries that one of its programs takes
PLANS_ON_THEIR_WAY = 8  # prompt plans that may be waiting for the device before the host waits
PLAN_BYTES = 1 << 20  # of one prompt's plan


class Call(NamedTuple):
    """What one plan is for, but for its lengths."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    window: int  # 0: none
    scale: float

    def settings(self, page_size: int) -> dict[str, Any]:
        """For `plan`."""
        return {
            "num_qo_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim_qk": self.size,
            "page_size": page_size,
            "causal": True,
            "sm_scale": self.scale,
            "window_left": self.window - 1,  # how many before a query's own position; -1: all
            "q_data_type": self.dtype,
        }


class PlannedAttention:
    """What one engine keeps: a plan for each kind of round, and a ring of them for prompts."""

    def __init__(self, device: torch.device, page_size: int, shapes: tuple[AttentionShape, ...]) -> None:
        self.page_size = page_size
        self._device = device
        self._rounds: dict[tuple[int, int, int, Call], RoundPlan] = {}
        programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        groups, size = max(shape.heads // shape.kv_heads for shape in shapes), max(shape.size for shape in shapes)
        # Where the keys of a prompt are split, every program keeps its sums in float32; one line more for its weights.
        self._sums = torch.empty(4 * programs * groups * MOST_TILE * (size + 1) + 4096, dtype=torch.uint8, device=device)
        self._prompts: list[PromptPlan] = []
        self._next = 0

    def rounds(self) -> Attend:
        """For one call of a model with the rows of a round. The lengths are written before its first layer."""
        written: dict[RoundPlan, Tensor] = {}

        def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
            batch, count, heads, size = query.shape
            call = Call(heads, keys.shape[1], size, query.dtype, window, scale)
            plan = self._round_plan(batch, count, inputs.block_tables.shape[1], call)
            if written.get(plan) is not inputs.slots:
                plan.tables.write(inputs)
                written[plan] = inputs.slots
            output.zero_()  # rows without a live position are not written
            _run(plan.wrapper, self.page_size, query, keys, values, output)

        return attend

    def prompt(self, first: int, count: int) -> Attend:
        """For one call of a model with `count` tokens of one prompt from position `first` on. Its layers share a plan."""
        plans: dict[Call, PromptPlan] = {}

        def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
            assert query.shape[:2] == (1, count), f"planned for {count} tokens of one prompt, got {query.shape}"
            call = Call(query.shape[2], keys.shape[1], query.shape[3], query.dtype, window, scale)
            if call not in plans:
                plans[call] = self._next_prompt()
                plans[call].plan(first, count, inputs.block_tables, self.page_size, call)
            _run(plans[call].wrapper, self.page_size, query, keys, values, output)

        return attend

    def _round_plan(self, batch: int, count: int, pages: int, call: Call) -> RoundPlan:
        key = (batch, count, pages, call)
        if key not in self._rounds:
            assert not torch.cuda.is_current_stream_capturing(), f"a capture met {key}, which its warm-up did not"
            self._rounds[key] = RoundPlan(self._device, batch, count, pages, self.page_size, call)
        return self._rounds[key]

    def _next_prompt(self) -> PromptPlan:
        place, self._next = self._next, (self._next + 1) % PLANS_ON_THEIR_WAY
        if place == len(self._prompts):
            self._prompts.append(PromptPlan(self._device, self._sums))
        return self._prompts[place]


class PromptPlan:
    """A plan for one chunk of one prompt, made again and again. What it pins is written only once the copy before has read it."""

    def __init__(self, device: torch.device, sums: Tensor) -> None:
        self.wrapper = _wrapper(sums, PLAN_BYTES)
        self._lengths_host = torch.zeros(6, dtype=INDEX, pin_memory=True)
        self._sent: torch.cuda.Event | None = None

    def plan(self, first: int, count: int, block_tables: Tensor, page_size: int, call: Call) -> None:
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()
        pages = -(-(first + count) // page_size)
        self._lengths_host.copy_(torch.tensor([0, count, 0, pages, first + count - (pages - 1) * page_size, first + count], dtype=INDEX))
        qo_indptr, kv_indptr, last_page, length = self._lengths_host.split([2, 2, 1, 1])
        entries = block_tables[0, :pages].to(INDEX)
        self.wrapper.plan(qo_indptr, kv_indptr, entries, last_page, seq_lens=length, **call.settings(page_size))
        self._sent = torch.cuda.Event()
        self._sent.record()


class RoundPlan:
    """A plan for rounds of one size, which stays; the tables that it reads are written by every round."""

    def __init__(self, device: torch.device, batch: int, count: int, pages: int, page_size: int, call: Call) -> None:
        self.tables = RowTables(device, batch, count, pages, page_size)
        tiles = batch * -(-count * call.heads // call.kv_heads // 16)
        self.wrapper = _wrapper(torch.empty(16, dtype=torch.uint8, device=device), (1 << 16) + 64 * tiles)
        starts = (self.tables.qo_indptr, self.tables.kv_indptr, self.tables.pages, self.tables.last_page)
        self.wrapper.plan(*starts, disable_split_kv=True, **call.settings(page_size))


def _wrapper(sums: Tensor, plan_bytes: int) -> Any:
    """fa2, for its programs read lengths on the device; those of fa3 have them in the plan."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(sums, "NHD", backend="fa2")
    wrapper.reset_workspace_buffer(sums, torch.empty(plan_bytes, dtype=torch.uint8, device=sums.device))
    return wrapper


def _run(wrapper: Any, page_size: int, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
    """Without programmatic launches: with them it would read the tables before whoever writes those has finished."""
    cache = tuple(part.view(-1, page_size, *part.shape[1:]) for part in (keys, values))
    wrapper.run(query.flatten(0, 1), cache, out=output.view(-1, *output.shape[2:]), enable_pdl=False)
