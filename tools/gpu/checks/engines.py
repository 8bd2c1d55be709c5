"""Checks of whole engines: every drafter, hundreds of rounds, both libraries, waits in steps, memory freed by close()."""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from stepgraph import Constraint, Engine, EngineConfig, Job
from stepgraph.graphs.attention.float8 import FLOAT8
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.models.draft_llama import DraftLlama
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.models.mtp import Mtp
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.models.toy import ToyDraft
from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from tests.helpers.oracles import accepts, greedy
from tools.gpu.checks.context import (
    CONSTRAINTS,
    ORACLE_TARGET,
    STOP,
    VOCABULARY,
    Context,
    Figures,
    outcome,
    random_requests,
    serve,
    toy_target,
)
from tools.gpu.checks.shapes import TINY, fill, pair_of

MARKED = tuple(Constraint.regex("[a-c]{1,9}x?", library).after("b") for library in ("xgrammar", "llguidance"))


CONFIG = EngineConfig(
    max_rows=2,
    num_speculative_tokens=3,
    draft_length=3,
    max_length=96,
    page_size=8,
    prefill_chunk=5,
    buckets=(2,),
    compile_isolation="none",
)


def drafters_of(device: torch.device) -> Iterator[tuple[str, object, Drafter | str, dict[str, object]]]:
    """Name, target, drafter, config changes, for every kind of drafter."""
    pair, toy = pair_of(TINY, device), toy_target(device)
    yield "EAGLE-3", pair.target, pair.draft, {}
    plain = Llama(TINY.target, device=device)
    fill(plain, 3)
    for modules in (1, 3):
        config = replace(TINY.target, windows=(None,) * modules)
        mtp = Mtp(config, embedding=plain.embedding, head=plain.unembedding, device=device)
        fill(mtp, 4, spare=plain.embedding)
        yield f"MTP of {modules}", plain, mtp, {}
    model = DraftLlama(replace(TINY.target, windows=(None,)), device=device)
    fill(model, 5)
    yield "draft model", plain, model, {}
    yield "own vocabulary", toy, ToyDraft(toy, 0.9, d2t=[*range(len(VOCABULARY.tokens) - 1, -1, -2)]).to(device), {}
    yield "look-up beside a model", toy, ToyDraft(toy, 0.5).to(device), {"look_up": 2}
    yield "n-gram", toy, NgramLookup(), {}
    yield "n-gram, nothing forced", toy, NgramLookup(), {"forced_drafts": False}
    yield "forced", toy, "forced", {}
    yield "function", toy, _repeat_prompt, {"rounds_in_flight": 1}


def _repeat_prompt(job: Job) -> list[int]:
    """Host drafter: repeats the tokens of the prompt."""
    return [job.prompt_ids[(len(job.tokens) + index) % len(job.prompt_ids)] for index in range(3)]


def every_drafter_replays_as_eager(context: Context) -> Figures:
    """Captured engines emit the tokens of eager ones and end with equal caches: EAGLE-3, MTP, models, look-up, functions.

    The chunks of graphs are padded, so that their products may round differently: those caches are not compared.
    """
    figures = context.figures
    variants = tuple[dict[str, object], ...](({"prompt_graphs": False}, {"eager": True}, {}))[: 2 if context.rehearsal else 3]
    kinds = (False,) if context.rehearsal else (False, True)
    for sampled, (name, target, drafter, changes) in itertools.product(kinds, list(drafters_of(context.device))):
        if sampled and not context.fits(f"{name}, sampled keys"):
            continue
        outcomes = []
        for variant in variants:
            config = replace(CONFIG, greedy_only=not sampled, **changes, **variant)  # type: ignore[arg-type]
            with context.engine_of(target, drafter, config) as engine:
                jobs = serve(engine, [req._replace(cancel_after=None) for req in random_requests(11, 2 if context.rehearsal else 12, 3)])
                engine.backend.synchronize()
                page = engine.limits.page_size
                caches = {name: engine.buffers[name] for name in engine.buffers if name.endswith(("_cache", "_keys", "_values"))}
                outcomes.append(([outcome(job) for job in jobs], {name: _without_scratch(each, page) for name, each in caches.items()}))
                accepted = engine.stats().drafts.accepted
        (ours, kept), (theirs, expected), *others = outcomes
        assert ours == theirs, f"{name}: captured {ours}, eager {theirs}"
        assert not others or others[0][0] == theirs, f"{name}: with prompts in graphs {others[0][0]}, eager {theirs}"
        assert not any(reason == "error" for _, reason, _ in ours), f"{name}: {ours}"
        different = [key for key in kept if not torch.equal(kept[key], expected[key])]
        assert not different, f"{name}: {different} differ"
        figures[f"{name}{', sampled keys' if sampled else ''}"] = {"accepted_drafts": accepted}
    return figures


