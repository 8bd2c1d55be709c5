"""FlashInfer's paged attention: planned on the host outside a graph, run inside. Imported only where it was chosen.

The host knows a prompt's lengths, so every chunk is planned exactly. A round is planned once, for rows of maximum length; the actual
lengths are written on the device before it runs. Its keys are not split: the parts of a plan for long rows would begin after the end
of a short one. FlashInfer's graph mode is not used: without a split it launches programs for rows that do not exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flashinfer
import torch
from torch import Tensor

from stepgraph.graphs.attention.row_tables import INDEX, RowTables
from stepgraph.graphs.model import AttentionShape
from stepgraph.graphs.model_call import Attend, ModelInput

MAX_TILE_ROWS = 128  # rows of queries per program of FlashInfer
PLANS_IN_FLIGHT = 8  # prompt plans queued on the device before the host waits
PLAN_BYTES = 1 << 20  # of one prompt's plan


class PlanArguments(NamedTuple):
    """The arguments of FlashInfer's `plan`, under their names, besides lengths and tables."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    q_data_type: torch.dtype
    window_left: int  # visible positions before the query's own; -1: all
    sm_scale: float
    page_size: int
    causal: bool = True


class PlannedAttention:
    """The plans of one engine: one for each kind of round, and a ring of plans for prompts."""

    def __init__(self, device: torch.device, page_size: int, shapes: tuple[AttentionShape, ...]) -> None:
        self.page_size = page_size
        self._device = device
        self._rounds: dict[tuple[int, int, int, PlanArguments], RoundPlan] = {}
        programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        groups, size = max(shape.heads // shape.kv_heads for shape in shapes), max(shape.size for shape in shapes)
        # If the keys of a prompt are split, every program stores float32 sums and one weight for each row of queries.
        self._sums = torch.empty(4 * programs * groups * MAX_TILE_ROWS * (size + 1) + 4096, dtype=torch.uint8, device=device)
        self._prompts: list[PromptPlan] = []
        self._next_index = 0

    def rounds(self) -> Attend:
        """ModelInput.attend for one call of a model with the rows of a round. The lengths are written before the first layer."""
        written: dict[RoundPlan, Tensor] = {}

        def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
            batch, count, heads, size = query.shape
            call = PlanArguments(heads, keys.shape[1], size, query.dtype, window - 1, scale, self.page_size)
            plan = self._round_plan(batch, count, inputs.block_tables.shape[1], call)
            if written.get(plan) is not inputs.slots:
                plan.tables.write(inputs)
                written[plan] = inputs.slots
            output.zero_()  # rows without a live position are not written
            _run(plan.wrapper, self.page_size, query, keys, values, output)

        return attend

    def prompt(self, first: int, count: int) -> Attend:
        """ModelInput.attend for one call of a model with `count` tokens of a prompt from position `first` on. Layers share a plan."""
        plans: dict[PlanArguments, PromptPlan] = {}

        def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
            assert query.shape[:2] == (1, count), f"planned for {count} tokens of one prompt, got {query.shape}"
            call = PlanArguments(query.shape[2], keys.shape[1], query.shape[3], query.dtype, window - 1, scale, self.page_size)
            if call not in plans:
                plans[call] = self._next_prompt()
                plans[call].plan(first, count, inputs.block_tables, call)
            _run(plans[call].wrapper, self.page_size, query, keys, values, output)

        return attend

    def _round_plan(self, batch: int, count: int, pages: int, call: PlanArguments) -> RoundPlan:
        key = (batch, count, pages, call)
        if key not in self._rounds:
            assert not torch.cuda.is_current_stream_capturing(), f"{key} appeared in a capture but not in its warm-up"
            self._rounds[key] = RoundPlan(self._device, batch, count, pages, call)
        return self._rounds[key]

    def _next_prompt(self) -> PromptPlan:
        index, self._next_index = self._next_index, (self._next_index + 1) % PLANS_IN_FLIGHT
        if index == len(self._prompts):
            self._prompts.append(PromptPlan(self._device, self._sums))
        return self._prompts[index]


class PromptPlan:
    """A reusable plan for one chunk of a prompt. Its pinned memory is overwritten only after the previous copy has read it."""

    def __init__(self, device: torch.device, sums: Tensor) -> None:
        self.wrapper = _wrapper(sums, PLAN_BYTES)
        self._lengths_host = torch.zeros(6, dtype=INDEX, pin_memory=True)
        self._upload_done: torch.cuda.Event | None = None

    def plan(self, first: int, count: int, block_tables: Tensor, call: PlanArguments) -> None:
        if self._upload_done is not None and not self._upload_done.query():
            self._upload_done.synchronize()
        pages, end = -(-(first + count) // call.page_size), first + count
        self._lengths_host.copy_(torch.tensor([0, count, 0, pages, end - (pages - 1) * call.page_size, end], dtype=INDEX))
        qo_indptr, kv_indptr, last_page, length = self._lengths_host.split([2, 2, 1, 1])
        entries = block_tables[0, :pages].to(INDEX)
        self.wrapper.plan(qo_indptr, kv_indptr, entries, last_page, seq_lens=length, **call._asdict())
        self._upload_done = torch.cuda.Event()
        self._upload_done.record()


class RoundPlan:
    """A permanent plan for rounds of one size; every round writes the tables that it reads."""

    def __init__(self, device: torch.device, batch: int, count: int, pages: int, call: PlanArguments) -> None:
        self.tables = RowTables(device, batch, count, pages, call.page_size)
        tiles = batch * -(-count * call.num_qo_heads // call.num_kv_heads // 16)
        self.wrapper = _wrapper(torch.empty(16, dtype=torch.uint8, device=device), (1 << 16) + 64 * tiles)
        starts = (self.tables.qo_indptr, self.tables.kv_indptr, self.tables.pages, self.tables.last_page)
        self.wrapper.plan(*starts, disable_split_kv=True, **call._asdict())


def _wrapper(sums: Tensor, plan_bytes: int) -> Any:
    """A wrapper with backend fa2: its programs read lengths on the device, those of fa3 take them from the plan."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(sums, "NHD", backend="fa2")
    wrapper.reset_workspace_buffer(sums, torch.empty(plan_bytes, dtype=torch.uint8, device=sums.device))
    return wrapper


def _run(wrapper: Any, page_size: int, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
    """Run without programmatic dependent launch, which would read the tables before the kernel that writes them has finished."""
    cache = tuple(part.view(-1, page_size, *part.shape[1:]) for part in (keys, values))
    wrapper.run(query.flatten(0, 1), cache, out=output.view(-1, *output.shape[2:]), enable_pdl=False)
