"""Small engines with shared pages, a draft that stores cache entries ahead of their tokens, and a check of every cache write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph import Engine, EngineConfig, Job
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers, TapeBackend
from stepgraph.graphs.buffers import storage_key
from stepgraph.graphs.model import DraftModel
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models import toy
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.models.toy import ToyDraft
from tests.helpers.toy_engines import TARGET, VOCABULARY
from tools.random_weights import randomised

PAGE, K = 4, 3
CONFIG = EngineConfig(
    max_rows=3,
    num_speculative_tokens=K,
    draft_length=K,
    max_length=48,
    page_size=PAGE,
    num_pages=30,
    prefill_chunk=7,
    backend="tape",
    buckets=(3,),
    compile_isolation="none",
)
SYSTEM = [(index * 5 + 3) % 90 for index in range(17)]


class AheadDraft(ToyDraft):
    """Stores the entry of a token `lookahead` positions earlier, as trained heads do. One wrong entry changes all later drafts."""

    def __init__(self, lookahead: int) -> None:
        super().__init__(TARGET)
        self.lookahead = lookahead

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return tuple(BufferSpec(f"ahead_{name}", (limits.cache_slots,), torch.int64) for name in ("first", "later"))

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        size, ahead, positions = inputs.page_size, self.lookahead, inputs.positions
        early, entry = positions < ahead, (positions - ahead).clamp(min=0)
        slots = inputs.block_tables.gather(1, entry // size) * size + entry % size
        mine = (inputs.slots >= size) & ~early & (positions >= inputs.shared + ahead)
        buffers.ahead_first.index_put_((torch.where(early, inputs.slots, 0),), inputs.tokens)
        buffers.ahead_later.index_put_((torch.where(mine, slots, 0),), inputs.tokens)
        entries = (inputs.block_tables[:, :, None] * size + torch.arange(size, device=positions.device)).flatten(1)
        indices = torch.arange(entries.shape[1], device=positions.device)
        text = torch.where(indices < ahead, buffers.ahead_first[entries], buffers.ahead_later[entries].roll(ahead, 1))
        own = toy.hash_pair(text, indices).cumsum(1).gather(1, positions) & toy._MASK
        expected = (inputs.features[..., 0].to(torch.int64) + toy.hash_pair(inputs.tokens, positions)) & toy._MASK
        hidden = torch.where(own == expected, own, own ^ 1)[..., None].to(torch.float64)
        return ModelOutput(hidden, hidden)


DRAFTS: dict[str, Callable[[], DraftModel | None]] = {
    "none": lambda: None,
    "at its token": lambda: ToyDraft(TARGET),
    "one ahead": lambda: AheadDraft(1),
    "two ahead": lambda: AheadDraft(2),
}


def make_engine(draft: str, asynchronous: bool = True, **changes: Any) -> Engine:
    drafts = K if draft != "none" else 0
    config = replace(CONFIG, **{"num_speculative_tokens": drafts, "draft_length": drafts, "greedy_only": True} | changes)
    engine = Engine(TARGET, DRAFTS[draft](), vocabulary=VOCABULARY, config=config, backend=TapeBackend(asynchronous=asynchronous))
    engine.ensure_captured()
    return engine


class NoSharedWrites(TorchDispatchMode):
    """Fails on any write to a published page. For a synchronous, eager engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        models = [model for model in engine._parts.models if model is not None]
        self.caches = {storage_key(engine.buffers[spec.name]) for model in models for spec in model.cache_specs(engine.limits)}
        self.prefixes, self.writes = engine._scheduler.rows.page_cache, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | (kwargs or {})
        changed = [argument.name for argument in func._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
        if any(storage_key(taken[name]) in self.caches for name in changed if isinstance(taken[name], Tensor)):
            self.writes += 1
            slots = taken["indices"][-1] if func is torch.ops.aten.index_put_.default else taken["slots"]
            written, known = set((slots // PAGE).flatten().tolist()), {page.page for page in self.prefixes._published.values()}
            assert not written & known, f"published pages {written & known} were written"
        return func(*args, **kwargs or {})


@functools.cache
def watched_engine(draft: str) -> Engine:
    return make_engine(draft, asynchronous=False, eager=True)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, engine.limits.num_pages)


def ask(engine: Engine, prompt: Sequence[int], count: int = 9, **options: Any) -> Job:
    return engine.submit(list(prompt), max_new_tokens=count, **options)


def rounds_of(job: Job, drafts: int) -> int:
    """Rounds of a job with a perfect draft: the first has no drafts, all others accept every draft."""
    return 1 + -(-(len(job.tokens) - 1) // (drafts + 1))


def small_llama() -> Llama:
    shape = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_size=8, windows=(None,) * 2)
    return randomised(Llama(shape, feature_layers=(0, 1, 2)), 3)