def adapters_and_small_caches_replay_as_eager(context: Context) -> Figures:
    """Captured engines emit the tokens of eager ones in batches with and without a LoRA adapter, and with keys and values in eight bits."""
    target, figures = pair_of(TINY, context.device).target, context.figures
    prompts = [[(5 * row + 3 * index) % 90 for index in range(9 + row)] for row in range(4)]
    for name, changes in (("adapter", {"max_loras": 1, "max_lora_rank": 8}), ("FP8 cache", {"kv_cache_dtype": FLOAT8})):
        texts = list[list[list[int]]]()
        for variant in ({"prompt_graphs": False}, {"eager": True}):
            config = replace(CONFIG, greedy_only=True, **changes, **variant)  # type: ignore[arg-type]
            with context.engine_of(target, NgramLookup(), config) as engine, tempfile.TemporaryDirectory() as folder:
                adapters = [""]
                if config.max_loras:
                    _save_adapter(Path(folder), TINY.target)
                    engine.add_lora("random", folder)
                    adapters.append("random")
                jobs = [engine.submit(prompt, max_new_tokens=24, lora_name=each) for prompt in prompts for each in adapters]
                for _ in engine.stream():
                    pass
                texts.append([job.tokens for job in jobs])
        ours, theirs = texts
        assert ours == theirs, f"{name}: captured {ours}, eager {theirs}"
        assert name != "adapter" or ours[::2] != ours[1::2], "the adapter changes no text"
        figures[name] = {"tokens": sum(map(len, ours))}
    return figures


def _save_adapter(folder: Path, config: LlamaConfig, rank: int = 8) -> None:
    """Random matrices for every projection of every layer, as PEFT stores them."""
    heads, groups = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    outer = {"q_proj": heads, "k_proj": groups, "v_proj": groups, "o_proj": config.hidden_size}
    outer |= {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size, "down_proj": config.hidden_size}
    inner = dict.fromkeys(outer, config.hidden_size) | {"o_proj": heads, "down_proj": config.intermediate_size}
    rng, tensors = torch.Generator().manual_seed(9), dict[str, torch.Tensor]()
    for (layer, _), name in itertools.product(enumerate(config.windows), outer):
        module = f"base_model.model.model.layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inner[name], generator=rng) * inner[name] ** -0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(outer[name], rank, generator=rng) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none", "target_modules": list(outer)}), encoding="utf-8"
    )


def _without_scratch(cache: torch.Tensor, page: int) -> torch.Tensor:
    """The cache without the first page of slots, where padding positions collide."""
    return (cache[page:] if cache.dim() == 1 else cache[:, page:]).cpu().nan_to_num()


def hundreds_of_rounds_replay_as_eager(context: Context) -> Figures:
    """A captured and an eager engine under the same random requests and cancels have equal rows after every step."""
    steps = 0
    for k, draft_masks in ((4, True), (2, False))[: 1 if context.rehearsal else 2]:
        with (
            context.engine(k, draft_masks=draft_masks) as captured,
            context.engine(k, draft_masks=draft_masks, eager=True) as eager,
        ):
            for seed in context.turns(context.count(8, 2) if not context.rehearsal else 1):
                steps += _compare_in_step(captured, eager, seed, 10 if context.rehearsal else 60, k)
    return {"steps": steps}


def _compare_in_step(captured: Engine, eager: Engine, seed: int, count: int, k: int) -> int:
    engines, steps = (captured, eager), 0
    jobs: list[tuple[int | None, int, tuple[Job, ...]]] = []
    reqs = random_requests(500 + seed, count, k)
    for constraint in filter(None, CONSTRAINTS):
        for engine in engines:
            engine.compile(constraint)
    while reqs or captured.has_work or eager.has_work:
        while reqs and len(jobs) * 2 <= steps:
            req = reqs.pop()
            args = {"max_new_tokens": req.max_new_tokens, "num_speculative_tokens": req.drafts, "constraint": req.constraint}
            jobs.append((req.cancel_after, steps, tuple(engine.submit(req.prompt, **args) for engine in engines)))  # type: ignore[call-overload]
        for cancel_after, submitted_at, both in jobs:
            if cancel_after == steps - submitted_at:
                for engine, job in zip(engines, both, strict=True):
                    engine.cancel(job)
        for engine in engines:
            engine.step()
            engine.backend.synchronize()
        rows = captured.limits.max_rows
        for name in ("row_state", "row_drafts", "row_output_counts"):
            ours, theirs = (engine.buffers[name][:rows] for engine in engines)
            assert torch.equal(ours, theirs), f"seed {seed}, step {steps}: {name} differs"
        steps += 1
    for _, _, (ours_, theirs_) in jobs:
        assert outcome(ours_) == outcome(theirs_), f"seed {seed}: {outcome(ours_)}, eagerly {outcome(theirs_)}"
    return steps


def both_libraries_match_oracle(context: Context) -> Figures:
    """Engines with one grammar library each equal plain greedy decoding under its masks, also for constraints after markers."""
    found: Figures = {}
    libraries: tuple[BackendChoice, ...] = ("xgrammar", "llguidance")
    for library in libraries:
        try:
            compiler = GrammarCompiler(VOCABULARY, backend=library)
        except ValueError as missing:
            found[library] = str(missing)
            continue
        tokens, constraints = 0, (*filter(None, CONSTRAINTS), *(each for each in MARKED if each.backend == library))
        with context.engine(4, library=library) as engine:
            for seed in context.turns(context.count(6, 1)):
                reqs = [req._replace(cancel_after=None) for req in random_requests(900 + seed, 10, 4, constraints)]
                for req, job in zip(reqs, serve(engine, reqs), strict=True):
                    assert req.constraint is not None
                    grammar = compiler.compile(req.constraint)
                    assert grammar.backend == library, f"{req.constraint}: {grammar.backend}, {grammar.reason}"
                    answer = greedy(ORACLE_TARGET, req.prompt, req.max_new_tokens, (STOP,), grammar, len(VOCABULARY.tokens))
                    assert outcome(job) == (answer.tokens, answer.reason, ""), f"{req}: got {outcome(job)}, expected {answer}"
                    assert accepts(grammar, job.tokens, finished=str(job.finish_reason) == "constraint_complete")
                    tokens += len(job.tokens)
        found[library] = {"tokens": tokens}
    return found


def steps_never_wait(context: Context) -> Figures:
    """Engine steps under torch's sync debug mode "error": no wait, no allocation in steps without a prompt, no buffer moved."""
    rounds = 40 if context.rehearsal else 200
    with context.engine(4) as engine:
        for constraint in filter(None, CONSTRAINTS):
            engine.compile(constraint)
        serve(engine, random_requests(3, 2, 4))
        pointers, before = engine.buffers.fingerprint(), engine.stats()
        steady_steps = allocated = 0
        with context.no_sync():
            while engine.stats().rounds - before.rounds < rounds:
                stats = engine.stats()
                if stats.running + stats.waiting < engine.limits.max_rows:
                    turn = stats.submitted
                    engine.submit([turn % 90 + 1, 5, 9], constraint=CONSTRAINTS[turn % len(CONSTRAINTS)], max_new_tokens=30)
                held = _allocated(context)
                engine.step()
                if engine.stats().prompt_tokens == stats.prompt_tokens and engine.stats().rounds > stats.rounds:
                    steady_steps, allocated = steady_steps + 1, allocated + _allocated(context) - held
        after = engine.stats()
        assert engine.buffers.fingerprint() == pointers, "a buffer moved"
        assert after.host_syncs == before.host_syncs, "a step waited for the device"
        assert after.replays - before.replays == after.rounds - before.rounds
        assert allocated == 0, f"{allocated} bytes allocated in {steady_steps} steps without a prompt"
        assert steady_steps > 0
    return {"rounds": after.rounds - before.rounds, "steps_without_a_prompt": steady_steps}


def _allocated(context: Context) -> int:
    """Bytes allocated by torch so far, including freed ones."""
    return 0 if context.on_tape else int(torch.cuda.memory_stats(context.device)["allocated_bytes.all.allocated"])


def closing_frees_everything(context: Context) -> Figures:
    """Closed engines release their buffers, threads and device memory."""
    turns = 1 if context.rehearsal else context.count(6, 3)
    _use_one(context)  # allocates what torch and its libraries keep
    threads, free = threading.active_count(), _free(context)
    kept = [_use_one(context) for _ in range(turns)]
    gc.collect()
    alive = sum(reference() is not None for reference in kept)
    assert alive == 0, f"the buffers of {alive} of {turns} closed engines are alive"
    assert threading.active_count() <= threads, f"{threading.active_count()} threads, {threads} before"
    lost = free - _free(context)
    assert lost <= 4 << 20, f"{lost} bytes of device memory were not freed"  # the allocation unit of the driver
    return {"engines": turns, "bytes_less_free": lost}


def _use_one(context: Context) -> weakref.ref[object]:
    with context.engine(2) as engine:
        serve(engine, random_requests(5, 3, 2))
        return weakref.ref(engine.buffers)


def _free(context: Context) -> int:
    gc.collect()
    if context.on_tape:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
